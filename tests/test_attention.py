"""oomc::attention against attention written out in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from oomc import attention as module
from oomc import attention_kernels as kernels
from oomc import target
from oomc.attention import attention, attention_backward, attention_backward_in_place
from oomc.errors import UnsupportedError
from oomc.opdef import BODIES

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "segments": {"segments": True},
    "all": {"window": 9, "softcap": 3.0, "sinks": True, "segments": True},
}


def _inputs(
    dtype: torch.dtype,
    rows: int = 45,
    device: str = "cpu",
    heads: tuple[int, int] = (6, 2),
    sizes: tuple[int, int] = (16, 8),
) -> list[Tensor]:
    """q, k, v as a model makes them (heads inside), and sinks."""
    torch.manual_seed(0)
    hq, hkv = heads
    shapes = [(3, rows, hq, sizes[0]), (3, rows, hkv, sizes[0]), (3, rows, hkv, sizes[1])]
    leaves = [torch.randn(shape).to(device, dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    return [*leaves, torch.randn(hq).to(device, dtype).requires_grad_()]


def _arguments(inputs: list[Tensor], option: dict[str, Any]) -> tuple[Any, ...]:
    q, k, v, sinks = inputs
    rows = q.shape[2]
    segments = torch.stack([torch.arange(rows) // size for size in (rows, 10, 17)]).to(q.device)
    return (
        q, k, v, sinks if option.get("sinks") else None, segments if option.get("segments") else None, 0.3,
        option.get("causal", True), option.get("window"), option.get("softcap", 0.0),
    )  # fmt: skip


def _naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    segments: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    seen = torch.ones_like(i >= j)[None, None]
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        seen = seen & (j > i - window)
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    p = scores.float().softmax(-1).to(q.dtype) if q.dtype != torch.float64 else scores.softmax(-1)
    return p[..., : k.shape[2]] @ v, lse


def _distance(a: Tensor, b: Tensor) -> float:
    return float(((a.detach().double() - b.detach().double()).norm()) / b.detach().double().norm())


def _run(function: Any, arguments: tuple[Any, ...], seed: Tensor) -> list[Tensor]:
    out, lse = function(*arguments)
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def _exact(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


@pytest.mark.parametrize("small_tiles", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_fp32(name: str, small_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small_tiles:  # several tiles over batch, heads and rows, with ragged ends
        monkeypatch.setitem(module._SCORE_BYTES, "cpu", 4 * 3 * 45 * 7)
        monkeypatch.setattr(module, "_MIN_ROWS", 4)
    inputs = _inputs(torch.float32)
    seed = torch.randn(3, 6, 45, 8)
    got = _run(attention, _arguments(inputs, OPTIONS[name]), seed)
    want = _run(_naive, _arguments(_exact(inputs), OPTIONS[name]), seed)
    for a, b in zip(got, want, strict=True):
        assert _distance(a, b) < 1e-6


@pytest.mark.parametrize("name", OPTIONS)
def test_bf16_is_as_good_as_eager(name: str) -> None:
    inputs = _inputs(torch.bfloat16, 64)
    seed = torch.randn(3, 6, 64, 8).bfloat16()
    got = _run(attention, _arguments(inputs, OPTIONS[name]), seed)
    eager = _run(_naive, _arguments(inputs, OPTIONS[name]), seed)
    want = _run(_naive, _arguments(_exact(inputs), OPTIONS[name]), seed)
    for a, b, ref in zip(got, eager, want, strict=True):
        assert _distance(a, ref) <= 1.5 * _distance(b, ref)


def test_gradcheck() -> None:
    inputs = [x[:, :, :9] if x.dim() == 4 else x for x in _inputs(torch.float64)]
    leaves = [x.detach().requires_grad_() for x in inputs]
    segments = torch.arange(9).expand(3, 9) // 5
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: attention(q, k, v, s, segments, 0.3, True, 4, 2.0)[0], leaves, fast_mode=True
    )


@pytest.mark.parametrize("name", ["plain", "all"])
def test_registration(name: str) -> None:
    torch.library.opcheck(attention, _arguments(_inputs(torch.float32, 12), OPTIONS[name]))


def test_last_queries_of_longer_keys() -> None:
    q, k, v, _ = _inputs(torch.float32)
    whole, _ = attention(q, k, v, None, None, 0.3, True, 7, 0.0)
    part, _ = attention(q[:, :, 30:], k, v, None, None, 0.3, True, 7, 0.0)
    torch.testing.assert_close(part, whole[:, :, 30:])


def test_scores_are_never_whole() -> None:
    """2048 rows of 16 heads have 256 MiB of scores; the body takes an eighth of that at most, backward included."""
    q, k, v = (torch.randn(1, heads, 2048, 8) for heads in (16, 4, 4))
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        out, lse = attention(q, k, v, None, None, 0.3, True, None, 0.0)
        torch.ops.oomc.attention_backward(out, q, k, v, out, lse, None, None, 0.3, True, None, 0.0)
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 32 << 20


def test_backward_is_deterministic() -> None:
    arguments = _arguments(_inputs(torch.bfloat16), OPTIONS["all"])
    seed = torch.randn(3, 6, 45, 8)
    for a, b in zip(_run(attention, arguments, seed), _run(attention, arguments, seed), strict=True):
        assert torch.equal(a, b)


def test_refusals() -> None:
    q, k, v, _ = _inputs(torch.float32)
    with pytest.raises(UnsupportedError, match="window"):
        attention(q, k, v, None, None, 0.3, False, 7, 0.0)
    with pytest.raises(UnsupportedError, match="heads"):
        attention(q[:, :5], k, v, None, None, 0.3, True, None, 0.0)


def test_schemas_of_private_kernels() -> None:
    """What attention_kernels.py calls by position and keyword exists under these names."""
    flash = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    windows = {"scale", "window_size_left", "window_size_right"}
    saved = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    expected: dict[str, tuple[list[str], set[str]]] = {
        "_flash_attention_forward": ([*flash, "return_debug_mask"], windows),
        "_flash_attention_backward": ([*saved, *flash[3:], "rng_state", "unused"], windows),
        "_scaled_dot_product_cudnn_attention": (
            [*flash[:3], "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask"],
            {"scale"},
        ),
        "_scaled_dot_product_cudnn_attention_backward": (
            [*saved, "philox_seed", "philox_offset", "attn_bias", *flash[3:]],
            {"scale"},
        ),
    }
    for name, (positional, keywords) in expected.items():
        arguments = getattr(torch.ops.aten, name).default._schema.arguments
        assert [a.name for a in arguments if not a.kwarg_only] == positional, name
        assert keywords <= {a.name for a in arguments if a.kwarg_only}, name


@pytest.mark.parametrize("options", [(True, None, 0.0), (True, 9, 0.0)])
def test_kernels_take_fake_cuda_tensors(options: tuple[bool, int | None, float]) -> None:
    """Calls and shapes of the flash path, without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 33, h, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in (8, 2, 2))
        out, lse = BODIES[attention](q, k, v, None, None, 0.3, *options)
        grads = BODIES[module.attention_backward](out, q, k, v, out, lse, None, None, 0.3, *options)
    assert out.shape == (2, 8, 33, 64) and out.transpose(1, 2).is_contiguous() and out.device.type == "cuda"
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape, (0,)]


@pytest.mark.parametrize("in_place", [False, True])
def test_our_own_kernel_takes_fake_tensors(in_place: bool) -> None:
    """What it allocates, without a GPU: lies as models want it, and gradients where q, k and v are if asked for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), target.planning_for((9, 0)):
        q, k, v = (torch.empty(2, 33, h, 64, dtype=torch.bfloat16).transpose(1, 2) for h in (8, 2, 2))
        sinks, segments = torch.empty(8), torch.empty(2, 33, dtype=torch.int64)
        options = (segments, 0.3, True, None, 0.0)
        out, lse = BODIES[attention](q, k, v, sinks, *options)
        body = BODIES[attention_backward_in_place if in_place else module.attention_backward]
        found = body(out, q, k, v, out, lse, sinks, *options)
    assert out.shape == (2, 8, 33, 64) and out.transpose(1, 2).is_contiguous() and lse.dtype == torch.float32
    if in_place:
        assert found.shape == sinks.shape
    else:
        assert [g.shape for g in found] == [q.shape, k.shape, v.shape, sinks.shape]
        assert [g.stride() for g in found[:3]] == [q.stride(), k.stride(), v.stride()]


def _last(x: Tensor) -> int:
    """The largest offset within a tensor, in elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def test_kernels_get_no_offset_past_32_bits() -> None:
    """A million tokens of 32 heads: the kernels' own offsets would wrap, and do in cuDNN's backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[tuple[str, Tensor]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "flash_attention" in str(func):
                seen.extend((str(func), x) for x in args if isinstance(x, Tensor))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), target.planning_for((9, 0)):
        q, k, v = (torch.empty(1, 1 << 20, h, 128, dtype=torch.bfloat16).transpose(1, 2) for h in (32, 4, 4))
        assert _last(q) >= 1 << 31
        with Watch():
            out, lse = kernels.forward("flash", q, k, v, 0.1, True, None)
            dq, dk, dv = kernels.backward("flash", out, q, k, v, out, lse, 0.1, True, None)
    assert {name for name, _ in seen} == {f"aten._flash_attention_{way}.default" for way in ("forward", "backward")}
    assert all(_last(x) < 1 << 31 for _, x in seen)
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in (q, k, v)]


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_cuda_far_offsets(kernel: kernels.Kernel) -> None:
    """Two of 64 heads, whose last positions lie past the 2**31st element, as compact ones."""
    torch.manual_seed(0)
    shape = 1, (1 << 18) + 512, 64, 128
    whole = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, dout = (x[:, :, :2].transpose(1, 2) for x in whole)
    assert _last(q) >= 1 << 31
    near = [x.contiguous() for x in (q, k, v, dout)]
    far_out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)[:, :, :2].transpose(1, 2)

    def both_ways(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        forward = kernels._forward(kernel, q, k, v, 0.1, True, None)[0]
        return [forward, *kernels._backward(kernel, dout, q, k, v, out, lse, 0.1, True, None)]

    out, lse = kernels._forward(kernel, near[0], near[1], near[2], 0.1, True, None)
    wanted = both_ways(near[0], near[1], near[2], near[3], out, lse)
    found = both_ways(q, k, v, dout, far_out.copy_(out), lse)
    for one, other in zip(found, wanted, strict=True):
        assert _distance(one, other) < 2**-7  # the kernels add dq up in any order


CUDA_CASES: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "plain": ({}, (128, 128), "cudnn"),
    "full": ({"causal": False}, (64, 64), "cudnn"),
    "sinks": ({"sinks": True}, (64, 64), "triton"),
    "window": ({"window": 50}, (64, 64), "flash"),
    "window and sinks": ({"window": 50, "sinks": True}, (64, 64), "triton"),
    "MLA": ({}, (192, 128), "flash"),
    "small values": ({}, (64, 32), "cudnn"),
    "softcap": ({"softcap": 3.0}, (64, 64), "triton"),
    "segments": ({"segments": True}, (64, 64), "triton"),
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CUDA_CASES)
def test_cuda(name: str, dtype: torch.dtype) -> None:
    option, sizes, kernel = CUDA_CASES[name]
    inputs = _inputs(dtype, 333, "cuda", (8, 2), sizes)
    arguments = _arguments(inputs, option)
    q, k, v = inputs[:3]
    chosen = kernels.choose(
        q,
        k,
        v,
        bool(option.get("segments") or option.get("sinks")),
        option.get("causal", True),
        option.get("window"),
        option.get("softcap", 0.0),
    )
    assert chosen == kernel or (kernel == "cudnn" and torch.cuda.get_device_capability() < (9, 0))
    seed = torch.randn(3, 8, 333, sizes[1], device="cuda").to(dtype)
    got = _run(attention, arguments, seed)
    eager = _run(_naive, arguments, seed)
    want = _run(_naive, _arguments(_exact(inputs), option), seed)
    assert got[0].transpose(1, 2).is_contiguous()
    for a, b, ref in zip(got, eager, want, strict=True):
        assert _distance(a, ref) <= 1.5 * _distance(b, ref)


@pytest.mark.parametrize("bytes_a_call", [1, 4 * 9 * 8, 4 * 9 * 8 * 2, 4 * 9 * 8 * 4, 4 * 9 * 8 * 12, 1 << 30])
def test_calls_for_some_heads_give_what_one_call_gives(monkeypatch: pytest.MonkeyPatch, bytes_a_call: int) -> None:
    """The loop over batch rows and heads around a library's kernel, with plain torch in the kernel's place."""
    calls = []

    def forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None) -> Any:
        calls.append(q.shape[0] * q.shape[1])
        return tuple(attention(q, k, v, None, None, scale, causal, window, 0.0))

    def backward(
        kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
    ) -> Any:
        return attention_backward(dout, q, k, v, out, lse, None, None, *options, 0.0)[:3]

    monkeypatch.setattr(kernels, "_forward", forward)
    monkeypatch.setattr(kernels, "_backward", backward)
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", bytes_a_call)
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, h, 9, 8, dtype=torch.float64) for h in (8, 2, 2))
    dout = torch.randn(3, 8, 9, 8, dtype=torch.float64)
    out, lse = kernels.forward("flash", q, k, v, 0.3, True, None)
    wanted = attention(q, k, v, None, None, 0.3, True, None, 0.0)
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-6, rtol=1e-6)
    gradients = kernels.backward("flash", dout, q, k, v, wanted[0], wanted[1], 0.3, True, None)
    expected = attention_backward(dout, q, k, v, *wanted, None, None, 0.3, True, None, 0.0)[:3]
    for found, one in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-6, rtol=1e-6)  # sums of heads are in fp32
    assert sum(calls) == 3 * 8
    assert max(calls) <= max(1, bytes_a_call // (4 * 9 * 8))


IN_PLACE: dict[str, dict[str, Any]] = {**OPTIONS, "MQA": {"heads": (6, 1)}, "MHA": {"heads": (4, 4)}}


def _assert_in_place_is_equal(arguments: tuple[Any, ...], dout: Tensor) -> None:
    """The operator in place gives the bits of the other, in the memory and the strides of q, k and v.

    A library's kernel that adds dq up in any order, though asked to be deterministic, gives other bits in each call:
    then they are as close as two roundings to bf16.
    """
    q, k, v, *rest = (a.detach() if isinstance(a, Tensor) else a for a in arguments)
    out, lse = attention(q, k, v, *rest)
    sinks, segments, *options = rest
    kept = [x.clone() for x in (dout, out, lse)]
    *wanted, dsinks = attention_backward(dout, q, k, v, out, lse, sinks, segments, *options)
    again = attention_backward(dout, q, k, v, out, lse, sinks, segments, *options)
    lies = [(x.data_ptr(), x.stride()) for x in (q, k, v)]
    found = attention_backward_in_place(dout, q, k, v, out, lse, sinks, segments, *options)
    assert torch.equal(found, dsinks)
    assert lies == [(x.data_ptr(), x.stride()) for x in (q, k, v)]
    for got, want, twin in zip((q, k, v), wanted, again[:3], strict=True):
        if torch.equal(want, twin):
            assert torch.equal(got, want)
        else:
            assert q.is_cuda
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9 * float(want.abs().max()))
    assert all(map(torch.equal, (dout, out, lse), kept)), "it has written to what it only reads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small_tiles", [False, True])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_gives_the_same_bits(
    name: str, small_tiles: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_tiles:
        monkeypatch.setitem(module._SCORE_BYTES, "cpu", 4 * 3 * 45 * 7)
        monkeypatch.setattr(module, "_MIN_ROWS", 4)
    option = IN_PLACE[name]
    inputs = _inputs(dtype, heads=option.get("heads", (6, 2)))
    dout = torch.randn(3, 45, inputs[0].shape[1], 8).to(dtype).transpose(1, 2)
    _assert_in_place_is_equal(_arguments(inputs, option), dout)


def test_in_place_of_contiguous_heads() -> None:
    inputs = [x.detach().contiguous() for x in _inputs(torch.float32)]
    _assert_in_place_is_equal(_arguments(inputs, {}), torch.randn(3, 6, 45, 8))


def test_in_place_refuses_shared_memory() -> None:
    q, k, _, _ = (x.detach() for x in _inputs(torch.float32, sizes=(8, 8)))
    out, lse = attention(q, k, k, None, None, 0.3, True, None, 0.0)
    with pytest.raises(AssertionError, match="shares its memory"):
        BODIES[attention_backward_in_place](out, q, k, k, out, lse, None, None, 0.3, True, None, 0.0)
    with pytest.raises(AssertionError, match="shares its memory"):
        BODIES[attention_backward_in_place](q, q, k, k.clone(), out, lse, None, None, 0.3, True, None, 0.0)


@pytest.mark.parametrize("bytes_a_call", [1, 4 * 9 * 8 * 2, 4 * 9 * 8 * 4, 4 * 9 * 8 * 12, 1 << 30])
def test_calls_for_some_heads_in_place(monkeypatch: pytest.MonkeyPatch, bytes_a_call: int) -> None:
    """As above, of the loop around a library's kernel: what a part overwrites is read by no part after it."""

    def backward(
        kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
    ) -> Any:
        return attention_backward(dout, q, k, v, out, lse, None, None, *options, 0.0)[:3]

    monkeypatch.setattr(kernels, "_backward", backward)
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", bytes_a_call)
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 9, h, 8, dtype=torch.bfloat16).transpose(1, 2) for h in (8, 2, 2))
    dout = torch.randn(3, 8, 9, 8, dtype=torch.bfloat16)
    out, lse = attention(q, k, v, None, None, 0.3, True, None, 0.0)
    wanted = kernels.backward("flash", dout, q, k, v, out, lse, 0.3, True, None)
    found = kernels.backward("flash", dout, q, k, v, out, lse, 0.3, True, None, in_place=True)
    for got, want, memory in zip(found, wanted, (q, k, v), strict=True):
        assert got is memory and torch.equal(got, want)


@pytest.mark.cuda
@pytest.mark.parametrize("bytes_a_call", [4 * 333 * 64 * 2, 512 << 20])
@pytest.mark.parametrize("name", CUDA_CASES)
def test_cuda_in_place(monkeypatch: pytest.MonkeyPatch, name: str, bytes_a_call: int) -> None:
    option, sizes, _ = CUDA_CASES[name]
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", bytes_a_call)
    torch.use_deterministic_algorithms(True)
    try:
        inputs = _inputs(torch.bfloat16, 333, "cuda", (8, 2), sizes)
        dout = torch.randn(3, 333, 8, sizes[1], device="cuda").bfloat16().transpose(1, 2)
        _assert_in_place_is_equal(_arguments(inputs, option), dout)
    finally:
        torch.use_deterministic_algorithms(False)

"""The gated delta rule against its definition position by position, and its gradients against autograd's."""

import pytest
import torch
from torch import Tensor

from oomc import delta_rule as module
from oomc.delta_rule import gated_delta_rule


def _naive(inputs: list[Tensor], l2norm: bool) -> Tensor:
    q, k, v, g, beta = inputs
    repeat = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeat, 2) for x in (q, k))
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    rows = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        seen = (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - seen))[:, :, None]
        rows.append((state * q[:, t, :, :, None]).sum(-2) * k.shape[3] ** -0.5)
    return torch.stack(rows, 1)


def _inputs(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, rows, 2, 6), torch.randn(2, rows, 2, 6)
    v, g, beta = torch.randn(2, rows, 4, 5), -torch.rand(2, rows, 4), torch.rand(2, rows, 4)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize(("rows", "chunk", "together"), [(1, 8, 1), (8, 8, 9), (21, 8, 9), (21, 8, 1), (53, 8, 3)])
def test_equals_definition(
    rows: int, chunk: int, together: int, l2norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """In groups of so many chunks."""
    monkeypatch.setattr(module, "GROUP_BYTES", together * 4 * 2 * 4 * chunk * 6)
    assert module.chunks_together(2 * 4, chunk, 6) == together
    inputs = _inputs(rows)
    if not l2norm:
        with torch.no_grad():
            inputs[1].mul_(0.2)  # keys longer than 1 make the state grow
    out, states, last = gated_delta_rule(*inputs, None, chunk, l2norm)
    want = _naive(inputs, l2norm)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    seed = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, seed)
    for a, b in zip(got, torch.autograd.grad(want, inputs, seed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert states.shape[0] == -(-rows // chunk) + 1 and not states[0].any()
    assert torch.equal(last, states[-1])


@pytest.mark.parametrize("with_state", [True, False])
def test_registration(with_state: bool) -> None:
    state = torch.randn(2, 4, 6, 5, requires_grad=True) if with_state else None
    torch.library.opcheck(gated_delta_rule, (*_inputs(11, torch.float32), state, 4, True))


def test_bf16_is_as_good_as_eager() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = _inputs(70, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = _naive(exact, True)
    ours, *_ = gated_delta_rule(*inputs, None, 64, True)
    eager, _ = modeling.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    seed = torch.randn_like(want).to(torch.bfloat16)
    pairs = [(ours, eager, want)]
    pairs += zip(
        torch.autograd.grad(ours, inputs, seed),
        torch.autograd.grad(eager, inputs, seed),
        torch.autograd.grad(want, exact, seed.double()),
        strict=True,
    )
    for a, b, ref in pairs:
        assert (a - ref).norm() <= 1.5 * (b - ref).norm() + 1e-6 * ref.norm()


@pytest.mark.parametrize("bounds", [(8, 21), (5, 21), (1, 2, 9, 20, 21)])
def test_parts_are_the_whole(bounds: tuple[int, ...]) -> None:
    """Each part begins with the state that the one before it left, and hands back that state's gradient."""
    inputs = _inputs(21)
    want, _, last = gated_delta_rule(*inputs, None, 8, True)
    state, parts = None, []
    for start, end in zip((0, *bounds), bounds, strict=False):
        out, _, state = gated_delta_rule(*(x[:, start:end] for x in inputs), state, 8, True)
        parts.append(out)
    assert state is not None
    got = torch.cat(parts, 1)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)
    seeds = [torch.randn_like(want), torch.randn_like(last)]
    expected = torch.autograd.grad([want, last], inputs, seeds)
    for a, b in zip(torch.autograd.grad([got, state], inputs, seeds), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_states_are_those_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = _inputs(21, torch.float32)
    first = torch.randn(2, 4, 6, 5, requires_grad=True)
    ours = gated_delta_rule(*inputs, first, 8, True)
    theirs = modeling.torch_chunk_gated_delta_rule(
        *inputs, chunk_size=8, initial_state=first, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    seeds = [torch.randn_like(x) for x in theirs]
    pairs = [(ours[0], theirs[0]), (ours[2], theirs[1])]
    pairs += zip(
        torch.autograd.grad([ours[0], ours[2]], [*inputs, first], seeds),
        torch.autograd.grad(theirs, [*inputs, first], seeds),
        strict=True,
    )
    for a, b in pairs:
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_gradients_of_all_results() -> None:
    inputs = [x.detach()[:1, :3, :1].requires_grad_() for x in _inputs(3)]
    inputs.append(torch.randn(1, 1, 6, 5, dtype=torch.float64, requires_grad=True))

    def both(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, _, last = gated_delta_rule(*given, 2, True)
        return out, last

    assert torch.autograd.gradcheck(both, inputs)
    last = gated_delta_rule(*inputs, 2, True)[2]  # the results before are not used
    assert all(x.any() for x in torch.autograd.grad(last.sum(), [inputs[1], inputs[2], inputs[5]]))

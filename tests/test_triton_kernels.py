"""The CUDA kernels against the numba kernels, bit for bit.

Without a GPU they can run in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1 is set. Its `fma` is
not fused, so the tests give it numba's. That checks all but what the compiler makes of the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from oomc.runtime.adamw import AdamW
from oomc.runtime.kernels import accumulate, fused, kernel, sum_of_squares
from oomc.runtime.low_bit import LowBitAdamW
from oomc.runtime.optim import UpdateRule
from oomc.runtime.sgd import SGD
from tests.kernel_devices import CUDA, DEVICES, INTERPRETED

RULES: dict[str, UpdateRule] = {
    "adamw": AdamW(),
    "adamw-bf16": LowBitAdamW("bf16"),
    "adamw-8bit": LowBitAdamW("8bit"),
    "sgd": SGD(momentum=False),
    "momentum": SGD(),
}
BF16, FP32 = torch.bfloat16, torch.float32


@kernel
def fused_all(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = fused(a[i], b[i], c[i])


@pytest.fixture(autouse=True)
def interpreter_that_fuses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if INTERPRETED:
        from triton.runtime import interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]

        def create_fma(_: Any, x: Any, y: Any, z: Any) -> Any:
            out = np.empty(x.data.shape, np.float32)
            fused_all(*(np.ascontiguousarray(t.data).ravel() for t in (x, y, z)), out.reshape(-1))
            return interpreter.TensorHandle(out, z.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
    with np.errstate(all="ignore"):
        yield


def group(step: int) -> dict[str, Any]:
    """Hyperparameters of both optimizers; betas on either side of torch's two forms of lerp."""
    return {
        "lr": 0.01 * (1 + math.sin(step)), "betas": ((0.9, 0.999), (0.3, 0.95))[step % 2], "eps": 1e-8,
        "weight_decay": 0.1 * (step % 3), "momentum": 0.9, "dampening": 0.0 if step % 2 else 0.1,
        "nesterov": step % 2 == 1,
    }  # fmt: skip


def group_of(rule: UpdateRule, step: int) -> dict[str, Any]:
    return group(step) | ({} if rule.arrays else {"momentum": 0.0})


def bits(values: torch.Tensor) -> Any:
    return values.view(torch.int16 if values.dtype == BF16 else torch.int32).numpy()


def gradient_of(n: int, step: int, dtype: torch.dtype, wild: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    scale = torch.exp2(torch.randint(-60, 8, (n,), generator=generator).float())
    gradient = torch.randn(n, generator=generator) * scale
    odd = torch.tensor([-0.0, 0.0, 1e-40, -1e-44, 3e38, -3e38] + ([math.inf, -math.inf, math.nan] if wild else []))
    places = torch.randint(n, (len(odd),), generator=generator)
    gradient[places[: n // 8]] = odd[: n // 8]
    return gradient.to(dtype)


def masters(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    master = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-20, 8, (n,), generator=generator).float())
    master[::17] = -0.0
    master[::19] = 1e-41
    return master


class Both:
    """One parameter, on the host and on the device."""

    def __init__(self, rule: UpdateRule, n: int, split: bool, device: str) -> None:
        self.rule, self.n, self.counts = rule, n, 0
        master = masters(n)
        words = master.view(torch.int32)
        weights = ((words + 0x8000) >> 16).to(torch.int16) if split else master
        parts = [weights, words.to(torch.int16)] if split else [weights]
        parts += [torch.zeros(array.elements(n), dtype=array.dtype) for array in rule.arrays]
        self.weights_parts = len(parts) - len(rule.arrays)
        self.host, self.device = [p.clone() for p in parts], [p.clone().to(device) for p in parts]
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)

    def update(self, gradient: torch.Tensor, factor: float, constants: Any, pieces: int = 1 << 40) -> None:
        k = self.weights_parts
        arrays = [(t.view(torch.int16) if t.dtype == BF16 else t).numpy() for t in self.host]
        self.counts += self.rule.update(
            arrays[0], arrays[1] if k == 2 else None, tuple(arrays[k:]), bits(gradient), factor, constants, 0
        )
        on_device = gradient.to(self.nonfinite.device)
        for start in range(0, self.n, pieces):
            stop = min(start + pieces, self.n)
            weights, *lo = (t[start:stop] for t in self.device[:k])
            state = tuple(t[a.span(start, stop)] for a, t in zip(self.rule.arrays, self.device[k:]))
            self.rule.update_cuda(
                weights, lo[0] if lo else None, state, on_device[start:stop], factor, constants, start, self.nonfinite
            )

    def check(self) -> None:
        for index, (mine, theirs) in enumerate(zip(self.host, self.device)):
            theirs = theirs.cpu()
            words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[mine.element_size()]
            equal = mine.view(words) == theirs.view(words)
            if mine.dtype == FP32:  # NaNs of any payload are one number
                equal |= mine.isnan() & theirs.isnan()
            assert equal.all(), f"array {index}: {int((~equal).sum())} of {equal.numel()} differ"
        assert int(self.nonfinite) == self.counts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16-gradient", "fp32-gradient"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_bits_are_those_of_the_host(rule: UpdateRule, split: bool, dtype: torch.dtype, device: str) -> None:
    for n in (1, 63, 4100, 100_003) if device == "cuda" else (1100,):
        both = Both(rule, n, split, device)
        for step in range(1, 21):
            gradient = gradient_of(n, step, dtype, wild=step > 15)
            constants = rule.constants(rule.hyper(group_of(rule, step)), step, 12345)
            both.update(gradient, 1.0 if step % 4 else 0.37, constants)
            if step in (1, 15):
                both.check()
        assert n < 100 or both.counts > 0  # infinite and NaN elements were met
        both.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_pieces_equal_the_whole(rule: UpdateRule, device: str) -> None:
    both = Both(rule, 3000, True, device)
    for step in range(1, 4):
        constants = rule.constants(rule.hyper(group_of(rule, step)), step, 7)
        both.update(gradient_of(3000, step, BF16, wild=True), 1.0, constants, pieces=1024)
    both.check()


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_another_step_compiles_nothing_anew(rule: UpdateRule) -> None:
    from triton import knobs  # type: ignore[import-not-found, import-untyped, unused-ignore]

    compiled: list[Any] = []
    both = Both(rule, 4096, True, "cuda")
    for step in range(1, 3):  # both lerps, first and later steps
        constants = rule.constants(rule.hyper(group_of(rule, step)), step, 1)
        both.update(gradient_of(4096, step, BF16, wild=False), 1.0, constants)
    knobs.runtime.jit_cache_hook = lambda **call: compiled.append(call["repr"]) or False  # type: ignore[func-returns-value]
    try:
        for step, salt in ((3, 16), (16, 0), (1, 1 << 31), (70_000, 5)):
            constants = rule.constants(rule.hyper(group_of(rule, step)), step, salt)
            both.update(gradient_of(4096, step, BF16, wild=False), 1.0 / step, constants, pieces=128 * 9)
    finally:
        knobs.runtime.jit_cache_hook = None
    both.check()
    assert not compiled


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_accumulation(dtype: torch.dtype, device: str) -> None:
    from oomc.runtime.triton_kernels import accumulate_cuda

    n = 3001
    host, there = torch.full((n,), math.nan), torch.full((n,), math.nan, device=device)
    for step, (fresh, weight) in enumerate([(True, 1.0), (False, 0.3), (False, 1.0), (True, 0.1), (False, 1 / 3)]):
        gradient = gradient_of(n, step, dtype, wild=False)
        accumulate(host.numpy(), bits(gradient), fresh, weight)
        accumulate_cuda(there, gradient.to(device), fresh, weight)
        assert torch.equal(host.view(torch.int32), there.cpu().view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("n", [0, 1, 5003, 100_000])
def test_sum_of_squares(n: int, dtype: torch.dtype, device: str) -> None:
    from oomc.runtime.triton_kernels import sum_of_squares_cuda

    gradient = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    total = sum_of_squares_cuda(gradient.to(device))
    assert total.dtype == torch.float64 and total.shape == ()
    assert float(total) == pytest.approx(sum_of_squares(bits(gradient)), rel=1e-14)
    if n:
        gradient[n // 2] = math.inf
        assert float(sum_of_squares_cuda(gradient.to(device))) == math.inf

"""Chunks in order: states go from chunk to chunk, their gradients back, and the step is that of the whole."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomc import meta, ops, pipeline
from oomc.capture import Batch, capture
from oomc.models import tiny
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.program import Program
from oomc.runtime.tiles import tiles
from oomc.simulate import Profiler
from oomc.worksets import Form
from tests import programs
from tests.helpers import compiled, relative, tokens, worst
from tests.reference import Reference

SIZE, KERNEL, HEADS = 16, 4, 2


class Recurrence(nn.Module):
    """A causal convolution with a bias, and a gated delta rule; with `attends`, attention behind them."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.norm = nn.LayerNorm(SIZE)
        self.into, self.out = nn.Linear(SIZE, 3 * SIZE + 2 * HEADS), nn.Linear(SIZE, SIZE, bias=False)
        self.conv = nn.Conv1d(3 * SIZE, 3 * SIZE, KERNEL, groups=3 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        mixed, g, beta = self.into(self.norm(x)).split([3 * SIZE, HEADS, HEADS], -1)
        mixed = F.silu(self.conv(F.pad(mixed.transpose(1, 2), (KERNEL - 1, 0)))).transpose(1, 2)
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in mixed.chunk(3, -1))
        y = ops.gated_delta_rule(q, k, v, -F.softplus(g) / 8, beta.sigmoid(), None, 8, True)[0].flatten(2)
        x = x + self.out(y)
        if self.attends:
            heads = x[:, None]
            x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        return x + x.sigmoid()


class Model(nn.Module):
    """Embedding, two recurrences, of which the second may attend, and a head."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(programs.VOCAB, SIZE)
        self.layers = nn.ModuleList([Recurrence(False), Recurrence(attends)])
        self.head = nn.Linear(SIZE, programs.VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def model(attends: bool = False, frozen: bool = False) -> Model:
    """With fixed weights; `frozen`: only what comes after the first recurrence is trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        own = Model(attends)
    for parameter in [*own.embed.parameters(), *own.layers[0].parameters()] if frozen else ():
        parameter.requires_grad_(False)
    return own


@cache
def bare(attends: bool = False, frozen: bool = False) -> Program:
    own = model(attends, frozen)
    return pipeline.run_passes(capture(own, Batch.bind(own, (), programs.batch())), pipeline.MODEL_PASSES, verify=True)


def form_of(program: Program, name: str) -> Form:
    return next(program.forms[w.form] for b in program.blocks for w in b.worksets if w.name == name)


def assert_same(program: Program, own: nn.Module, sizes: tuple[int, int], chunk: int) -> Program:
    """A step in chunks has eager's loss and gradients."""
    batch: dict[str, Any] = dict(programs.batch(sizes))
    reference = Reference(own)
    loss = reference.accumulate(**batch)
    choose = ChooseResidency(sizes, candidate=Candidate(chunk, 0, 0))
    scheduled = pipeline.with_plan(program, choose, verify=True)
    got, gradients = programs.run_step(scheduled, own, batch)
    assert relative(got, loss) <= 1e-6
    error, parameter = worst(gradients, reference._sums)
    assert error <= 1e-5, (parameter, error)
    return scheduled


@pytest.mark.parametrize(("sizes", "chunk", "count"), [
    *(((1, 21), chunk, count) for chunk, count in ((21, 1), (11, 2), (7, 3), (6, 4), (5, 5), (4, 6), (3, 7), (1, 21))),
    ((3, 10), 4, 9), ((3, 10), 20, 2), ((2, 5), 2, 6),
])  # fmt: skip
def test_a_step_in_chunks(sizes: tuple[int, int], chunk: int, count: int) -> None:
    """Uneven ones, ones shorter than what the convolution looks back to, and chunks of several rows."""
    scheduled = assert_same(bare(), model(), sizes, chunk)
    assert scheduled.plan is not None
    assert len(tiles(*sizes, scheduled.plan.chunks["layers.0/0"])) == count


def test_a_block_without_attention_is_one_workset_without_fences() -> None:
    for block in bare().blocks[1:-1]:
        (workset,) = block.worksets
        assert (workset.chunk, workset.fences) == ("tokens", ())
        form = bare().forms[workset.form]
        assert [c.requires_grad for c in form.carries] == [True, True]
        assert form.saved == 2  # nothing but the states


@pytest.mark.parametrize("chunk", [4, 12])
def test_what_comes_before_attention_is_computed_again_with_its_states(chunk: int) -> None:
    scheduled = assert_same(bare(attends=True), model(attends=True), (2, 12), chunk)
    assert scheduled.step is not None
    again = [
        n for n in scheduled.step.graph.nodes if meta.note(n).phase == "recompute" and n.args[2:3] == ("recompute",)
    ]
    assert "layers.1/0" in {meta.note(n).workset for n in again}
    assert form_of(scheduled, "layers.1/0").carried("recompute") == []


@pytest.mark.parametrize("chunk", [5, 24])
def test_no_gradient_goes_back_through_what_is_not_trained(chunk: int) -> None:
    program = bare(frozen=True)
    first, second = (form_of(program, f"layers.{i}/0") for i in (0, 1))
    assert first.backward is None and not any(c.requires_grad for c in first.carries)
    assert all(c.requires_grad for c in second.carries)
    assert_same(program, model(frozen=True), (2, 12), chunk)


def test_states_take_what_is_projected() -> None:
    """For each chunk of a row those of one position, however many positions there are."""
    program = bare()
    form, profiler = form_of(program, "layers.0/0"), Profiler(program)
    one = 2 * 4 * (3 * SIZE * (KERNEL - 1) + HEADS * (SIZE // HEADS) ** 2)  # of two rows, in fp32
    for sizes, count in (((2, 64), 4), ((2, 512), 32), ((2, 520), 33)):
        outputs = profiler.profile(form.key, "forward", sizes, (1, 16)).outputs[-2:]
        assert sum(o.nbytes for o in outputs if o is not None) == count * one
    peaks = [profiler.profile(form.key, "forward", (1, s), (1, 64)).peak - 4 * s * SIZE for s in (1024, 4096)]
    assert peaks[1] - peaks[0] == (64 - 16) * one // 2  # beside the boundary, nothing but the states grows


@pytest.mark.parametrize("sizes", [pytest.param((1, 150), marks=pytest.mark.slow), (3, 70)])
def test_a_hybrid_model_takes_no_more_than_is_projected(sizes: tuple[int, int]) -> None:
    step = compiled(tiny.build("qwen3_next"), tokens(*sizes), like=("in order",), chunk_tokens=64)
    for _ in range(2):
        step(**tokens(*sizes))
    figures, report = step.metrics, str(step.report())
    step.close()
    assert re.search(r"model.layers.0/0 +3 x +tokens, in order +1 x 64", report)
    mixing = report.partition("tokens are mixed in")[2].partition("\n\n")[0]
    assert "model.layers.3/1" in mixing and not re.search(r"layers.[012]/", mixing)  # only full attention
    assert 0.8 * figures["device_projected"] <= figures["device_peak"] <= figures["device_projected"]

"""Chunks: whatever keeps tokens apart runs in tiles of any size, and losses and gradients are those of the whole."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from oomc import meta, ops, pipeline, private
from oomc.capture import Batch as Call
from oomc.capture import capture
from oomc.dims import name_of
from oomc.models import tiny
from oomc.program import Program
from oomc.runtime.compute import tiles
from oomc.simulate import Projection
from oomc.worksets import Workset
from tests.helpers import Blind, assert_same_gradients, compiled, tokens
from tests.rounding import assert_rounds_as_eager

SHAPES = {(1, 21): (21, 11, 7, 6, 5, 4, 3), (3, 24): (9, 30, 48)}
"""Batch sizes, and how many tokens are to be in a chunk: 1 to 7 chunks of one row; parts of rows, a row, two rows."""
COUNTS = {(1, 21): (1, 2, 3, 4, 5, 6, 7), (3, 24): (9, 3, 2)}
CASES = [(batch, *pair) for batch in SHAPES for pair in zip(SHAPES[batch], COUNTS[batch], strict=True)]


@pytest.fixture
def unbudgeted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no budget, and memory is not looked at: projections only take time."""
    monkeypatch.setattr(pipeline, "project", lambda *_: Projection(0, "", 0, {}, {}))


@pytest.mark.parametrize(("sizes", "chunk", "count"), CASES)
@pytest.mark.parametrize("name", tiny.NAMES)
def test_models(name: str, sizes: tuple[int, int], chunk: int, count: int, unbudgeted: None) -> None:
    model = tiny.build(name)
    eager = copy.deepcopy(model)
    step = compiled(model, tokens(*sizes), like=("chunks", name), chunk_tokens=chunk)
    step._meter = Blind()
    assert step.plan is not None
    program = step._compiler.traces.popitem()[1].bare
    for workset in worksets(program):
        assert (workset.name in step.plan.chunks) == bool(workset.chunk)
        if workset.chunk == "tokens":
            assert len(tiles(*sizes, step.plan.chunks[workset.name])) == count
    assert_same_gradients(step, eager, [tokens(*sizes, seed=chunk, masked=True)])
    step.close()


@pytest.mark.parametrize(("name", "chunk"), [("qwen3_moe", 40), ("gpt_oss", 9)])
def test_models_in_bf16(name: str, chunk: int, unbudgeted: None) -> None:
    model = tiny.build(name, dtype=torch.bfloat16)
    eager = copy.deepcopy(model)
    step = compiled(model, tokens(2, 16), like=("chunks", name, "bf16"), chunk_tokens=chunk)
    step._meter = Blind()
    assert_rounds_as_eager(step, eager)
    step.close()


# --- what is left that does not run in chunks of tokens


@pytest.fixture(params=tiny.NAMES)
def program(request: pytest.FixtureRequest) -> Program:
    """A tiny model's worksets."""
    return partitioned(request.param)


@private_cache
def partitioned(name: str) -> Program:
    model = tiny.build(name)
    program = capture(model, Call.bind(model, (), tokens(2, 24)))
    program.notes["hidden"] = 64
    names = [p.name for p in pipeline.MODEL_PASSES]
    return pipeline.run_passes(program, pipeline.MODEL_PASSES[: names.index("differentiate") + 1])

"""choose_residency: the plan it writes, and that it does nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomc.passes import choose_residency
from oomc.passes.choose_residency import (
    CANDIDATES,
    CHUNK_TOKENS,
    LARGE_CHUNKS,
    LOOKUP_TOKENS,
    LOSS_TOKENS,
    SMALL_CHUNKS,
    Candidate,
    ChooseResidency,
)
from oomc.plan import Budget, Residency
from oomc.printer import print_program
from oomc.runtime.tiles import tiles
from tests import programs
from tests.conftest import Golden

ALL = [candidate for group in CANDIDATES for candidate in group]


def test_golden_plan(golden: Golden) -> None:
    program = programs.bare("topk")
    before = programs.stable(print_program(program))
    result = ChooseResidency(programs.SIZES, Budget(), Candidate(8, 1, 1))(program)
    assert result.modified
    plan = result.program.plan
    assert plan is not None
    lines = [plan.describe(), *(f"{name}: {where}" for name, where in plan.residency.items())]
    golden("choose_residency", "\n".join(lines))
    program.plan = None
    assert programs.stable(print_program(program)) == before
    programs.assert_runs(program, programs.model("topk"))


def test_nothing_to_do_the_second_time() -> None:
    choose = ChooseResidency(programs.SIZES)
    program = choose(programs.bare("mlp")).program
    assert not choose(program).modified
    assert replace(choose, accumulate=True)(program).modified


@pytest.mark.parametrize("kind", ["topk", "tied", "mlp"])
def test_what_may_not_be_computed_twice_and_what_others_use_is_kept(kind: str) -> None:
    program = programs.up_to(kind, "choose_residency")
    assert program.plan is not None
    boundaries = {w.outputs[0].name for b in program.blocks[:-1] for w in b.worksets[-1:]}
    for name, where in program.plan.residency.items():
        if ":saved." in name or name in boundaries:
            assert where == "keep", name
    if kind != "mlp":
        assert "recompute" in program.plan.residency.values()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.integers(1, 5000), st.sampled_from(ALL))
def test_chunks_are_no_larger_than_the_candidate_says(batch: int, sequence: int, candidate: Candidate) -> None:
    plan = ChooseResidency((batch, sequence), candidate=candidate)(programs.bare("mlp")).program.plan
    assert plan is not None
    assert plan.chunks.keys() == {"prologue/0", "layers.0/0", "layers.1/0", "epilogue/0"}
    for name, (rows, columns) in plan.chunks.items():
        assert 1 <= rows <= batch
        assert 1 <= columns <= sequence
        most = {"epilogue/0": min(candidate.tokens, LOSS_TOKENS), "prologue/0": max(candidate.tokens, LOOKUP_TOKENS)}
        assert rows * columns <= most.get(name, candidate.tokens)
        cover = tiles(batch, sequence, (rows, columns))
        sizes = [(t.rows.stop - t.rows.start, t.columns.stop - t.columns.start) for t in cover]
        assert sum(b * s for b, s in sizes) == batch * sequence
        assert all(1 <= b <= rows and 1 <= s <= columns for b, s in sizes)


def test_a_lookup_runs_whole_up_to_many_tokens() -> None:
    """Each of its chunks would give a gradient as large as the table, to be added up."""
    for (batch, sequence), wanted in {(4, 4096): (4, 4096), (40, 4096): (16, 4096), (1, 1 << 20): (1, 65536)}.items():
        chunks = ChooseResidency((batch, sequence), candidate=Candidate(1024, 1, 1)).chunks(programs.bare("mlp"))
        assert chunks["prologue/0"] == wanted
        assert chunks["layers.0/0"] == (1, 1024)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 64), st.integers(1, 5000), st.sampled_from(ALL))
def test_attention_runs_in_whole_batch_rows(batch: int, sequence: int, candidate: Candidate) -> None:
    plan = ChooseResidency((batch, sequence), candidate=candidate)(programs.bare("plain")).program.plan
    assert plan is not None
    for name in ("layers.0/1", "layers.1/1"):
        rows, columns = plan.chunks[name]
        assert columns == sequence
        assert 1 <= rows <= batch
        assert rows == 1 or rows * columns <= candidate.tokens


def test_candidates_become_more_frugal() -> None:
    assert CANDIDATES[0][0] == Candidate(CHUNK_TOKENS[0], 1, 1, keep=True)
    assert CANDIDATES[-1][-1] == Candidate(CHUNK_TOKENS[-1], 0, 0, stage=False, offload=True)
    assert CANDIDATES == LARGE_CHUNKS + SMALL_CHUNKS
    assert min(c.tokens for g in LARGE_CHUNKS for c in g) > max(c.tokens for g in SMALL_CHUNKS for c in g)
    assert len(set(ALL)) == len(ALL)
    for group in CANDIDATES:
        assert {replace(c, tokens=0) for c in group} == {replace(group[0], tokens=0)}
        assert [c.tokens for c in group] == sorted((c.tokens for c in group), reverse=True)
    assert {c.tokens for c in ALL} == set(CHUNK_TOKENS)


@pytest.mark.parametrize("keep", [True, False])
def test_results_of_attention_are_kept_if_the_candidate_says_so(keep: bool) -> None:
    plan = ChooseResidency(programs.SIZES, candidate=Candidate(8, 1, 1, keep=keep))(programs.bare("plain")).program.plan
    assert plan is not None
    results = [w.outputs[0].name for b in programs.bare("plain").blocks[1:3] for w in b.worksets[1:2]]
    assert [plan.residency[name] for name in results] == ["keep" if keep else "recompute"] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_large_values_that_are_not_needed_at_once_go_to_the_host(
    prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`topk`: embedding 768 B, attention's result 768 B and the layer's output 768 B; the choice of experts is less."""

    def residency(offload: bool) -> dict[str, Residency]:
        choose = ChooseResidency(programs.SIZES, candidate=Candidate(8, prefetch, 1, offload=offload))
        plan = choose(programs.bare("topk")).program.plan
        assert plan is not None
        return plan.residency

    plain = residency(offload=False)
    assert residency(offload=True) == plain, "all are small"
    monkeypatch.setattr(choose_residency, "OFFLOAD_FROM", 700)
    # the second layer's are needed again when the last block's backward has begun, or so soon after it
    wanted = ["embedding", "getitem_16"] + (["add_4", "getitem_17"] if prefetch == 0 else [])
    assert residency(offload=True) == plain | dict.fromkeys(wanted, "offload")

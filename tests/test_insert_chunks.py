"""insert_chunks: the plan's rectangles reach every run of a chunked workset, and change nothing but rounding."""

from __future__ import annotations

import pytest

from oomc import steps
from oomc.passes.choose_residency import Candidate
from oomc.passes.insert_chunks import InsertChunks
from tests import programs


@pytest.mark.parametrize(("tokens", "chunk"), [(16, (1, 12)), (8, (1, 8)), (24, (2, 12))])
def test_forward_and_backward_run_in_the_planned_chunks(tokens: int, chunk: tuple[int, int]) -> None:
    program = programs.up_to("mlp", "insert_chunks", Candidate(tokens, 1, 1))
    assert [n.args[3] for n in program.graph.nodes if n.target is steps.run_chunks] == [chunk, chunk]
    programs.assert_runs(program, programs.model("mlp"))
    assert not InsertChunks()(program).modified

"""insert_chunks: the plan's rectangles reach every run of a chunked workset, and change nothing but rounding."""

from __future__ import annotations

import pytest

from oomc import meta, steps
from oomc.passes.choose_residency import Candidate
from oomc.passes.insert_chunks import InsertChunks
from tests import programs

pytestmark = pytest.mark.usefixtures("cut_lookups")


@pytest.mark.parametrize(("tokens", "chunk"), [(16, (1, 12)), (8, (1, 8)), (24, (2, 12))])
def test_forward_and_backward_run_in_the_planned_chunks(tokens: int, chunk: tuple[int, int]) -> None:
    program = programs.up_to("mlp", "insert_chunks", Candidate(tokens, 1, 1))
    runs = [n for n in program.graph.nodes if n.target is steps.run_chunks]
    assert [n.args[3] for n in runs] == [chunk] * len(runs)
    each_way = sorted((meta.note(n).workset, str(n.args[2])) for n in runs)
    names = ("epilogue/0", "layers.0/0", "layers.1/0", "prologue/0")
    assert each_way == [(name, variant) for name in names for variant in ("backward", "forward")]
    programs.assert_runs(program, programs.model("mlp"))
    assert not InsertChunks()(program).modified


@pytest.mark.parametrize("kind", ["topk", "plain", "tied"])
@pytest.mark.parametrize("tokens", [5, 7, 12, 24])
def test_attention_runs_in_batch_rows_and_experts_in_chunks(kind: str, tokens: int) -> None:
    program = programs.up_to(kind, "insert_recompute", Candidate(tokens, 1, 1))
    rows, columns = (2, 12) if tokens == 24 else (1, min(tokens, 12))
    for node in program.graph.nodes:
        if node.target is steps.run_chunks:
            attends = meta.note(node).workset.endswith("/1")
            assert node.args[3] == ((rows, 12) if attends else (rows, columns)), node
    programs.assert_runs(program, programs.model(kind))

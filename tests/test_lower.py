"""lower: one callable for each form that is used, and the step as readable Python."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomc import pipeline, steps
from oomc.errors import UnsupportedError
from oomc.passes.lower import Lower
from oomc.program import Program
from tests import programs
from tests.conftest import Golden


def lowered(kind: str) -> Program:
    program = replace(programs.up_to(kind, "schedule"), compiled={})
    return pipeline.run_passes(program, (Lower("eager"),), verify=True)


def test_golden_step_as_python(golden: Golden) -> None:
    program = lowered("mlp")
    assert program.step is not None
    golden("lower", programs.stable(program.step.code.strip()))
    programs.assert_runs(program, programs.model("mlp"))


def test_equal_layers_share_one_callable() -> None:
    program = lowered("topk")
    used = {(n.args[1], n.args[2]) for n in program.graph.nodes if n.target in steps.COMPUTE}
    parts = {(form, part) for form, variant in used if variant == "backward" and program.forms[form].at_once
             for part in steps.PARTS}  # fmt: skip
    assert parts and set(program.compiled) == used | parts
    runs = [n for n in program.graph.nodes if n.target in steps.COMPUTE]
    assert len(used) < len(runs)


def test_nothing_to_do_the_second_time() -> None:
    program = lowered("mlp")
    known = dict(program.compiled)
    assert not Lower("eager")(program).modified
    assert program.compiled == known


def test_unknown_backend() -> None:
    with pytest.raises(UnsupportedError, match="backend='magic' is not known; there are eager, inductor"):
        Lower("magic")(programs.up_to("mlp", "schedule"))

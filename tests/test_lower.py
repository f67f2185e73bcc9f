"""lower: one callable for each form that is used, and the step as readable Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from oomc import ops, pipeline, steps
from oomc.errors import UnsupportedError
from oomc.passes import lower
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


def test_a_compiler_gets_norms_as_plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it fuses with what is around them; run op by op they stay one."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    graph = fx.symbolic_trace(lambda x: ops.rms_norm(x, 1e-6)[0] * 2)
    made = lower.lowered(graph, "forward", "inductor")
    assert isinstance(made, fx.GraphModule)
    assert not made.graph.find_nodes(op="call_function", target=ops.rms_norm)
    assert graph.graph.find_nodes(op="call_function", target=ops.rms_norm)
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(made(x), graph(x)) and torch.equal(lower.lowered(graph, "forward", "eager")(x), graph(x))


@pytest.mark.parametrize("part", [steps.ORDERS, steps.PRODUCTS, steps.IN_PLACE])
def test_what_has_nothing_to_fuse_is_not_compiled(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it is compiled"))
    assert lower.lowered(fx.symbolic_trace(lambda x: torch.sin(x)), part, "inductor")(torch.zeros(1)) == 0

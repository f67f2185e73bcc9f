"""The printer: the same text each time, and lane, bytes, tier and lifetime of each node."""

from __future__ import annotations

import re

from oomc import pipeline, steps
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.printer import print_program
from oomc.program import Program
from tests import programs


def test_two_captures_print_the_same() -> None:
    texts: list[list[str]] = []
    for _ in range(2):
        own: list[str] = []

        def observe(name: str, program: Program, own: list[str] = own) -> None:
            own.append(f"{name}\n{print_program(program)}")

        program = pipeline.run_passes(programs.captured(programs.model("mlp")), pipeline.MODEL_PASSES, observe)
        pipeline.with_plan(program, ChooseResidency(programs.SIZES, candidate=Candidate(8, 1, 1)), observe)
        texts.append(own)
    assert texts[0] == texts[1]
    assert not re.search(r"0x[0-9a-f]{6}", "".join(texts[0]))


def test_a_line_for_each_node() -> None:
    program = programs.up_to("mlp", "schedule")
    lines = print_program(program).splitlines()
    nodes = list(program.graph.nodes)
    assert len(lines) == len(nodes)
    for index, (line, node) in enumerate(zip(lines, nodes, strict=True)):
        assert line.startswith(f"{index:4} ")
        if node.users:
            assert f"%{node.name} = " in line


def test_lane_bytes_tier_and_lifetime() -> None:
    program = programs.up_to("mlp", "schedule")
    nodes = list(program.graph.nodes)
    lines = dict(zip(nodes, print_program(program).splitlines(), strict=True))
    fetch = next(n for n in nodes if n.target is steps.fetch)
    release = next(n for n in nodes if n.target is steps.release and n.args[1] is fetch)
    assert lines[fetch].endswith(f"# h2d, 512 B, device, until {nodes.index(release)}")
    embedding = next(n for n in nodes if n.name == "embedding")
    assert "# value, 384 B, device, until " in lines[embedding]  # 2 x 12 tokens of 4 fp32
    offload = next(n for n in nodes if n.target is steps.offload)
    retire = next(n for n in nodes if n.target is steps.retire and n.args[1] is offload)
    (grad,) = offload.args[3]
    assert f"until {nodes.index(retire)}" in lines[grad]  # its memory is free when the copy is done  # type: ignore[index]
    assert lines[next(n for n in nodes if n.target is steps.update)].endswith("# host")


def test_bytes_are_formulas_before_there_is_a_plan() -> None:
    (line,) = (text for text in print_program(programs.bare("mlp")).splitlines() if "%embedding = " in text)
    assert "16*B*S B, device" in line

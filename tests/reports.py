"""A report of a recorded step for the tests of report files, and the files that are made of it."""

from __future__ import annotations

from functools import cache

import torch

from oomc.report import Report
from oomc.step import Step
from tests.helpers import tiny_step, tokens

TIGHT = "1600KiB"
"""A device budget of the tiny bf16 model under which weights are streamed and values recomputed."""


@cache
def recorded() -> tuple[Step, Report]:
    """A step whose second call was recorded, and its report."""
    step, _ = tiny_step("qwen3_moe", torch.bfloat16, device=TIGHT, host="100MiB")
    step(**tokens(2, 24))
    step.record()
    step(**tokens(2, 24))
    return step, step.report()

"""choose_residency: DECIDES where everything lives, and writes the plan; it inserts nothing.

The policy is fixed for now: optimizer state and weights on the host, values inside a block recomputed, values
between blocks kept on the device. Within it, the chunk size of the loss and the overlap of copies are taken as large
as the device budget allows, tried in the order of CANDIDATES.

Before and after, the same bare step graph; after, `program.plan` holds for example

    residency {'add_7': 'recompute', 'embedding': 'keep'}, chunks {'epilogue/1': (1, 1024)}, prefetch 1
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from oomc import meta, steps
from oomc.plan import Budget, Plan, Residency
from oomc.program import PassResult, Program

CHUNK_TOKENS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)


@dataclass(frozen=True)
class Candidate:
    """One point of the policy: tokens in a chunk of the loss, slabs fetched ahead, gradients leaving late."""

    tokens: int
    prefetch: int
    retire_late: bool


CANDIDATES = tuple(
    Candidate(tokens, prefetch, late)
    for prefetch, late in ((1, True), (1, False), (0, False))
    for tokens in CHUNK_TOKENS
)


UNLIMITED = Budget()


@dataclass(frozen=True)
class ChooseResidency:
    """See the module's docstring.

    Attributes:
        sizes: the batch and sequence size of the step.
        budget: what may be taken.
        candidate: the point of the policy.
        accumulate: whether the step only accumulates gradients.
    """

    sizes: tuple[int, int]
    budget: Budget = UNLIMITED
    candidate: Candidate = CANDIDATES[0]
    accumulate: bool = False
    name: str = "choose_residency"

    def __call__(self, program: Program) -> PassResult:
        before = program.plan
        program.plan = Plan(
            sizes=self.sizes,
            residency=self._residency(program),
            chunks={w.name: self._chunk() for b in program.blocks for w in b.worksets if program.forms[w.form].chunk},
            prefetch=self.candidate.prefetch,
            retire_late=self.candidate.retire_late,
            accumulate=self.accumulate,
            budget=self.budget,
        )

        return PassResult(program, program.plan != before)

    def _chunk(self) -> tuple[int, int]:
        batch, sequence = self.sizes
        columns = min(sequence, self.candidate.tokens)
        return max(1, min(batch, self.candidate.tokens // columns)), columns

    def _residency(self, program: Program) -> dict[str, Residency]:
        """Where each value that the backward uses is until then."""
        assert program.step is not None
        last = len(program.blocks) - 1
        result: dict[str, Residency] = {}
        for node in program.step.graph.nodes:
            note = meta.note(node)
            if node.target is not operator.getitem or note.phase != "forward" or not note.source:
                continue
            users = [meta.note(u) for u in node.users if u.target in steps.COMPUTE]
            if not any(u.phase == "backward" for u in users):
                continue
            inside = all(u.block == note.block for u in users)
            never = ":saved." in note.source
            result[note.source] = "recompute" if inside and not never and note.block != last else "keep"
        return result

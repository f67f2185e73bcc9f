"""choose_residency: DECIDES where everything lives, and writes the plan; it inserts nothing.

The policy is fixed for now: values inside a block are recomputed, but for results of attention and its like if they
fit, and values between blocks are kept on the device. Within it, chunks and the overlap of copies are taken as large
as the device budget allows, tried in the order of CANDIDATES; what is left over goes to slabs that live on the device,
then to gradients that wait there.

Before and after, the same bare step graph; after, `program.plan` holds for example

    residency {'add_7': 'recompute', 'embedding': 'keep'}, chunks {'epilogue/1': (1, 1024)}, prefetch 1
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from oomc import meta
from oomc.offloadable import is_fence_result, kept_values, value_bytes, why_not
from oomc.plan import Budget, Plan, Residency, Updates
from oomc.program import PassResult, Program
from oomc.worksets import Form

CHUNK_TOKENS = tuple(4**n for n in range(15, 1, -1))
LOSS_TOKENS = 4096
"""Most tokens in a chunk of the loss: its logits are much larger than what goes in, and more would be no faster."""

LOOKUP_TOKENS = 65536
"""Fewest tokens in a chunk of a lookup, whose gradients are as large as its table: chunks save next to nothing and add
these up. Not one chunk for all, since torch's CUDA kernel takes memory of its own for each of its tokens."""
_LOOKUPS = frozenset({torch.ops.aten.embedding.default, torch.ops.aten.embedding_dense_backward.default})


@dataclass(frozen=True)
class Candidate:
    """One point of the policy.

    Attributes:
        tokens: in a chunk.
        prefetch: slabs fetched ahead.
        hold: blocks whose gradients stay on the device beside those of the one that computes.
        stage: whether the device may update slabs of the host, for which it needs memory.
        resident: slabs that live on the device.
        keep: whether results of attention and its like stay on the device until the backward.
        offload: whether values between blocks, and what mixing tokens came to, wait on the host for the backward.
    """

    tokens: int
    prefetch: int
    hold: int
    stage: bool = True
    resident: tuple[str, ...] = ()
    keep: bool = False
    offload: bool = False


_WAYS = (
    Candidate(0, 1, 1, keep=True), Candidate(0, 1, 1), Candidate(0, 1, 1, stage=False, keep=True),
    Candidate(0, 1, 1, stage=False), Candidate(0, 1, 1, stage=False, offload=True), Candidate(0, 1, 0, stage=False),
    Candidate(0, 0, 0, stage=False), Candidate(0, 0, 0, stage=False, offload=True),
)  # fmt: skip


def _groups(least: int, most: int) -> tuple[tuple[Candidate, ...], ...]:
    return tuple(
        tuple(replace(way, tokens=tokens) for tokens in CHUNK_TOKENS if least <= tokens < most) for way in _WAYS
    )


LARGE_CHUNKS = _groups(2048, 2**31)
SMALL_CHUNKS = _groups(128, 2048) + _groups(0, 128)
CANDIDATES = LARGE_CHUNKS + SMALL_CHUNKS
"""Groups that differ in nothing but the size of chunks, large chunks first."""
OFFLOAD_FROM = 64 << 10
"""Bytes of the smallest value that is worth a copy to the host."""


UNLIMITED = Budget()
DEFAULT = Updates()


@dataclass(frozen=True)
class ChooseResidency:
    """See the module's docstring.

    Attributes:
        sizes: the batch and sequence size of the step.
        budget: what may be taken.
        candidate: the point of the policy.
        accumulate: whether the step only accumulates gradients.
        updates: of the optimizer.
        given: a plan that was made before, to be taken as it is.
    """

    sizes: tuple[int, int]
    budget: Budget = UNLIMITED
    candidate: Candidate = CANDIDATES[0][0]
    accumulate: bool = False
    updates: Updates = DEFAULT
    given: Plan | None = None
    name: str = "choose_residency"

    def __call__(self, program: Program) -> PassResult:
        before = program.plan
        if self.given is not None:
            program.plan = self.given
            return PassResult(program, program.plan != before)
        resident = [s for s in program.slabs if s.name in self.candidate.resident]
        where = self.updates.where if self.candidate.stage else "host"
        program.plan = Plan(
            sizes=self.sizes,
            residency=self._residency(program),
            chunks=self.chunks(program),
            prefetch=self.candidate.prefetch,
            hold=self.candidate.hold,
            accumulate=self.accumulate,
            keep=self.updates.keep and not self.accumulate,
            resident=tuple(s.name for s in resident),
            where=where,
            update_bytes=self.updates.staging_bytes(where)
            + sum(self.updates.resident_bytes(s, self.accumulate) for s in resident),
            groups=program.groups,
            budget=self.budget,
        )

        return PassResult(program, program.plan != before)

    def chunks(self, program: Program) -> dict[str, tuple[int, int]]:
        """The (batch, sequence) rectangle in which each workset runs that can run in chunks."""
        result: dict[str, tuple[int, int]] = {}
        batch, sequence = self.sizes
        for workset in (w for b in program.blocks for w in b.worksets):
            form = program.forms[workset.form]
            if form.chunk:
                tokens = min(self.candidate.tokens, LOSS_TOKENS) if any(form.reduced) else self.candidate.tokens
                tokens = max(tokens, LOOKUP_TOKENS) if _looks_up(form) else tokens
                columns = sequence if form.chunk == "rows" else min(sequence, tokens)
                result[workset.name] = max(1, min(batch, tokens // columns)), columns
        return result

    def _residency(self, program: Program) -> dict[str, Residency]:
        """Where each value that the backward uses is until then."""
        last = len(program.blocks) - 1
        result: dict[str, Residency] = {}
        for node, inside in kept_values(program):
            note = meta.note(node)
            never = ":saved." in note.source or (self.candidate.keep and is_fence_result(program, node))
            result[note.source] = "recompute" if inside and not never and note.block != last else "keep"
        if self.candidate.offload:
            result |= self._offloaded(program, result)
        return result

    def _offloaded(self, program: Program, otherwise: dict[str, Residency]) -> dict[str, Residency]:
        """Values between blocks, and fences' results, that wait on the host: large ones that are not needed at once.

        What a fence gives beside a large result stays on the device: it would be computed again for it.
        """
        assert program.step is not None
        large: dict[str, fx.Node] = {}
        small: dict[str, fx.Node] = {}
        for node in program.step.graph.nodes:
            note = meta.note(node)
            if node.target is not operator.getitem or note.phase != "forward" or note.source not in otherwise:
                continue
            needed = max(meta.note(user).block for user in node.users)
            between = needed != note.block and otherwise[note.source] == "keep"
            if needed + self.candidate.prefetch >= len(program.blocks) - 1:
                continue  # it would be back by the last block's backward
            if between or is_fence_result(program, node):
                leaves = value_bytes(program, node, self.sizes) >= OFFLOAD_FROM and not why_not(program, node)
                (large if leaves else small)[note.source] = node
        fences = {node.args[0] for node in large.values() if is_fence_result(program, node)}
        beside = [name for name, node in small.items() if node.args[0] in fences]
        return {**dict.fromkeys(large, "offload"), **dict.fromkeys(beside, "keep")}


def _looks_up(form: Form) -> bool:
    """Whether a form's graphs do nothing but look up rows of a table."""
    graphs = [g.graph for g in (form.forward, form.backward) if g is not None]
    found = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return bool(found) and _LOOKUPS.issuperset(found)

"""The pipeline: its passes in order, and what runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from oomc import private, steps
from oomc.errors import BudgetError
from oomc.fxutil import copy_graph
from oomc.passes.assemble import Assemble
from oomc.passes.canonicalize import Canonicalize
from oomc.passes.choose_residency import CANDIDATES, DEFAULT, Candidate, ChooseResidency
from oomc.passes.differentiate import Differentiate
from oomc.passes.insert_chunks import InsertChunks
from oomc.passes.insert_offload import InsertOffload
from oomc.passes.insert_prefetch import InsertPrefetch
from oomc.passes.insert_recompute import InsertRecompute
from oomc.passes.insert_updates import InsertUpdates
from oomc.passes.insert_value_offload import InsertValueOffload
from oomc.passes.lower import Lower
from oomc.passes.overwrite_values import OverwriteValues
from oomc.passes.partition_worksets import PartitionWorksets
from oomc.passes.rewrite_attention import RewriteAttention
from oomc.passes.rewrite_convolutions import RewriteConvolutions
from oomc.passes.rewrite_experts import RewriteExperts
from oomc.passes.rewrite_norms import RewriteNorms
from oomc.passes.schedule import Schedule
from oomc.passes.split_experts import SplitExperts
from oomc.passes.split_projections import SplitProjections
from oomc.plan import Budget, Plan, Updates, bytes_table, format_bytes
from oomc.program import Pass, Program
from oomc.simulate import Profiler, Projection, project

Observer = Callable[[str, Program], None]
"""Called with a pass's name and the program after it."""

MODEL_PASSES: tuple[Pass, ...] = (
    Canonicalize(),
    RewriteAttention(),
    RewriteConvolutions(),
    RewriteExperts(),
    RewriteNorms(),
    SplitProjections(),
    PartitionWorksets(),
    Differentiate(),
    Assemble(),
)
"""From the forward graph to the bare step graph: once for a model."""


CUT = MODEL_PASSES.index(PartitionWorksets())
"""The place of the pass that finds blocks and cuts them."""
WHOLE_BLOCKS: tuple[Pass, ...] = (PartitionWorksets(whole=True), *MODEL_PASSES[CUT + 1 :])
"""From a program that is cut into worksets to the same one with blocks that run whole, in chunks of batch rows."""


def in_groups_passes(groups: int, align: int = 1) -> tuple[Pass, ...]:
    """From a program that is cut into worksets to the same one whose layers' experts are blocks in so many groups."""
    return (SplitExperts(groups, align), *MODEL_PASSES[CUT:])


def step_passes(choose: ChooseResidency) -> tuple[Pass, ...]:
    """From the bare step graph to the scheduled one: once for a plan."""
    return (
        choose, InsertChunks(), InsertRecompute(), InsertValueOffload(), OverwriteValues(),
        InsertOffload(), InsertPrefetch(), InsertUpdates(), Schedule(),
    )  # fmt: skip


def chosen(plan: Plan) -> ChooseResidency:
    """The choice that made a plan."""
    return ChooseResidency(plan.sizes, given=replace(plan, slots=(), host_slots=(), regenerated=0))


def run_passes(
    program: Program, passes: Sequence[Pass], observe: Observer | None = None, verify: bool = False
) -> Program:
    """Run passes in order; with `verify`, check each stage's invariants, and that passes tell what they changed."""
    from oomc.printer import print_program
    from oomc.verify import verify_program

    for each in passes:
        before = print_program(program) if verify else ""
        result = each(program)
        program = result.program
        if verify:
            changed = print_program(program) != before
            assert result.modified or not changed, f"{each.name} changed the graph and says that it did not"
            verify_program(program, after=each.name)
        if observe is not None:
            observe(each.name, program)
    return program


def with_plan(bare: Program, choose: ChooseResidency, observe: Observer | None = None, verify: bool = False) -> Program:
    """A copy of the program whose step graph is scheduled by a plan; `bare` stays as it is."""
    assert bare.step is not None
    graph = copy_graph(bare.step.graph)
    program = replace(bare, step=private.lazy_module(graph, "Step"), plan=None)
    return run_passes(program, step_passes(choose), observe, verify)


def in_whole_blocks(bare: Program, verify: bool = False) -> Program | None:
    """The program with blocks that run whole in chunks of batch rows, where there are any; `bare` stays as it is."""
    program = run_passes(_uncut(bare), WHOLE_BLOCKS, verify=verify)
    return program if len(program.forms) < len(bare.forms) else None


def in_groups(
    bare: Program, groups: int, align: int = 1, observe: Observer | None = None, verify: bool = False
) -> Program | None:
    """The program whose layers' experts are blocks in so many groups, where any can be; `bare` stays as it is.

    Args:
        bare: with the experts of each layer in one.
        groups: at least 2.
        align: the elements of a group's rows are a multiple of it.
        observe: as for `run_passes`.
        verify: likewise.
    """
    program = run_passes(_uncut(bare), in_groups_passes(groups, align), observe, verify)
    return program if "expert groups" in program.notes else None


def _uncut(bare: Program) -> Program:
    """A copy as it was before its blocks were found."""
    graph = copy_graph(bare.forward.graph)
    return replace(
        bare, forward=private.lazy_module(graph, "Forward", bare.forward), inputs=list(bare.inputs),
        notes=dict(bare.notes), blocks=[], slabs=[], forms={}, step=None,
    )  # fmt: skip


def plan_step(
    bare: Program, profiler: Profiler, sizes: tuple[int, int], allowed: int | None, budget: Budget,
    *, accumulate: bool = False, updates: Updates = DEFAULT, resident: Collection[str] = (),
    candidates: Sequence[Sequence[Candidate]] = CANDIDATES, verify: bool = False, in_all: Callable[[int], int] = int,
    chunk_tokens: int | None = None, try_all: bool = True,
) -> tuple[Program, Projection]:  # fmt: skip
    """The first candidate plan whose projected device peak is within `allowed` bytes, and its scheduled program.

    What is left over goes to slabs of `resident`, the largest first, and then to gradients that wait on the device.
    `in_all` says what a peak of the step's own tensors comes to with all that the process holds beside them.
    `chunk_tokens` are in each chunk if given. With `try_all`, what takes the most memory is tried first.

    Raises:
        BudgetError: none is; names the smallest budget that would do.
    """

    def scheduled(candidate: Candidate) -> tuple[Program, Projection]:
        choose = ChooseResidency(sizes, budget, candidate, accumulate, updates)
        program = with_plan(bare, choose, verify=verify)
        return program, project(program, profiler)

    if chunk_tokens is not None:
        candidates = tuple((replace(group[0], tokens=chunk_tokens),) for group in candidates)

    def fits(made: tuple[Program, Projection]) -> bool:
        return allowed is None or made[1].peak <= allowed

    if try_all and fits(made := scheduled(_most(bare, candidates[0][0], accumulate, resident))):
        return made
    least: tuple[Program, Projection] | None = None
    seen: list[Plan | None] = []
    for group in candidates:
        group = _different(bare, group, sizes)
        plan = ChooseResidency(sizes, budget, group[-1], accumulate, updates)(replace(bare, plan=None)).program.plan
        if plan in seen:
            continue
        seen.append(plan)
        made = scheduled(group[-1])
        if least is None or made[1].peak < least[1].peak:
            least = made
        if not fits(made):
            continue
        first, last = 0, len(group) - 1  # the first that fits is among these: smaller chunks take less
        while first < last:
            middle = (first + last) // 2
            tried = scheduled(group[middle])
            if fits(tried):
                made, last = tried, middle
            else:
                first = middle + 1
        for better in _larger(bare, group[last], made[1], allowed, updates, accumulate, resident):
            tried = scheduled(better)
            if fits(tried):
                return tried
        return made
    assert least is not None and allowed is not None
    smallest = in_all(least[1].peak)
    raise BudgetError(explain_shortage(*least, in_all(allowed), sizes, smallest), smallest_device=smallest)


def _different(bare: Program, candidates: Sequence[Candidate], sizes: tuple[int, int]) -> list[Candidate]:
    """Candidates without those that come to the same chunks as one before them."""
    found: dict[object, Candidate] = {}
    for candidate in candidates:
        chunks = ChooseResidency(sizes, candidate=candidate).chunks(bare)
        found.setdefault((replace(candidate, tokens=0), *chunks.items()), candidate)
    return list(found.values())


def _most(bare: Program, candidate: Candidate, accumulate: bool, resident: Collection[str]) -> Candidate:
    """The candidate that takes all the memory that it can make use of."""
    hold = candidate.hold if accumulate else len(bare.blocks)
    return replace(candidate, hold=hold, resident=tuple(s.name for s in bare.slabs if s.name in resident))


def _larger(
    bare: Program, candidate: Candidate, projection: Projection, allowed: int | None, updates: Updates,
    accumulate: bool, resident: Collection[str],
) -> Iterator[Candidate]:  # fmt: skip
    """Candidates that take more memory than one that fits, best first."""
    if candidate.hold == 0:
        return
    left = math.inf if allowed is None else allowed - projection.peak
    chosen: list[str] = []
    for slab in sorted(bare.slabs, key=lambda s: -s.layout.weight_bytes):
        need = updates.resident_bytes(slab, accumulate)
        if slab.name in resident and need <= left:
            chosen.append(slab.name)
            left -= need
    blocks = len(bare.blocks)
    holds = [1] if accumulate else sorted({blocks, *(h for h in (24, 16, 12, 8, 6, 5, 4, 3, 2, 1) if h < blocks)})[::-1]
    while True:
        for hold in holds:
            if chosen or hold > candidate.hold:
                yield replace(candidate, hold=hold, resident=tuple(chosen))
        if not chosen:
            return
        chosen.pop()


def explain_shortage(
    program: Program, projection: Projection, allowed: int, sizes: tuple[int, int], smallest: int
) -> str:
    """What the most frugal plan needs, as a table."""
    assert program.plan is not None
    rows = [
        ("weights in flight (slots)", sum(program.plan.slots)),
        ("staging for updates", program.plan.update_bytes),
        ("buffers, constants, inputs", projection.fixed - sum(program.plan.slots) - program.plan.update_bytes),
        (f"values and temporaries at {projection.at}", projection.peak - projection.fixed),
    ]
    if smallest > projection.peak:
        rows.append(("CUDA's own, and what its allocator reserves", smallest - projection.peak))
    rows += [("needed", smallest), ("allowed", allowed)]
    return (
        f"a step of batch {sizes[0]} x {sizes[1]} does not fit the device budget:\n{bytes_table(rows)}\n"
        f"The smallest device budget that works for this batch is {smallest} bytes "
        f"({format_bytes(smallest)}). Raise the budget, or make the batch or the sequence smaller"
    )


def carried(program: Program) -> frozenset[str]:
    """Slabs whose gradients of the step before a scheduled step retires."""
    assert program.step is not None
    nodes = program.step.graph.find_nodes(op="call_function", target=steps.retire_carried)
    return frozenset(str(node.args[1]) for node in nodes)


def lower(program: Program, backend: str) -> Program:
    """Compile what the step uses."""
    return run_passes(program, (Lower(backend),))

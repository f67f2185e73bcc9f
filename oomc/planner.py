"""The planner: the plan whose step is simulated to be shortest within the device's and the host's budget.

    planned = Planner(machine, backend).plan(cuts, request)

A cut is a bare program (blocks in worksets, or whole). Each way to run it in chunks is an instance (oomc.instance); the
search (oomc.search) asks the quick evaluation, and the best few plans are checked on their real step graphs: projected
(oomc.simulate) and timed (oomc.timeline). What turns out over budget is sought again with less. Where the host's budget
or the link then is what holds a step back, boundaries that would wait on the host are regenerated instead, as far as
that is better (oomc.regenerate). Everything that was checked is remembered, so that a larger budget never gets a slower
plan than a smaller one got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, get_args

from oomc import pipeline, timeline
from oomc.cost import Costs, Factors
from oomc.errors import BudgetError
from oomc.explain import Explanation
from oomc.instance import Source, residency
from oomc.machine import Machine
from oomc.passes.choose_residency import CHUNK_TOKENS, DEFAULT, UNLIMITED, Candidate, ChooseResidency
from oomc.plan import Budget, Plan, Updates, format_bytes
from oomc.program import Program
from oomc.quick import Decisions, Instance
from oomc.regenerate import CHAINS, Boundary, boundaries, groups, with_regenerated
from oomc.replay import project_reserved
from oomc.runtime.updates import Where
from oomc.search import Beyond, Found, Search, frugal
from oomc.simulate import Profiler, Projection, project

CHECKED = 3
"""How many plans are checked on their real step graphs."""
MANY = 200
"""Of more blocks only one plan is: each takes a second."""
RIVAL = 1.1
"""How much longer than the chosen plan's a step may be simulated to take, for a plan to be worth a try."""
LARGE = 2048
"""Tokens of a chunk from which on products lose little."""
NEAR = 0.98
"""The share of the smallest budget that is named at which nothing is found any more."""
UNUSED = 0.02
"""The share of the device that may be set aside for an allocator and not be used, before plans are sought again."""
WORTH = 1 / 8
"""The share of the largest boundary's bytes from which on it is worth a try to regenerate another."""
FULL = 0.9
"""The share of the host's budget from which on it may be what a plan was made to fit."""
WAITS = 0.01
"""The share of a step from which on it counts that the compute waits for values."""
ROUNDS = 5
"""How often plans are sought again with what the last ones were over budget taken off; of few blocks, more often."""
MOST_ROUNDS, FEW = 12, 6
"""So often, of so many blocks or fewer."""
CLOSE = 0.015
"""The share by which a plan of many blocks may be slower, for the search to end, than what is found where an allocator
needs nothing for itself: by the quick estimate there is little to gain then."""

Cut = Callable[[], tuple[Program, Profiler] | None]
"""A bare program and its profiler, made when asked for; None if there is no such program."""


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        sizes: batch and sequence.
        allowed: device bytes for the step's own tensors, None for any.
        host: host bytes, None for any.
        budget: as the user gave it, for the plan.
        updates: of the optimizer.
        movable: slabs that may live on the device.
        fixed: they do already, and leave it only where the batch does not fit otherwise.
        accumulate: gradients are summed and not applied.
        chunk_tokens: in each chunk, if given.
        verify: whether every pass is verified.
        in_all: what so many bytes of the step's own come to with all that the process holds.
        reserves: it is what CUDA's allocator reserves that counts.
    """

    sizes: tuple[int, int]
    allowed: int | None = None
    host: int | None = None
    budget: Budget = UNLIMITED
    updates: Updates = DEFAULT
    movable: frozenset[str] = frozenset()
    fixed: bool = False
    accumulate: bool = False
    chunk_tokens: int | None = None
    verify: bool = False
    in_all: Callable[[int], int] = int
    reserves: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What plans must share to be comparable."""
        return self.sizes, self.updates, self.movable, self.accumulate, self.chunk_tokens


@dataclass(frozen=True)
class Checked:
    """A plan whose step graph was projected and timed.

    Attributes:
        cut: index of its program.
        peak: device bytes (`Projection.held`).
        host: bytes.
        reserved, limit: of the projection.
        linked: copies are what the step is bound by, or waits for.
    """

    cut: int
    plan: Plan
    peak: int
    host: int
    seconds: float
    reserved: int = 0
    limit: int = 0
    linked: bool = False


@dataclass
class Planned:
    """The chosen plan's scheduled program, projection and simulated seconds.

    Attributes:
        bare: what it was made from.
        explain: makes the explanation, when asked for.
        rivals: makes so many other plans, the fastest first, that fit and run in the same chunks.
    """

    bare: Program
    program: Program
    projection: Projection
    seconds: float
    explain: Callable[[], Explanation]
    rivals: Callable[[int], list[Planned]]


class Learned(dict[tuple[Any, int], int]):
    """Device bytes that plans were found to take beyond the quick estimate, by tiling and gradients held."""

    def beyond(self, tiling: Any) -> Beyond:
        """What to expect of a tiling's plans: where nothing is known, the least that is known of it, or of all."""
        known = {hold: size for (each, hold), size in self.items() if each == tiling}
        return Beyond(known, min(known.values() or self.values(), default=0))


@dataclass
class Planner:
    """Plans for the programs of one trace; see the module's docstring."""

    machine: Machine
    backend: str = "eager"
    factors: Factors = field(default_factory=Factors)
    _sources: dict[int, Source | None] = field(default_factory=dict)
    _instances: dict[Any, Instance] = field(default_factory=dict)
    _checked: dict[Any, list[Checked]] = field(default_factory=dict)
    _learned: dict[Any, Learned] = field(default_factory=dict)

    def fresh(self) -> Planner:
        """One that knows the same programs and no plans."""
        return replace(self, _checked={})

    def plan(self, cuts: Sequence[Cut], request: Request) -> Planned:
        """The best plan.

        Raises:
            BudgetError: none fits the device budget; names the smallest that would do. A host budget that is too small
                gives the plan that takes the least of the host.
        """
        if request.updates.where == "device":  # as asked for, wherever it fits
            wanted = self._find(cuts, request, self._checked.setdefault(request.key, []))
            if wanted is not None:
                wanted = self._regenerating(cuts, request, wanted, self._checked[request.key])
                return self._planned(cuts, request, wanted, self._all(request))
            request = replace(request, updates=replace(request.updates, where="host"))
        known = self._checked.setdefault(request.key, [])
        best = self._find(cuts, request, known)
        if best is not None:
            best = self._regenerating(cuts, request, best, known)
            return self._planned(cuts, request, best, self._all(request))
        return self._least(cuts, request, known)

    def _find(self, cuts: Sequence[Cut], request: Request, known: list[Checked]) -> Checked | None:
        """The fastest plan that fits the device, if one is found."""
        for tokens in _stages(request):
            for cut in range(len(cuts)):
                tilings = self._tilings(cuts, cut, request, tokens)
                if not tilings:
                    continue
                self._seek(cuts, request, tilings, known)
                best = self._fastest(known, request)
                if best is not None and not self._may_gain(best, request):
                    break
            best = self._fastest(known, request)
            if best is not None:
                return best
        return None

    def _regenerating(self, cuts: Sequence[Cut], request: Request, best: Checked, known: list[Checked]) -> Checked:
        """The best plan, with boundaries that would wait on the host regenerated where that is better.

        The quick evaluation does not know of it, so these plans are made from ones that it has found: the best one, and
        where the host's budget may have made that slow, the best one without it.
        """
        bases = [best] if best.linked or not _on_host(best, request) else []
        if request.host is not None and best.host > FULL * request.host:
            free = self._find(cuts, replace(request, host=None), known)
            if free is not None and free not in bases:
                bases.append(free)
        for base in bases:
            if base is best or base.seconds < best.seconds or not _on_host(best, request):
                could = self._on_host_for(cuts, base)
                least = base.host - sum(b.nbytes for b in could)
                if base is best or request.host is None or least <= request.host:
                    for most in CHAINS:
                        if not self._try_regenerating(cuts, request, base, groups(could, most), known):
                            break
        found = self._fastest(known, request)
        assert found is not None, "one was found before"
        return found

    def _on_host_for(self, cuts: Sequence[Cut], base: Checked) -> list[Boundary]:
        """The boundaries that wait on the host by a plan and could be regenerated; small ones are not worth it."""
        source = self.source(cuts, base.cut)
        assert source is not None
        could = boundaries(source.program, base.plan, source.costs)
        away = [b for b in could if base.plan.residency[b.value] == "offload"]
        most = max((b.nbytes for b in away), default=0)
        return [b for b in away if b.nbytes >= WORTH * most]

    def _try_regenerating(
        self, cuts: Sequence[Cut], request: Request, base: Checked, tried: list[list[Boundary]], known: list[Checked]
    ) -> bool:
        """Regenerate boundaries that wait on the host by a plan, one group after another as it fits and helps.

        False where a group makes the step longer before any has helped: longer chains compute more again.
        """
        source = self.source(cuts, base.cut)
        assert source is not None
        now = base
        for group in tried:
            over = 0 if request.host is None else now.host - request.host
            if over <= 0 and not now.linked:
                return True
            enough = len(group) if over <= 0 else _enough(group, over)
            longer = True
            for count in sorted({enough, max(1, enough // 2)}, reverse=True):
                # the earlier blocks have less beside them: half of a group may fit where all of it does not
                plan = with_regenerated(now.plan, [b.value for b in group[:count]])
                made = self._check_plan(source, base.cut, plan, request, known)
                fits = request.allowed is None or made.peak <= request.allowed
                if fits and (over > 0 or made.seconds < now.seconds):
                    now = made
                    break
                longer &= fits
            if now is base and longer:
                return False
        return True

    # -- what there is to choose from -----------------------------------------------------------------------------

    def source(self, cuts: Sequence[Cut], cut: int) -> Source | None:
        """A cut's program with what was found about it."""
        if cut not in self._sources:
            given = cuts[cut]()
            self._sources[cut] = given and Source(
                *given, Costs(given[0], self.machine, self.backend, self.factors).while_updating
            )
        return self._sources[cut]

    def _tilings(self, cuts: Sequence[Cut], cut: int, request: Request, tokens: Sequence[int]) -> list[tuple[int, Any]]:
        """Ways to run a cut's program in chunks once each."""
        source = self.source(cuts, cut)
        found: list[tuple[int, Any]] = []
        for each in tokens if source is not None else ():
            assert source is not None
            choose = ChooseResidency(request.sizes, candidate=Candidate(each, 1, 1))
            key = cut, tuple(choose.chunks(source.program).items())
            if key not in found:
                found.append(key)
        return found

    def _all(self, request: Request) -> list[tuple[int, Any]]:
        """Every tiling that an instance was made of."""
        return [(key[0], key[1]) for key in self._instances if key[2] == request.key]

    def _instance(self, cuts: Sequence[Cut], tiling: tuple[int, Any], request: Request) -> Instance:
        key = (*tiling, request.key)
        if key not in self._instances:
            source = self.source(cuts, tiling[0])
            assert source is not None
            self._instances[key] = source.instance(
                request.sizes, dict(tiling[1]), request.updates, request.movable, request.accumulate
            )
        return self._instances[key]

    # -- seeking and checking -------------------------------------------------------------------------------------

    def _seek(
        self, cuts: Sequence[Cut], request: Request, tilings: list[tuple[int, Any]], known: list[Checked]
    ) -> None:
        """Search among tilings, and check the best, until the best one fits.

        What a plan takes beyond the quick estimate depends on its chunks, and on the gradients that it holds: they lie
        between temporaries, where an allocator cannot use the space around them. So it is learned for each such choice.
        Of many blocks, whose checks take half a second each, it ends with a plan close to the best there could be.
        """
        instances = [self._instance(cuts, tiling, request) for tiling in tilings]
        device = request.allowed
        pinned = tuple(i for i, ok in enumerate(instances[0].movable) if ok) if request.fixed else ()
        learned = self._learned[request.key] = Learned()
        enough = 0.0
        for _ in range(max(ROUNDS, min(MOST_ROUNDS, MOST_ROUNDS * FEW // instances[0].blocks))):
            more = [learned.beyond(tiling) for tiling in tilings]
            found = Search(instances, device, request.host, pinned, more=more).best(_checks(instances))
            if found and not learned and instances[0].blocks > FEW:
                enough = (1 + CLOSE) * found[0].outcome.seconds
            if not found and pinned:
                pinned = ()
                continue
            if not found:
                if request.host is None:
                    return
                found = _least_host(Search(instances, device, more=more))
                if not found:
                    return
            used = dict(learned)
            best_fits = any_fits = False
            for place, each in enumerate(found):
                if place and self._is_enough(known, request, enough):
                    return
                checked = self._check(cuts, request, tilings[each.index], each.decisions, known)
                if device is None:
                    return
                beyond, expected = max(0, checked.peak - each.outcome.device), more[each.index].at(each.decisions.hold)
                key = tilings[each.index], each.decisions.hold
                fits = checked.peak <= device
                best_fits |= fits and place == 0
                any_fits |= fits
                if not fits:
                    learned[key] = max(learned.get(key, 0), beyond)
                elif expected - beyond > UNUSED * device:  # more was set aside for it than it needs
                    learned[key] = beyond
                if best_fits and len(instances) * instances[0].blocks <= 4:
                    return
            if (best_fits and learned == used) or (any_fits and not request.reserves):
                return  # without an allocator the quick estimate is within 1%: there is little to learn
            if self._is_enough(known, request, enough):
                return

    def _is_enough(self, known: list[Checked], request: Request, seconds: float) -> bool:
        """Whether a plan that fits takes at most so long."""
        best = self._fastest(known, request)
        return best is not None and _on_host(best, request) and best.seconds <= seconds

    def _check(
        self, cuts: Sequence[Cut], request: Request, tiling: tuple[int, Any], d: Decisions, known: list[Checked]
    ) -> Checked:
        source = self.source(cuts, tiling[0])
        assert source is not None
        return self._check_plan(source, tiling[0], to_plan(source, d, dict(tiling[1]), request), request, known)

    def _check_plan(self, source: Source, cut: int, plan: Plan, request: Request, known: list[Checked]) -> Checked:
        for each in known:
            if (each.cut, each.plan) == (cut, plan):
                return each
        known.append(self._checked_plan(source, cut, plan, request))
        return known[-1]

    def _checked_plan(self, source: Source, cut: int, plan: Plan, request: Request) -> Checked:
        program = scheduled(source.program, plan, request)
        projection = (project_reserved if request.reserves else project)(program, source.profiler)
        line = timeline.simulate(program, source.costs.of_step(program), request.updates, record=False)
        assert program.plan is not None
        slabs = sum(request.updates.host_bytes(s) for s in program.slabs if s.name not in plan.resident)
        host = slabs + request.updates.host_fixed + program.plan.host_value_bytes
        linked = line.bound in ("h2d", "d2h", "host memory") or line.exposed["values"] > WAITS * line.step_s
        return Checked(cut, plan, projection.held, host, line.step_s, projection.reserved, projection.limit, linked)

    def _fastest(self, known: list[Checked], request: Request) -> Checked | None:
        """The fastest plan that fits the device; one that fits the host too, or what takes the least of it."""
        fit = [each for each in known if request.allowed is None or each.peak <= request.allowed]
        if not fit:
            return None
        if request.fixed:  # slabs that are on the device stay there where that is possible
            most = max(len(each.plan.resident) for each in fit)
            fit = [each for each in fit if len(each.plan.resident) == most]
        within = [each for each in fit if _on_host(each, request)]
        if not within:
            return min(fit, key=lambda each: each.host)
        return min(within, key=lambda each: each.seconds)

    def _may_gain(self, best: Checked, request: Request) -> bool:
        """Whether another cut might be faster: this one is held back by memory."""
        if request.allowed is None or request.sizes[0] == 1:
            return False
        return len(best.plan.resident) < len(request.movable) and not request.fixed

    def _least(self, cuts: Sequence[Cut], request: Request, known: list[Checked]) -> Planned:
        """The plan that takes the least of the device.

        Raises:
            BudgetError: that is too much.
        """
        tilings = self._all(request)
        instances = [self._instance(cuts, tiling, request) for tiling in tilings]
        found = [self._check(cuts, request, tilings[f.index], f.decisions, known)
                 for f in frugal(instances, _checks(instances))]  # fmt: skip
        least = min(found, key=lambda each: each.peak)
        assert request.allowed is not None
        # what the search finds below that counts too, or a smaller budget than the one that is named would work
        while least.peak > request.allowed and (
            lower := self._find(cuts, replace(request, allowed=int(NEAR * least.peak)), known)
        ):
            least = lower
        if least.peak <= request.allowed:
            return self._planned(cuts, request, self._regenerating(cuts, request, least, known), tilings)
        source = self.source(cuts, least.cut)
        assert source is not None
        program, projection = _made(source, least, request)
        smallest = request.in_all(projection.held)
        text = pipeline.explain_shortage(program, projection, request.in_all(request.allowed), request.sizes, smallest)
        raise BudgetError(text, smallest_device=smallest)

    def _planned(self, cuts: Sequence[Cut], request: Request, best: Checked, tilings: list[tuple[int, Any]]) -> Planned:
        source = self.source(cuts, best.cut)
        assert source is not None
        program, projection = _made(source, best, request)
        # the quick evaluation knows of what is allocated only
        allowed = None if request.allowed is None else request.allowed - (projection.held - projection.peak)

        def explain() -> Explanation:
            instances = [self._instance(cuts, tiling, request) for tiling in tilings]
            index = next((i for i, t in enumerate(tilings) if (t[0], dict(t[1])) == (best.cut, best.plan.chunks)), None)
            return Explanation.of(source, instances, index, best.plan, projection.peak, best.host, allowed,
                                  request.host)  # fmt: skip

        def rivals(count: int) -> list[Planned]:
            return [self._planned(cuts, request, each, tilings) for each in self._rivals(cuts, request, best, count)]

        return Planned(source.program, program, projection, best.seconds, explain, rivals)

    def _rivals(self, cuts: Sequence[Cut], request: Request, best: Checked, count: int) -> list[Checked]:
        """Other plans that fit both budgets and are simulated to take little longer than the best one."""
        tiling = (best.cut, tuple(best.plan.chunks.items()))
        instance = self._instance(cuts, tiling, request)
        pinned = tuple(i for i, ok in enumerate(instance.movable) if ok) if request.fixed else ()
        found: list[Checked] = []
        more = [self._learned.get(request.key, Learned()).beyond(tiling)]
        known = list(self._checked.get(request.key, ()))
        for each in Search([instance], request.allowed, request.host, pinned, more=more).best(3 * count):
            made = self._check(cuts, request, tiling, each.decisions, known)
            fits = request.allowed is None or made.peak <= request.allowed
            if fits and made.plan != best.plan and made.seconds < RIVAL * best.seconds:
                found.append(made)
        return sorted(found, key=lambda each: each.seconds)[:count]

    def given(self, cuts: Sequence[Cut], request: Request, plan: Plan) -> Planned:
        """A plan that is given, for the cut whose worksets and values it names.

        What follows from the step and not from the plan (how gradients are kept, sizes of slots) is made anew.

        Raises:
            ValueError: it is of another model, or does not decide about all that there is.
            BudgetError: it does not fit the device.
        """
        wrong = ""
        for cut in range(len(cuts)):
            source = self.source(cuts, cut)
            if source is None:
                continue
            why = _why_not_for(plan, source, request)
            wrong = wrong or why
            if not why:
                slabs = [slab for slab in source.program.slabs if slab.name in plan.resident]
                own = sum(request.updates.resident_bytes(slab, request.accumulate) for slab in slabs)
                plan = replace(
                    plan, accumulate=request.accumulate, keep=request.updates.keep and not request.accumulate,
                    update_bytes=request.updates.staging_bytes(plan.where) + own, slots=(), host_slots=(),
                    regenerated=0,
                )  # fmt: skip
                checked = self._checked_plan(source, cut, plan, request)
                if request.allowed is not None and checked.peak > request.allowed:
                    needed, allowed = map(request.in_all, (checked.peak, request.allowed))
                    raise BudgetError(
                        f"the plan does not fit the device budget: it needs {format_bytes(needed)}, and "
                        f"{format_bytes(allowed)} are allowed. Raise the budget, or give another plan",
                        smallest_device=needed,
                    )
                return self._planned(cuts, request, checked, self._all(request))
        raise ValueError(f"the plan is not one of this model's step: {wrong}")


def _checks(instances: Sequence[Instance]) -> int:
    """How many of the best plans are checked."""
    return CHECKED if instances[0].blocks <= MANY else 1


def _on_host(each: Checked, request: Request) -> bool:
    """Whether a plan is within the host's budget."""
    return request.host is None or each.host <= request.host


def _enough(group: Sequence[Boundary], nbytes: int) -> int:
    """How many boundaries come to so many bytes; all of them if they do not."""
    sums = accumulate(b.nbytes for b in group)
    return next((n for n, total in enumerate(sums, start=1) if total >= nbytes), len(group))


def _stages(request: Request) -> list[tuple[int, ...]]:
    """Tokens of chunks that are tried together: all large ones, then smaller ones as long as nothing fits."""
    if request.chunk_tokens is not None:
        return [(request.chunk_tokens,)]
    large = tuple(t for t in CHUNK_TOKENS if t >= LARGE)
    return [large, *((t,) for t in CHUNK_TOKENS if t < LARGE)]


def _why_not_for(plan: Plan, source: Source, request: Request) -> str:
    """Why a plan does not decide about just what there is in a program, in a way that it can run; empty if it does."""
    program = source.program
    forms = {w.name: program.forms[w.form] for block in program.blocks for w in block.worksets}
    values = {value.name: value for value in source.values(request.sizes)}
    missing, unknown = values.keys() - plan.residency.keys(), plan.residency.keys() - values.keys()
    if missing or unknown:
        return (
            f"it says nothing of {len(missing)} values ({', '.join(sorted(missing)[:3])}), and names {len(unknown)} "
            f"that there are not ({', '.join(sorted(unknown)[:3])})"
        )
    for name, where in plan.residency.items():
        if where not in ("keep", "recompute", "offload"):
            return f"{name} is {where!r}, and not kept, recomputed or offloaded"
        if where == "recompute" and values[name].kind not in ("fence", "rest", "bound"):
            return f"{name} cannot be computed again"
        if where == "offload" and not values[name].leaves:
            return f"{name} cannot wait on the host"
    for name, chunk in plan.chunks.items():
        if name not in forms or not forms[name].chunk or min(chunk) < 1:
            return f"workset {name} does not run in chunks of {chunk}"
        if forms[name].chunk == "rows" and chunk[1] < plan.sizes[1]:
            return f"workset {name} runs in chunks of whole rows, not of {chunk}"
    if plan.groups != program.groups:
        return f"it has the experts of a layer in {plan.groups} groups, and the step in {program.groups}"
    absent = set(plan.resident) - {slab.name for slab in program.slabs if not slab.whole}
    if absent:
        return f"there is no slab {', '.join(sorted(absent))} that may live on the device"
    if plan.where not in get_args(Where):
        return f"who updates is {plan.where!r}, and not one of {', '.join(get_args(Where))}"
    # where both may, the host alone may too; where only the device is asked for, the host does it if that does not fit
    if plan.where not in (request.updates.where, "host"):
        return f"the step was not compiled for updates by {plan.where}"
    if plan.prefetch < 0 or plan.hold < 0:
        return "what is prefetched or held is below nothing"
    return ""


def to_plan(source: Source, d: Decisions, chunks: dict[str, tuple[int, int]], request: Request) -> Plan:
    """Decisions as a plan."""
    updates, accumulate = request.updates, request.accumulate
    slabs = [slab for slab, resident in zip(source.program.slabs, d.resident, strict=True) if resident]
    own = sum(updates.resident_bytes(slab, accumulate) for slab in slabs)
    return Plan(
        request.sizes, residency(source.values(request.sizes), d.level, d.away), chunks, d.prefetch, d.hold,
        accumulate, updates.keep and not accumulate, tuple(slab.name for slab in slabs), d.where,
        updates.staging_bytes(d.where) + own, groups=source.program.groups, budget=request.budget,
    )  # fmt: skip


def scheduled(bare: Program, plan: Plan, request: Request) -> Program:
    """The program with its step graph scheduled by a plan."""
    plan = replace(plan, budget=request.budget)
    return pipeline.with_plan(bare, pipeline.chosen(plan), verify=request.verify)


def _made(source: Source, checked: Checked, request: Request) -> tuple[Program, Projection]:
    """The scheduled program of a plan that was checked, and its projection."""
    program = scheduled(source.program, checked.plan, request)
    projection = project(program, source.profiler)
    return program, replace(projection, reserved=checked.reserved, limit=checked.limit)


def _least_host(search: Search) -> list[Found]:
    """Of what fits the device, what takes the least of the host."""
    grid = search.grid() or search.repaired()
    return [search.with_less_host(min(grid, key=lambda found: found.outcome.host))] if grid else []

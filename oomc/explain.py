"""Why a plan is as it is: what each block's decision saves, what memory is left over, and what more would buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomc.instance import Source, residency
from oomc.plan import Plan, format_bytes
from oomc.quick import WHERE, Decisions, Instance
from oomc.regenerate import boundaries
from oomc.search import Search

GIB = 1 << 30
SMALL = 0.03
"""The share of a budget that may be left over without a word."""
GAIN = 1e-3
"""The share of the step from which on a gain counts as one."""


@dataclass(frozen=True)
class Explanation:
    """Texts and figures about a plan.

    Attributes:
        left: device bytes below the budget.
        reason: why they are not used, if they are many.
        device_gib, host_gib: seconds that one more GiB of device or of host memory would save.
        blocks: of each block, its decision and why.
    """

    left: int
    reason: str
    device_gib: float
    host_gib: float
    blocks: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        saved = f"{1000 * self.device_gib:.1f} ms a step, of host memory {1000 * self.host_gib:.1f} ms"
        lines = [f"by the quick estimate one more GiB of device memory would save {saved}"]
        if self.reason:
            lines.append(self.reason)
        groups: list[tuple[str, str, str]] = []
        last: dict[str, int] = {}  # of blocks that are the same group of their layers' experts, or none
        for name, text in self.blocks:
            kind = name.partition(".experts.")[2]
            if kind in last and groups[last[kind]][2] == text:
                groups[last[kind]] = groups[last[kind]][0], name, text
            else:
                last[kind] = len(groups)
                groups.append((name, name, text))
        lines += [f"{first if first == last else f'{first} to {last}'}: {text}" for first, last, text in groups]
        return "\n".join(lines)

    @staticmethod
    def of(
        source: Source, instances: Sequence[Instance], index: int | None, plan: Plan, peak: int, host: int,
        allowed: int | None, host_allowed: int | None,
    ) -> Explanation:  # fmt: skip
        """The explanation of a plan that was made from one of the instances (`index`; None: none of them)."""
        left = 0 if allowed is None else allowed - peak
        if index is None:
            return Explanation(left, "it is the plan that takes the least memory", 0.0, 0.0, ())
        instance = instances[index]
        d = decisions_of(source, instance, plan)
        now = instance.evaluate(d).seconds

        def with_more(device: int, on_host: int) -> float:
            more = Search(instances, None if allowed is None else max(allowed, peak) + device,
                          None if host_allowed is None else max(host_allowed, host) + on_host)  # fmt: skip
            return max(0.0, now - min((f.outcome.seconds for f in more.best(3)), default=now))

        device_gib = with_more(GIB, 0) if allowed is not None else 0.0
        host_gib = with_more(0, GIB) if host_allowed is not None else 0.0
        reason = ""
        if allowed is not None and left > SMALL * allowed:
            reason = f"{format_bytes(left)} of the device budget are left over: " + _left(instance, d, now, allowed)
        again = {
            b.block: f"its values for others regenerated in {1000 * b.seconds:.2f} ms, {format_bytes(b.nbytes)} less"
            for b in boundaries(source.program, plan, source.costs)
            if plan.residency[b.value] == "recompute"
        }
        whole = [bool(slab.whole) for slab in source.program.slabs]
        blocks = tuple(
            (b.name, _block(instance, d, i, now, whole, again.get(i, ""))) for i, b in enumerate(source.program.blocks)
        )
        return Explanation(left, reason, device_gib, host_gib, blocks)


def decisions_of(source: Source, instance: Instance, plan: Plan) -> Decisions:
    """The decisions that a plan was made from."""
    values = source.values(plan.sizes)
    n = instance.blocks
    away = [False] * n
    for value in values:
        if value.kind == "bound" and plan.residency[value.name] == "offload":
            away[value.block] = True
    level = [0] * n
    for choice in range(len(instance.levels)):
        made = residency(values, (choice,) * n, tuple(away))
        differs = {v.block for v in values if v.kind != "bound" and made[v.name] != plan.residency[v.name]}
        for b in range(n):
            if instance.allowed[b, choice] and b not in differs:
                level[b] = choice
    resident = tuple(s.name in plan.resident for s in source.program.slabs)
    return Decisions(tuple(level), tuple(away), resident, plan.prefetch, plan.hold, WHERE[WHERE.index(plan.where)])


def _left(instance: Instance, d: Decisions, now: float, allowed: int) -> str:
    """What a change that takes more memory would bring, at best."""
    search = Search([instance])
    gains = [(now - instance.evaluate(o).seconds, instance.device_bytes(o)) for o in search.changes(instance, d)]
    within = max((gain for gain, size in gains if size <= allowed), default=0.0)
    beyond = min((size for gain, size in gains if gain > GAIN * now and size > allowed), default=None)
    if within > GAIN * now:
        return (
            f"a change that fits would save {1000 * within:.1f} ms by the quick estimate, but on the step graph it "
            "does not, or the allocator would have to give memory back amid the step"
        )
    if beyond is None:
        return "nothing that takes more memory makes the step faster"
    return f"the next thing that makes the step faster needs {format_bytes(beyond - allowed)} more than that"


def _block(instance: Instance, d: Decisions, b: int, now: float, whole: Sequence[bool], again: str) -> str:
    """One block's decision with what the nearest other one would cost.

    Slabs of a `whole` are always streamed; `again` says what of the block is regenerated.
    """
    parts = []
    slab = int(instance.uses[b, 0])
    if slab >= 0 and d.resident[slab]:
        other = replace(d, resident=tuple(own and s != slab for s, own in enumerate(d.resident)))
        parts.append(f"state on device, {format_bytes(instance.home[slab])}; streamed {_delta(instance, other, now)}")
    elif slab >= 0 and whole[slab]:
        parts.append("streamed")
    elif slab >= 0:
        other = replace(d, resident=tuple(own or s == slab for s, own in enumerate(d.resident)))
        parts.append(f"streamed; on device for {format_bytes(instance.home[slab])} {_delta(instance, other, now)}")
    if instance.allowed[b].sum() > 1:
        text = instance.levels[d.level[b]]
        others = [
            (replace(d, level=(*d.level[:b], level, *d.level[b + 1 :])), level)
            for level in range(len(instance.levels)) if instance.allowed[b, level] and level != d.level[b]
        ]  # fmt: skip
        best, level = min(others, key=lambda each: instance.evaluate(each[0]).score)
        more = instance.device_bytes(best) - instance.device_bytes(d)
        size = f"for {format_bytes(more)} more" if more > 0 else f"for {format_bytes(-more)} less"
        size = size if more else "in as much memory"
        parts.append(f"{text}; '{instance.levels[level]}' {size} {_delta(instance, best, now)}")
    if again:
        parts.append(again)
    elif instance.bound[b] > 0:
        parts.append(f"its values for others {'on the host' if d.away[b] else 'on device'}")
    return "; ".join(parts) or "nothing to decide"


def _delta(instance: Instance, other: Decisions, now: float) -> str:
    seconds = instance.evaluate(other).seconds - now
    if abs(seconds) < 5e-6:
        return "would take as long"
    return f"would {'cost' if seconds > 0 else 'save'} {1000 * abs(seconds):.2f} ms"

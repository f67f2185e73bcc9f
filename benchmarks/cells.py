"""Projected against measured: device and host memory, and step time, of the planner's plans; a line of JSON a cell.

    python -m oomc calibrate
    python benchmarks/cells.py --layers 4 --cells 4x4096@13GiB,16x4096@24GiB --plans 12

On a host that others work on too, its rates move from minute to minute: `--recalibrate` measures them before each cell.
A cell is batch x sequence @ device budget, with / and the tokens of a chunk behind it where chunks are to have so many.
With `--plans`, steps of so many plans that a person would try instead are timed after each of the first `--tried`
cells: the chosen plan with other prefetching, more or fewer gradients held, other updaters, everything kept or
recomputed, fewer slabs on the device, other chunks. Those that do not fit the budget are left out. Of ten times of two
steps each the least is below what its plan takes, and what else the machine does moves them all: so the fastest two are
timed again in turns with the chosen plan, and `against_best` is the ratio of these times.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from common import ADAMW, HostMeter, batches, build_model, device_mapped, device_peaks, disturbances, synchronize

import oomc
from oomc import machine
from oomc.calibrate import calibrate_host
from oomc.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cells", default="4x4096@13GiB")
    parser.add_argument("--plans", type=int, default=0, help="other plans to run for a cell")
    parser.add_argument("--tried", type=int, default=2, help="for how many of the cells, the first ones")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--time-worksets", action="store_true", help="plan with graphs that are timed first")
    parser.add_argument(
        "--recalibrate", action="store_true", help="measure the link and the host's rates anew before each cell"
    )  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of small sizes")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    import transformers  # noqa: F401  imports count as before the start, not as the model's memory

    host = HostMeter()
    model = build_model(args.layers, 0, torch.bfloat16, tiny=args.tiny)
    with host:
        for index, cell in enumerate(args.cells.split(",")):
            args.plans *= index < args.tried
            sizes, budget = cell.split("@")
            budget, _, chunk = budget.partition("/")
            batch, seq = map(int, sizes.split("x"))
            print(json.dumps(run(model, batch, seq, budget, int(chunk or 0), host, device, args)), flush=True)


def run(
    model: Any, batch: int, seq: int, budget: str, chunk: int, host: HostMeter, device: torch.device,
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Everything about one cell; with `chunk`, in chunks of so many tokens."""
    if args.recalibrate:
        calibrate_host(device)
    rates = machine.current(device)
    stream = batches(1, batch, seq, model.config.vocab_size)
    example = next(stream)
    began = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step = oomc.compile(model, oomc.Budget(budget), optimizer=optimizer, example=example, device=device, tune=0,
                        time_worksets=args.time_worksets, chunk_tokens=chunk or None)  # fmt: skip
    compile_s = time.perf_counter() - began
    host.restart()
    before = disturbances()
    times, mapped = measured(step, stream, args.warmup, args.steps, device)
    disturbed = {name: seconds - before[name] for name, seconds in disturbances().items()}
    seconds = statistics.median(times)
    figures, metrics, chosen = step.report().data, step.metrics, step.plan
    projected = figures["timeline"]["step_s"]
    needed = sum(count for name, count in figures["host"].items() if name != "allowed")
    result = {
        "layers": args.layers, "parameters": sum(p.numel() for p in model.parameters()), "tokens": batch * seq,
        "batch": batch, "seq": seq, "budget": budget, "chunk_tokens": chunk,
        "plan": chosen.describe(), "compile_s": compile_s,
        "step_measured": seconds, "steps_s": times, "step_projected": projected, "step_ratio": projected / seconds,
        "device_measured": metrics["device_peak"], "device_projected": metrics["device_projected"],
        "device_ratio": metrics["device_projected"] / metrics["device_peak"], "device_mapped": mapped,
        "replans": metrics["replans"], **device_peaks(device),
        "host_measured": host.peak, "host_projected": needed, "host_ratio": needed / max(1, host.peak),
        "bound": figures["timeline"].get("bound"),
        "both_rate": rates.both_rate, "host_bandwidth": rates.host_bandwidth, **disturbed,
    }  # fmt: skip
    if args.plans:
        tried = others(step, chosen, stream, example, args.plans, device)
        result["others"] = [figures for _, figures in tried]
        fastest = sorted(tried, key=lambda each: each[1]["step_s"])[:2]
        plans = {"chosen": chosen} | {figures["what"]: plan for plan, figures in fastest}
        result["in_turns"] = in_turns(step, plans, stream, example, device)
        own, *rest = (statistics.median(times) for times in result["in_turns"].values())
        result["against_best"] = own / min(rest, default=own)
    step.close()
    del step
    gc.collect()
    return result


def measured(
    step: oomc.Step, stream: Iterator[Any], warmup: int, steps: int, device: torch.device
) -> tuple[list[float], int]:
    """The times of calls with their loss read, and the bytes that the allocator takes from the device in each."""
    times, mapped = [], 0
    for index in range(warmup + steps):
        if index == warmup:
            mapped = device_mapped(device)
        batch = next(stream)
        start = time.perf_counter()
        float(step(**batch))
        times.append(time.perf_counter() - start)
    step.synchronize()
    synchronize(device)
    return times[warmup:], (device_mapped(device) - mapped) // steps


def others(
    step: oomc.Step, chosen: Plan, stream: Iterator[Any], example: dict[str, torch.Tensor], count: int,
    device: torch.device,
) -> list[tuple[Plan, dict[str, Any]]]:  # fmt: skip
    """Other plans that fit, and their times."""
    found: list[tuple[Plan, dict[str, Any]]] = []
    for name, plan in variations(chosen):
        if len(found) == count:
            break
        try:
            step.use_plan(plan, **example)
            times, mapped = measured(step, stream, 1, 2, device)
            projected = step.report().data["timeline"]["step_s"]
            found.append((plan, {"what": name, "step_s": statistics.median(times), "step_projected": projected,
                                 "device_mapped": mapped}))  # fmt: skip
        except oomc.BudgetError:
            continue
    return found


def in_turns(
    step: oomc.Step, plans: dict[str, Plan], stream: Iterator[Any], example: dict[str, torch.Tensor],
    device: torch.device, turns: int = 3, steps: int = 3,
) -> dict[str, list[float]]:  # fmt: skip
    """The times of all steps by each plan, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(turns):
        for name, plan in plans.items():
            step.use_plan(plan, **example)
            times[name] += measured(step, stream, 1, steps, device)[0]
    return times


def variations(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """What a person would try instead of a plan."""
    seen = [plan]
    kept: dict[str, Any] = dict.fromkeys(plan.residency, "keep")
    small = {name: "recompute" if where == "offload" else where for name, where in plan.residency.items()}
    batch, seq = plan.sizes
    halves = {n: (b // 2, s) if b > 1 else (b, s // 2 if s < seq else s) for n, (b, s) in plan.chunks.items()}
    doubles = {n: (min(batch, 2 * b), s) if s == seq else (b, min(seq, 2 * s)) for n, (b, s) in plan.chunks.items()}
    swapped = "host" if plan.where == "both" else "both"
    changes: list[tuple[str, dict[str, Any]]] = [
        ("prefetch 0", {"prefetch": 0}),
        ("prefetch 1", {"prefetch": 1}),
        ("prefetch 2", {"prefetch": 2}),
        ("no gradients held", {"hold": 0}),
        ("gradients of 1 block held", {"hold": 1}),
        ("gradients of 2 blocks held", {"hold": 2}),
        ("gradients of 4 blocks held", {"hold": 4}),
        (f"updated by {swapped}", {"where": swapped}),
        ("all kept", {"residency": kept}),
        ("nothing on the host", {"residency": small}),
        ("no slab on the device", {"resident": ()}),
        ("one slab less on the device", {"resident": plan.resident[:-1]}),
        ("chunks of half the size", {"chunks": halves}),
        ("chunks of twice the size", {"chunks": doubles}),
    ]
    pairs = itertools.combinations(changes, 2)
    both = [(f"{a}, {b}", x | y) for (a, x), (b, y) in pairs if not x.keys() & y.keys()]
    for name, change in [*changes, *both]:
        new = replace(plan, **change)
        if new not in seen:
            seen.append(new)
            yield name, new


if __name__ == "__main__":
    main()

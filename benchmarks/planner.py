"""What the planner's plans are worth, without a GPU: against all plans, over budgets, in seconds, against fixed ones.

    python benchmarks/planner.py exhaustive --instances 50
    python benchmarks/planner.py sweep
    python benchmarks/planner.py table
    python benchmarks/planner.py speed --layers 48

`exhaustive` compares the search with the best of all plans of random instances; the others plan for Qwen3-MoE with the
layer sizes of Qwen3-30B-A3B in bf16 on a machine of `oomc.machine.DEFAULTS`, on fake tensors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import SIZES

from oomc import pipeline, timeline
from oomc.capture import Batch, capture
from oomc.cost import Costs
from oomc.errors import BudgetError
from oomc.machine import default
from oomc.passes.choose_residency import LARGE_CHUNKS, SMALL_CHUNKS
from oomc.plan import Budget, Updates, format_bytes
from oomc.planner import Cut, Planned, Planner, Request
from oomc.program import Program
from oomc.replay import project_reserved
from oomc.runtime.gradients import BUFFER_ELEMENTS, ring_buffers
from oomc.runtime.updates import chunk_bytes_of
from oomc.search import Search
from oomc.simulate import Profiler
from oomc.target import planning_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.instances import ahead, all_plans, random_budgets, random_instance

GIB = 1 << 30
UPDATES = Updates(where="both", ring_bytes=ring_buffers(16) * chunk_bytes_of(BUFFER_ELEMENTS))
CELLS = ((1, 4096), (4, 4096), (16, 4096), (32, 4096))
BUDGETS = {4096: ("8GiB", "24GiB"), 16384: ("10.5GiB", "24GiB"), 65536: ("24GiB", "40GiB"), 131072: ("40GiB", "80GiB")}


@cache
def traced(layers: int) -> tuple[tuple[Program, Profiler], ...]:
    """The bare programs of the model, cut into worksets and in whole blocks."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.device("meta"):
        config = Qwen3MoeConfig(**SIZES, num_hidden_layers=layers)
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    ids = torch.empty(4, 4096, dtype=torch.int64, device="meta")
    program = capture(model, Batch.bind(model, (), {"input_ids": ids, "labels": ids}))
    bare = pipeline.run_passes(program, pipeline.MODEL_PASSES)
    whole = pipeline.in_whole_blocks(bare)
    return tuple((p, Profiler(p)) for p in (bare, whole) if p is not None)


def cuts(layers: int, sizes: tuple[int, int]) -> list[Cut]:
    """What the planner chooses from."""
    programs = traced(layers)
    return [lambda made=made: made for made in (programs if sizes[0] > 1 else programs[:1])]  # type: ignore[misc]


def request(layers: int, sizes: tuple[int, int], device: int | None, host: int | None = None) -> Request:
    """A request for all slabs."""
    bare = traced(layers)[0][0]
    names = frozenset(slab.name for slab in bare.slabs)
    return Request(sizes, device, host, Budget(device, host), UPDATES, names, reserves=True)


def plan(planner: Planner, layers: int, sizes: tuple[int, int], device: int | None, host: int | None = None) -> Planned:
    """The planner's plan."""
    return planner.plan(cuts(layers, sizes), request(layers, sizes, device, host))


def exhaustive(args: argparse.Namespace) -> None:
    """Random instances: the search against all plans."""
    gaps = []
    for seed in range(args.instances):
        instance = random_instance(seed, blocks=args.blocks)
        device, host = random_budgets(instance, seed)
        search = Search([instance], device, host, prefetches=ahead(instance), holds=ahead(instance))
        began = time.perf_counter()
        found = search.best()
        took = time.perf_counter() - began
        count, best = 0, float("inf")
        for d in all_plans(instance, ahead(instance), ahead(instance)):
            count += 1
            if search.fits(instance, d):
                best = min(best, instance.evaluate(d).seconds)
        instance.known.clear()
        if not found:
            assert best == float("inf"), "a plan fits, and none was found"
            continue
        assert found[0].outcome.device <= device and (host is None or found[0].outcome.host <= host)
        gaps.append(found[0].outcome.seconds / best - 1)
        print(f"{seed}: {count} plans, best {best:.4f} s, {100 * gaps[-1]:+.2f}%, {search.evaluations} evaluations in "
              f"{took:.2f} s", flush=True)  # fmt: skip
    print(f"{len(gaps)} instances: {100 * statistics.mean(gaps):.2f}% on average, {100 * max(gaps):.2f}% at worst")


def sweep(args: argparse.Namespace) -> None:
    """40 budgets of the device, then of the host."""
    sizes = (args.batch, args.seq)
    for tier in ("device", "host"):
        planner = Planner(default(args.machine))
        if tier == "device":
            try:
                plan(planner, args.layers, sizes, 1 << 20)
                raise AssertionError("no step takes 1 MiB")
            except BudgetError as error:
                least = error.smallest_device or 0
            most = plan(planner, args.layers, sizes, None).projection.held
        else:
            most = sum(UPDATES.host_bytes(s) for s in traced(args.layers)[0][0].slabs) + UPDATES.ring_bytes + 4 * GIB
            least = most // 2
        planner, last = planner.fresh(), float("inf")
        for step in range(40):
            budget = least + (most - least) * step // 39
            limits = (budget, None) if tier == "device" else (24 * GIB, budget)
            planned = plan(planner, args.layers, sizes, *limits)
            peak = format_bytes(planned.projection.held)
            print(f"{tier} {format_bytes(budget)}: {planned.seconds:.4f} s, peak {peak}", flush=True)
            assert planned.seconds <= last, "more memory made it slower"
            last = planned.seconds


def fixed(layers: int, sizes: tuple[int, int], device: int) -> tuple[float, int]:
    """Seconds and peak of the fixed policy's plan: the first that fits, of large chunks before small ones.

    It knows of no allocator, and left 12% of the budget to it; less is left to the plan where that is not enough.
    """
    names = [slab.name for slab in traced(layers)[0][0].slabs]
    for share in (1 / 1.12 - step / 50 for step in range(25)):
        for candidates in (LARGE_CHUNKS, SMALL_CHUNKS):
            for program, profiler in traced(layers) if sizes[0] > 1 else traced(layers)[:1]:
                try:
                    made, _ = pipeline.plan_step(
                        program, profiler, sizes, int(share * device), Budget(device), updates=UPDATES, resident=names,
                        candidates=candidates,
                    )  # fmt: skip
                except BudgetError:
                    continue
                held = project_reserved(made, profiler).held
                if held <= device:
                    costs = Costs(program, default("h200")).of_step(made)
                    line = timeline.simulate(made, costs, UPDATES, record=False)
                    return line.step_s, held
    return float("inf"), 0


def table(args: argparse.Namespace) -> None:
    """Cells of tokens and device budgets: the planner against the fixed policy."""
    print("tokens | budget | fixed s | planned s | peak | left | one more GiB | planner s")
    for sizes in CELLS:
        tokens = sizes[0] * sizes[1]
        for text in BUDGETS[tokens]:
            device = Budget(text).device
            assert device is not None
            before, _ = fixed(args.layers, sizes, device)
            planner = Planner(default("h200"))
            began = time.perf_counter()
            planned = plan(planner, args.layers, sizes, device)
            took = time.perf_counter() - began
            why: Any = planned.explain()
            left = 1 - planned.projection.held / device
            print(f"{tokens} | {text} | {before:.4f} | {planned.seconds:.4f} | "
                  f"{format_bytes(planned.projection.held)} | {100 * left:.1f}% | {1000 * why.device_gib:.1f} ms | "
                  f"{took:.1f}", flush=True)  # fmt: skip
            assert planned.program.plan is not None
            print("   ", planned.program.plan.describe(), "|", why.reason, flush=True)
            if args.explain:
                print(why)


def speed(args: argparse.Namespace) -> None:
    """Seconds of planning for many layers, the trace left out."""
    sizes = (args.batch, args.seq)
    traced(args.layers)
    torch.set_num_threads(2)
    for text in ("16GiB", "24GiB", "80GiB"):
        planner = Planner(default(args.machine))
        for again in ("", ", planned again for another budget"):
            began = time.perf_counter()
            budget = Budget(text).device
            assert budget is not None
            planned = plan(planner, args.layers, sizes, budget if not again else budget * 9 // 10)
            print(f"{args.layers} layers, {text}: {time.perf_counter() - began:.1f} s{again}; step "
                  f"{planned.seconds:.3f} s, peak {format_bytes(planned.projection.held)}, allocated "
                  f"{format_bytes(planned.projection.peak)}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exhaustive", "sweep", "table", "speed"])
    parser.add_argument("--instances", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--explain", action="store_true", help="print why, block by block")
    args = parser.parse_args()
    with planning_for(default(args.machine).capability):
        {"exhaustive": exhaustive, "sweep": sweep, "table": table, "speed": speed}[args.what](args)


if __name__ == "__main__":
    main()

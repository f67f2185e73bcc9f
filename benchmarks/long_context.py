"""One whole training step on a long context (or many sequences), with a causal prefix check; prints a line of JSON.

    python benchmarks/long_context.py --layers 2 --seq 524288 --device-budget 24GiB

Labels stand on a prefix only: the first `--prefix` positions of one sequence, or as many tokens' worth of whole rows of
a batch. Causality makes loss and gradients those of the prefix alone. Both are run, as two micro-batches of one step,
then its update, then `--steps` plain steps on the long batch. `gradient_error` is the relative distance
of the two gradients as a whole, `worst_gradient_error` that of the worst parameter's; in bf16 it is rounding (each
chunk's weight gradients are rounded once, and the two runs' chunks differ), in fp32 next to nothing.

With `--attention-on-host` attention's results wait on the host, and with `--regenerate N` values between layers are
made again in the backward, at most N in a row, as many as the device budget allows: the long batch runs by its plan
with these decisions, whatever the planner says of them. `regenerated` is how many values are, `attention_on_host` how
many of attention's results wait on the host.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import torch
from common import ADAMW, HostMeter, batches, build_model, device_peaks, synchronize

import oomc
from oomc import machine, meta
from oomc.cost import Costs
from oomc.offloadable import is_fence_result, kept_values, value_bytes
from oomc.passes.choose_residency import OFFLOAD_FROM
from oomc.plan import Plan
from oomc.regenerate import boundaries, groups, with_regenerated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hybrid", action="store_true", help="Qwen3-Next's layers instead of Qwen3-MoE's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=524288)
    parser.add_argument("--prefix", type=int, default=65536, help="tokens that have labels")
    parser.add_argument("--steps", type=int, default=1, help="plain steps at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device-budget", default=None)
    parser.add_argument("--host-budget", default=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a model of small sizes")
    parser.add_argument("--regenerate", type=int, metavar="N", help="make values between layers again, N in a row")
    parser.add_argument("--attention-on-host", action="store_true", help="have attention's results wait on the host")
    parser.add_argument("--report", metavar="PATH", help="save the report here")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    import transformers  # noqa: F401  imports count as before the start, not as the model's memory

    meter = HostMeter()
    dtype = getattr(torch, args.dtype)
    model = build_model(args.layers, args.seed, dtype, tiny=args.tiny, hybrid=args.hybrid)
    parameters = sum(p.numel() for p in model.parameters())
    batch = next(batches(args.seed + 1, args.batch, args.seq, model.config.vocab_size))
    prefix, long = split(batch, args.prefix)
    began = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    budget = oomc.Budget(args.device_budget, args.host_budget)
    step = oomc.compile(model, budget, optimizer=optimizer, example=batch, device=device, tune=0)
    if args.attention_on_host or args.regenerate:
        decide(step, batch, args.attention_on_host, args.regenerate or 0)
    compiled = time.perf_counter() - began
    found: dict[str, Any] = {}
    with meter:
        found |= micro_batch(step, "prefix", prefix, device)
        alone = step.gradients()
        found |= micro_batch(step, "long", long, device)
        found |= compare(alone, step)
        del alone
        start = time.perf_counter()
        step.update()
        step.synchronize()
        found["update_s"] = time.perf_counter() - start
        plain, losses = [], []
        for _ in range(args.steps):
            start = time.perf_counter()
            losses.append(float(step(**batch)))
            plain.append(time.perf_counter() - start)
        step.synchronize()
        synchronize(device)
    if args.report:
        step.report().save(args.report)
    print(
        json.dumps(
            {
                "model": type(model).__name__,
                "torch": torch.__version__,
                "layers": args.layers,
                "parameters": parameters,
                "batch": args.batch,
                "seq": args.seq,
                **found,
                "steps_s": plain,
                "losses": losses,
                "device_budget": args.device_budget,
                "device_measured": step.metrics["device_peak"],
                "device_projected": step.projected,
                **device_peaks(device),
                "host_bytes": meter.peak,
                "plan": step.plan.describe(),
                "regenerated": step.plan.regenerated,
                "attention_on_host": attention_on_host(step),
                "compile_s": compiled,
            }
        )
    )


def decide(step: oomc.Step, batch: dict[str, torch.Tensor], offload: bool, most: int) -> None:
    """Run batches like this one by their plan with attention's results on the host, and with values between layers
    regenerated, at most so many in a row: all that the device budget allows, since those of a row are there at once."""
    assert step._current is not None
    bare, plan = step._current.bare, step.plan
    if offload:
        plan = replace(plan, residency={**plan.residency, **dict.fromkeys(attention_results(step), "offload")})
        use(step, batch, plan)
    known = boundaries(bare, plan, Costs(bare, machine.current(step._options.device)))
    layers = [b for b in known if bare.blocks[b.block].name.startswith("model.layers.")]
    for group in groups(layers, most) if most else ():
        more = with_regenerated(plan, [b.value for b in group])
        try:
            use(step, batch, more)
        except oomc.BudgetError:
            continue
        plan = more
    use(step, batch, plan)


def use(step: oomc.Step, batch: dict[str, torch.Tensor], plan: Plan) -> None:
    """Run whole steps and micro-batches like this one by a plan."""
    for accumulate in (False, True):
        step.use_plan(replace(plan, accumulate=accumulate), **batch)


def attention_results(step: oomc.Step) -> list[str]:
    """Names of what attention, or its like, has given and the backward uses, if it is worth a copy."""
    assert step._current is not None
    bare, sizes = step._current.bare, step.plan.sizes
    found = [node for node, inside in kept_values(bare) if inside and is_fence_result(bare, node)]
    return [meta.note(node).source for node in found if value_bytes(bare, node, sizes) >= OFFLOAD_FROM]


def attention_on_host(step: oomc.Step) -> int:
    """How many results of attention wait on the host, its log-sum-exp not counted."""
    return sum(step.plan.residency[name] == "offload" for name in attention_results(step) if ":saved." not in name)


def split(batch: dict[str, torch.Tensor], tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A batch's prefix, and the batch with labels on the prefix only."""
    rows, columns = batch["input_ids"].shape
    if rows == 1:
        part = (slice(None), slice(0, min(tokens, columns)))
    else:
        part = (slice(0, max(1, tokens // columns)), slice(None))
    labels = torch.full_like(batch["labels"], -100)
    labels[part] = batch["labels"][part]
    if rows == 1 and tokens < columns:
        labels[:, tokens] = -100  # the prefix alone has nothing to predict from its last position
    prefix = {name: value[part].clone() for name, value in batch.items()}
    return prefix, {"input_ids": batch["input_ids"], "labels": labels}


def micro_batch(step: oomc.Step, name: str, batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Forward and backward: loss, seconds (planning included), peak and number of labels."""
    start = time.perf_counter()
    loss = float(step.forward_backward(**batch))
    synchronize(device)
    seconds = time.perf_counter() - start
    metrics = step.metrics
    return {
        f"{name}_loss": loss, f"{name}_s": seconds, f"{name}_device_measured": metrics["device_peak"],
        f"{name}_device_projected": step.projected, f"{name}_valid": metrics["valid_tokens"],
        f"{name}_plan": step.plan.describe(),
    }  # fmt: skip


def compare(alone: dict[str, torch.Tensor], step: oomc.Step) -> dict[str, Any]:
    """The largest relative distance of the prefix's gradients from the long batch's; the step has their sum."""
    worst, name = 0.0, ""
    norms = distances = 0.0
    for each, own in alone.items():
        other = step.gradients(each)[each].sub_(own)  # one at a time: all take 4 bytes a parameter
        norm, distance = float(own.norm()), float(torch.dist(own, other))
        norms, distances = norms + norm**2, distances + distance**2
        if norm and distance / norm > worst:
            worst, name = distance / norm, each
    return {"gradient_error": (distances / norms) ** 0.5, "worst_gradient_error": worst, "worst_gradient": name}


if __name__ == "__main__":
    main()

"""oomc on the model, weights and tokens of benchmarks/fsdp2.py; prints one line of JSON.

    python benchmarks/oomc_step.py --layers 4 --batch 4 --seq 4096 --device-budget 10.5GiB

`step_s` is the median time of a call with its loss read (the updates of one step run under the next); `drained_s` is
the time of all timed steps, with every update done at both ends, divided by their number. `--save-grads` writes the
first micro-batch's gradients, which takes fp32 sums on the host: take host figures from a run without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from common import ADAMW, HostMeter, batches, build_model, device_peaks, save_gradients, synchronize

import oomc
from oomc.runtime.adamw import AdamW
from oomc.tune import TIMED, WARM

COMPARED = 5


def nothing(*args: Any, **kwargs: Any) -> int:
    """An update that is left out."""
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; the tokens' is one more")
    parser.add_argument("--device-budget", default=None)
    parser.add_argument("--host-budget", default=None)
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--chunk-tokens", type=int, default=None, help="in each chunk; by default as many as fit")
    parser.add_argument("--tune", type=int, default=0, help="try so many plans first, in steps that are not timed")
    parser.add_argument("--time-worksets", action="store_true", help="plan with graphs that are timed first")
    parser.add_argument("--clip", type=float, default=None, metavar="NORM", help="clip the gradient's global norm")
    parser.add_argument("--updates", choices=["host", "device"], default=None, help="who updates")
    parser.add_argument(
        "--without-update", action="store_true",
        help="then time the plan with the host as who updates, and updates that do nothing: gradients leave as ever",
    )  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of small sizes")
    parser.add_argument("--save-grads", metavar="PATH", help="write the first gradients as safetensors, and stop")
    parser.add_argument("--grads", metavar="REGEX", default="", help="of these parameters only")
    parser.add_argument("--grads-dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--report", metavar="PATH", help="save the report here, with the lanes of one more step in it")
    parser.add_argument("--profile", metavar="PATH", help="save a Chrome trace of one more step here")
    args = parser.parse_args()
    if args.without_update and args.updates == "device":
        parser.error("--without-update times a plan where the host updates, which --updates device rules out")
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    import transformers  # noqa: F401  imports count as before the start, not as the model's memory

    began = time.perf_counter()
    meter = HostMeter()
    model = build_model(args.layers, args.seed, torch.bfloat16, tiny=args.tiny)
    parameters = sum(p.numel() for p in model.parameters())
    stream = batches(args.seed + 1, args.batch, args.seq, model.config.vocab_size)
    built = time.perf_counter()
    batch = next(stream)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step = oomc.compile(
        model, oomc.Budget(args.device_budget, args.host_budget), optimizer=optimizer, example=batch, device=device,
        backend=args.backend, max_grad_norm=args.clip, chunk_tokens=args.chunk_tokens,
        updates=args.updates, tune=args.tune, time_worksets=args.time_worksets,
    )  # fmt: skip
    compiled = time.perf_counter()
    if args.save_grads:
        loss = step.forward_backward(**batch)
        valid = step.metrics["valid_tokens"] or 1.0
        mean = {name: gradient / valid for name, gradient in step.gradients().items()}
        saved = save_gradients(mean, args.save_grads, args.grads, getattr(torch, args.grads_dtype))
        print(json.dumps({"engine": "oomc", "layers": args.layers, "losses": [float(loss)], "gradients_saved": saved}))
        return

    args.warmup += args.tune * (WARM + TIMED)
    losses, times = [], []
    with meter:
        for index in range(args.warmup + args.steps):
            if index == args.warmup:
                step.synchronize()
                synchronize(device)
                window = time.perf_counter()
            start = time.perf_counter()
            losses.append(float(step(**batch)))
            times.append(time.perf_counter() - start)
            batch = next(stream)
        step.synchronize()
        synchronize(device)
        drained = (time.perf_counter() - window) / args.steps
    metrics, figures = step.metrics, step.report().data
    if args.report:
        float(step(**batch))  # so that updates of a step before run under the one that is recorded
        step.record()
        float(step(**batch))
        step.report().save(args.report)
    if args.profile:
        with torch.profiler.profile() as profile:
            float(step(**batch))
            step.synchronize()
        profile.export_chrome_trace(args.profile)
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))
    plan, peaks, without = step.plan, device_peaks(device), None
    if args.without_update:
        AdamW.update = AdamW.update_cuda = nothing  # type: ignore[assignment, method-assign]
        step.use_plan(replace(plan, where="host"), **batch)
        without = []
        for _ in range(args.warmup + args.steps):
            start = time.perf_counter()
            float(step(**batch))
            without.append(time.perf_counter() - start)
            batch = next(stream)
        step.synchronize()
    steady = times[args.warmup :]
    step_s = statistics.median(steady)
    print(
        json.dumps(
            {
                "engine": "oomc",
                "torch": torch.__version__,
                "layers": args.layers,
                "parameters": parameters,
                "batch": args.batch,
                "seq": args.seq,
                "backend": args.backend,
                "updates": args.updates,
                "clip": args.clip,
                "grad_norm": metrics["grad_norm"],
                "state_bytes": metrics["state_bytes"],
                "stall_s": metrics["stall_s"],
                "step_s": step_s,
                "without_update_s": without and statistics.median(without[args.warmup :]),
                "step_projected": figures["timeline"]["step_s"],
                "drained_s": drained,
                "steps_s": steady,
                "tokens_per_s": args.batch * args.seq / step_s,
                **peaks,
                "device_measured": metrics["device_peak"],
                "device_projected": metrics["device_projected"],
                "device_budget": args.device_budget,
                "host_bytes": meter.peak,
                "host_projected": sum(count for name, count in figures["host"].items() if name != "allowed"),
                "host_bytes_per_parameter": meter.peak / parameters,
                "losses": losses[:COMPARED],
                "plan": plan.describe(),
                "build_s": built - began,
                "compile_s": compiled - built,
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()

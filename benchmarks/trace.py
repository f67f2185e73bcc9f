"""Capture a published model and take it through all passes, without a GPU and without weights.

    python benchmarks/trace.py --layers 48 --batch 4 --seq 4096

Prints the seconds of each stage, what came out, and the process's peak memory. The model is Qwen3-30B-A3B at its
published sizes, bf16, on the meta device.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from common import SIZES
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from oomc import pipeline
from oomc.capture import Batch, capture
from oomc.plan import Budget, format_bytes
from oomc.program import Program
from oomc.simulate import Profiler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--verify", action="store_true", help="check every graph after every pass")
    args = parser.parse_args()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_hidden_layers=args.layers)).to(torch.bfloat16)
    ids = torch.empty(args.batch, args.seq, dtype=torch.int64, device="meta")
    batch = Batch.bind(model, (), {"input_ids": ids, "labels": ids})

    began = last = time.perf_counter()

    def report(name: str, _: Program) -> None:
        nonlocal last
        now = time.perf_counter()
        print(f"{name:20} {now - last:6.1f} s")
        last = now

    program = capture(model, batch)
    report("capture", program)
    nodes = len(program.forward.graph.nodes)
    pipeline.run_passes(program, pipeline.MODEL_PASSES, report, args.verify)
    _, projection = pipeline.plan_step(
        program, Profiler(program), (args.batch, args.seq), None, Budget(), verify=args.verify
    )
    report("plan and schedule", program)
    layers = {tuple(w.form for w in block.worksets) for block in program.blocks[1:-1]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{time.perf_counter() - began:.1f} s in all, {format_bytes(peak)} at the peak; {nodes} nodes captured, "
        f"{len(program.blocks)} blocks, {len(layers)} compiled form(s) for the {args.layers} layers, "
        f"{len(program.forms)} forms in all; projected device peak {format_bytes(projection.peak)}"
    )


if __name__ == "__main__":
    main()

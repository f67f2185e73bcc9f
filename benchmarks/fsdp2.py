"""The baseline: PyTorch's FSDP2 with CPU offload on the model of benchmarks/common.py, one GPU.

Computes in bf16 (`--dtype float32`: in fp32), reduces in fp32, keeps fp32 weights and AdamW's state on the host,
recomputes each layer in backward, and takes head and loss in chunks of tokens. Prints one line of JSON.

    python benchmarks/fsdp2.py --layers 4 --batch 4 --seq 4096
    python benchmarks/fsdp2.py --layers 2 --steps 1 --save-grads /tmp/fsdp2.safetensors --grads 'layers|norm'
    python benchmarks/fsdp2.py --device cpu --tiny --batch 2 --seq 64        # tries the script without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ADAMW, HostMeter, batches, build_model, device_peaks, save_gradients, synchronize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

COMPARED = 5  # losses are reported of this many first steps


class LossInChunks(nn.Module):
    """The model with its mean next-token loss, whose logits exist for `chunk` tokens at a time only."""

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        self.model, self.chunk = model, chunk

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state.flatten(0, 1)
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        total = torch.zeros((), device=hidden.device)
        for rows, wanted in zip(hidden.split(self.chunk), targets.split(self.chunk)):
            total = total + checkpoint(self.chunk_loss, rows, wanted, use_reentrant=False)
        return total / (targets != -100).sum()

    def chunk_loss(self, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(rows).float(), wanted, ignore_index=-100, reduction="sum")


def shard(model: Any, device: torch.device, dtype: torch.dtype, chunk: int) -> LossInChunks:
    """Recompute and FSDP2 for each layer, FSDP2 for the rest."""
    policies: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, **policies)
    whole = LossInChunks(model, chunk)
    fully_shard(whole, **policies)
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--split", type=int, default=3, help="steps timed by part, after the timed ones")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens whose logits exist at a time")
    parser.add_argument("--clip", type=float, default=None, metavar="NORM", help="clip the gradient's global norm")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; the tokens' is one more")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--experts", choices=["grouped_mm", "batched_mm", "eager"], default="grouped_mm")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of small sizes")
    parser.add_argument("--save-grads", metavar="PATH", help="write the first step's gradients as safetensors")
    parser.add_argument("--grads", metavar="REGEX", default="", help="of these parameters only")
    parser.add_argument("--grads-dtype", choices=["bfloat16", "float32"], default="float32")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)

    began = time.perf_counter()
    rendezvous = f"file://{tempfile.mkdtemp()}/store"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
    if device.type == "cuda":
        torch.cuda.set_device(0)
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    import transformers  # noqa: F401  imports count as before the start, not as the model's memory

    meter = HostMeter()
    model = build_model(args.layers, args.seed, tiny=args.tiny, experts=args.experts)
    vocab = model.config.vocab_size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    whole = shard(model, device, dtype, args.chunk)
    optimizer = torch.optim.AdamW(whole.parameters(), **ADAMW, fused=True)
    stream = batches(args.seed + 1, args.batch, args.seq, vocab)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    setup_s = time.perf_counter() - began

    def next_batch() -> dict[str, Tensor]:
        return {name: ids.to(device) for name, ids in next(stream).items()}

    losses, saved = [], 0
    with meter:
        times = []
        for index in range(args.warmup + args.steps):
            batch = next_batch()
            synchronize(device)
            start = time.perf_counter()
            loss = whole(**batch)
            loss.backward()
            if index == 0 and args.save_grads:
                gradients = {
                    name.removeprefix("model."): parameter.grad.to_local()
                    for name, parameter in whole.named_parameters()
                    if parameter.grad is not None
                }
                saved = save_gradients(gradients, args.save_grads, args.grads, getattr(torch, args.grads_dtype))
                del gradients
            if args.clip is not None:
                torch.nn.utils.clip_grad_norm_(whole.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            times.append(time.perf_counter() - start)
            losses.append(loss.item())
        parts = []
        for _ in range(args.split):
            batch = next_batch()
            marks = [time.perf_counter()]
            loss = whole(**batch)
            synchronize(device)
            marks.append(time.perf_counter())
            loss.backward()
            synchronize(device)
            marks.append(time.perf_counter())
            if args.clip is not None:
                torch.nn.utils.clip_grad_norm_(whole.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            marks.append(time.perf_counter())
            parts.append([after - before for before, after in pairwise(marks)])

    split = [statistics.median(part) for part in zip(*parts)] if parts else [None] * 3
    steady = times[args.warmup :]
    step_s = statistics.median(steady) if steady else None
    result = {
        "engine": "fsdp2",
        "torch": torch.__version__,
        "layers": args.layers,
        "parameters": parameters,
        "batch": args.batch,
        "seq": args.seq,
        "dtype": args.dtype,
        "clip": args.clip,
        "step_s": step_s,
        "steps_s": steady,
        "tokens_per_s": args.batch * args.seq / step_s if step_s else None,
        "forward_s": split[0],
        "backward_s": split[1],
        "optimizer_s": split[2],
        **device_peaks(device),
        "host_bytes": meter.peak,
        "host_bytes_per_parameter": meter.peak / parameters,
        "losses": losses[:COMPARED],
        "gradients_saved": saved,
        "setup_s": setup_s,
        "cores": os.cpu_count(),
    }
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Train a small Qwen3-MoE on Python's own source text, in a fraction of the memory that plain PyTorch needs.

`make demo` runs this, on the GPU if there is one and else on the CPU, which then stands in for the GPU with a metered
budget. The model is Hugging Face's own with random weights, the tokens are bytes. The report goes to demo-out/.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

import oomc
from oomc.data import ByteTokenizer, TokenBatches, load_tokens

OUT = Path("demo-out")
MiB = 1 << 20


@dataclass(frozen=True)
class Setup:
    """What is trained on one kind of device."""

    dtype: torch.dtype
    hidden: int
    layers: int
    experts: int
    top_k: int
    expert_width: int
    batch: int
    seq: int
    steps: int
    lr: float
    budget: int


SETUPS = {
    # 27 M parameters
    "cpu": Setup(torch.float32, 256, 8, 16, 2, 256, batch=6, seq=256, steps=32, lr=1e-3, budget=96 * MiB),
    # 643 M parameters; the budget includes what CUDA itself takes, about half a GiB
    "cuda": Setup(torch.bfloat16, 1024, 12, 32, 4, 512, batch=16, seq=512, steps=60, lr=3e-4, budget=3072 * MiB),
}


def make_model(setup: Setup) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=ByteTokenizer().vocab_size,
        hidden_size=setup.hidden,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.hidden // 32,
        num_key_value_heads=setup.hidden // 64,
        head_dim=32,
        num_experts=setup.experts,
        num_experts_per_tok=setup.top_k,
        moe_intermediate_size=setup.expert_width,
    )
    return Qwen3MoeForCausalLM._from_config(config, dtype=setup.dtype)


def eager_bytes(model: Any, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """What plain PyTorch would need: weights, gradients and AdamW's state, and the activations of one real forward."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    del loss
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 16 * parameters, sum(storage.nbytes() for storage in saved.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--budget", help='device memory, as "192MiB"')
    args = parser.parse_args()
    setup = SETUPS[args.device]
    steps, budget = args.steps or setup.steps, args.budget or setup.budget

    began = time.perf_counter()
    stdlib = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokens = load_tokens(stdlib, ByteTokenizer(), limit=4_000_000)
    batches = TokenBatches(tokens, setup.batch, setup.seq)
    example = next(iter(batches))

    model = make_model(setup)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state, activations = eager_bytes(model, example)
    allowed = oomc.Budget(device=budget)
    print(f"model      Qwen3-MoE, {parameters / 1e6:.1f} M parameters, {setup.dtype}".replace("torch.", ""))
    print(f"data       {len(tokens):,} bytes of Python's standard library; {setup.batch} x {setup.seq} tokens a step")
    print(
        f"eager      {(state + activations) / MiB:,.0f} MiB: {state / MiB:,.0f} weights, gradients and AdamW's state,"
    )
    print(f"           {activations / MiB:,.0f} activations saved for backward (measured)")
    print(f"budget     {budget if args.budget else f'{setup.budget / MiB:,.0f} MiB'} of device memory on {args.device}")

    step = oomc.compile(
        model,
        budget=allowed,
        optimizer=torch.optim.AdamW(model.parameters(), lr=setup.lr),
        example=example,
        device=args.device,
    )
    losses = []
    with tqdm(islice(batches, steps), total=steps, unit="step") as progress:
        for batch in progress:
            losses.append(float(step(**batch)))
            progress.set_postfix(loss=f"{losses[-1]:.3f}")

    report = step.report()
    print(report)
    OUT.mkdir(exist_ok=True)
    for name in ("report.txt", "report.json"):
        report.save(OUT / name)
    disable_progress_bar()
    model.save_pretrained(OUT / "model")

    first, last = losses[0], sum(losses[-5:]) / len(losses[-5:])
    peak = step.metrics["device_peak"]
    print(f"loss       {first:.3f} -> {last:.3f} (mean of the last {len(losses[-5:])} steps)")
    print(f"device     {peak / MiB:,.0f} MiB at the peak; eager needs {(state + activations) / peak:.1f} times as much")
    print(f"files      {OUT}/report.txt, {OUT}/report.json, {OUT}/model/")
    print(f"time       {time.perf_counter() - began:.0f} s")
    if steps >= 10:
        assert last < first - 0.5, "the loss did not fall"
    if not args.budget:
        assert peak <= setup.budget, "the run took more device memory than it was allowed"


if __name__ == "__main__":
    main()

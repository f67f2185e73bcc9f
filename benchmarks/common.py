"""The model, the tokens and the meters that every engine under test is given alike.

The model is Qwen3-MoE with the layer sizes of Qwen3-30B-A3B. Its weights are drawn so that each is a bf16 number: an
fp32 copy, a bf16 copy and a bf16 copy with an fp32 master all start from exactly the same values.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

PIECE = 1 << 24  # numbers drawn by one generator
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

SIZES = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "max_position_embeddings": 1 << 20,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
    "use_cache": False,
}
TINY = SIZES | {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
HYBRID = SIZES | {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""The layers of Qwen3-Next-80B-A3B with 128 experts instead of 512, so that four of them fit the host."""
TINY_HYBRID = HYBRID | TINY | {
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip


def build_model(
    layers: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    tiny: bool = False,
    experts: str = "grouped_mm",
    attention: str = "sdpa",
    hybrid: bool = False,
) -> Any:
    """The model on the CPU; the same numbers for the same layers and seed, in any dtype.

    A hybrid one has Qwen3-Next's layers: three with linear attention, then one with full attention, and so on.
    """
    import transformers

    if hybrid:
        sizes, name = TINY_HYBRID if tiny else HYBRID, "Qwen3Next"
    else:
        sizes, name = TINY if tiny else SIZES, "Qwen3Moe"
    config = getattr(transformers, f"{name}Config")(**sizes, num_hidden_layers=layers)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(
            config, dtype=dtype, attn_implementation=attention, experts_implementation=experts
        )
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    fill(model, seed)
    return model.train()


def fill(model: torch.nn.Module, seed: int) -> None:
    """Norms are one, all else is normal(0, 0.02) rounded to bf16; drawn in pieces, each with a seed of its own."""
    tasks = []
    for index, parameter in enumerate(model.parameters()):
        flat = parameter.detach().view(-1)
        if parameter.dim() == 1:  # also the decay of linear attention, whose exponential it is
            flat.fill_(1.0)
        else:
            tasks += [(seed * 1_000_003 + index * 1009 + k, piece) for k, piece in enumerate(flat.split(PIECE))]

    def draw(task: tuple[int, Tensor]) -> None:
        number, piece = task
        values = torch.empty(piece.numel()).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(number))
        piece.copy_(values.bfloat16())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(draw, tasks))


def batches(seed: int, batch: int, seq: int, vocab: int) -> Iterator[dict[str, Tensor]]:
    """Endless batches of random tokens, some more frequent than others so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = (torch.rand(batch, seq, generator=generator, dtype=torch.float64) ** 3 * vocab).long()
        yield {"input_ids": ids, "labels": ids.clone()}


def save_gradients(named: dict[str, Tensor], path: str | Path, pattern: str, dtype: torch.dtype) -> int:
    """Write the gradients whose parameter names match `pattern` as safetensors; returns how many there are."""
    from safetensors.torch import save_file

    chosen = {name: grad.to(dtype).contiguous() for name, grad in named.items() if re.search(pattern, name)}
    save_file(chosen, path)
    return len(chosen)


class HostMeter:
    """The process's resident set, sampled in the background: `peak` and `now`, less what it was at the start."""

    def __init__(self, interval: float = 0.02) -> None:
        self.process = psutil.Process()
        self.base = self.process.memory_info().rss
        self.peak = 0
        self.interval = interval
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def now(self) -> int:
        """Bytes at this moment."""
        return self.process.memory_info().rss - self.base

    def restart(self) -> None:
        """Forget the peak so far."""
        with self._lock:
            self.peak = 0

    def __enter__(self) -> HostMeter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            with self._lock:
                self.peak = max(self.peak, self.now)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, where there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def disturbances() -> dict[str, float]:
    """Seconds so far, of all cores together, that others had cores of this machine (steal, where it is a virtual one),
    and that this process' group was kept from its own for using more than its quota."""
    stat = Path("/sys/fs/cgroup/cpu.stat")
    figures = dict(map(str.split, stat.read_text().splitlines())) if stat.exists() else {}
    throttled = float(figures.get("throttled_usec", 0)) / 1e6
    return {"steal_s": getattr(psutil.cpu_times(), "steal", 0.0), "throttled_s": throttled}


def device_mapped(device: torch.device) -> int:
    """Bytes that the allocator has taken from the device so far; what grows in a steady step has been given back."""
    return int(torch.cuda.memory_stats()["reserved_bytes.all.allocated"]) if device.type == "cuda" else 0


def device_peaks(device: torch.device) -> dict[str, int | None]:
    """The allocator's peaks, and what the device has in use outside of it (the CUDA context, libraries)."""
    if device.type != "cuda":
        return {"device_allocated": None, "device_reserved": None, "device_outside": None}
    free, total = torch.cuda.mem_get_info()
    return {
        "device_allocated": torch.cuda.max_memory_allocated(),
        "device_reserved": torch.cuda.max_memory_reserved(),
        "device_outside": total - free - torch.cuda.memory_reserved(),
    }

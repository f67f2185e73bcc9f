"""A small model in slabs, without a step: what checkpoints need, filled with any numbers, compared bit for bit."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from oomc.checkpoint import Checkpoints
from oomc.runtime.adamw import AdamW
from oomc.runtime.layout import ParamSpec, SlabLayout, StateArray
from oomc.runtime.optim import UpdateRule
from oomc.runtime.slabs import DeviceSlab, HostSlab, Slab


class Small(nn.Module):
    """bf16 layers with fp32 norms, a tied head, a frozen table, an unused parameter, and buffers of both kinds."""

    def __init__(self, layers: int = 3, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, size, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(size, 5, dtype=torch.bfloat16), "norm": nn.LayerNorm(size)})
            for _ in range(layers)
        )
        self.table = nn.Parameter(torch.zeros(3, 3, dtype=torch.float16), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(size, 20, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def rule_with(*arrays: StateArray) -> UpdateRule:
    """Stands for a rule with these arrays, which is all that checkpoints know of a rule."""
    return cast(UpdateRule, SimpleNamespace(arrays=arrays))


BLOCKWISE = (StateArray("m", torch.uint8), StateArray("m_scale", torch.float32, 64))
"""State of one byte, and a scale for each block of 64."""


class Run:
    """A model whose parameters are in slabs, with an optimizer and its checkpoints.

    Args:
        model: its parameters are moved.
        blocks: prefixes of names; a slab each, and one for what has none of them but `unused`.
        rule: of the state.
        state: whether the slabs have the optimizer's arrays, as after the first update.
        groups: given to AdamW in place of one group.
        on_device: slabs for device memory, here on its stand-in.
    """

    def __init__(
        self, model: nn.Module | None = None, blocks: Sequence[str] = ("embed", "layers.0", "layers.1", "layers.2"),
        rule: UpdateRule | None = None, state: bool = True, groups: list[dict[str, Any]] | None = None,
        on_device: bool = False,
    ) -> None:  # fmt: skip
        self.model = Small() if model is None else model
        self.rule = AdamW() if rule is None else rule
        params = dict(self.model.named_parameters())
        trained = [p for p in params.values() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(groups or trained, lr=1e-3)
        members: dict[str, list[str]] = {block: [] for block in (*blocks, "")}
        for name in params:
            if not name.startswith("unused"):
                members[next(b for b in members if name.startswith(b))].append(name)
        self.slabs: list[Slab] = []
        for block, names in members.items():
            specs = [ParamSpec(n, tuple(params[n].shape), params[n].dtype, params[n].requires_grad) for n in names]
            layout = SlabLayout.build(block or "rest", specs)
            slab = DeviceSlab(layout, torch.device("cpu")) if on_device else HostSlab(layout)
            for name in names:
                slab.load(name, params[name])
                params[name].data = slab.param(name)
            if state:
                slab.add_state(self.rule.arrays)
            self.slabs.append(slab)
        self.checkpoints = Checkpoints(self.model, self.optimizer, self.rule, lambda: self.slabs)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint keeps, by name, as views."""
        found: dict[str, Tensor] = {n: p.detach() for n, p in self.model.named_parameters()}
        found |= {n: b for n, b in self.model.named_buffers() if n != "scratch"}
        for slab in self.slabs:
            for name, (start, stop) in slab.layout.gradient_ranges.items():
                if start < slab.layout.bf16.elements:
                    found[f"{name}/lo"] = slab.lo[start:stop]
                for array in self.rule.arrays:
                    if array.name in slab.state:
                        found[f"{name}/{array.name}"] = slab.state[array.name][array.span(start, stop)]
        return found

    def fill(self, seed: int) -> None:
        """Other numbers everywhere, the same in every partition: tensors, steps, learning rate, random generators."""
        numbers = np.random.default_rng(seed)
        for _, tensor in sorted(self.tensors().items()):
            values = torch.from_numpy(numbers.integers(-30000, 30000, tuple(tensor.shape)))
            tensor.copy_(values if not tensor.is_floating_point() else values.double() / 7919)
        for slab in self.slabs:
            slab.steps.update({name: seed + len(name) for name in slab.steps})
        for group in self.optimizer.param_groups:
            group["lr"] = float(numbers.random())
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def snapshot(self) -> dict[str, Any]:
        """Copies of all that `fill` sets; compare with `same`."""
        result: dict[str, Any] = {name: tensor.clone() for name, tensor in self.tensors().items()}
        result["steps"] = {name: count for slab in self.slabs for name, count in slab.steps.items()}
        result["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return result


def load(run: Run, directory: Path) -> Any:
    with run.checkpoints.open(directory) as opened:
        return opened.restore()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two snapshots are equal, bit for bit."""
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def draws() -> tuple[float, float, float]:
    """A number from each random generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())


def _anonymous_bytes() -> int:
    [line] = [text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("RssAnon")]
    return int(line.split()[1]) << 10


class Peak:
    """The most anonymous memory of the process while it is open, beyond that at its start."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what tests before this one have left would be used again unseen
        self.start = self.most = _anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.0005):
            self.most = max(self.most, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.extra = max(self.most, _anonymous_bytes()) - self.start

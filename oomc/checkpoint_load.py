"""How a checkpoint is loaded: everything is checked before anything is changed, then restored slab by slab."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oomc.checkpoint_files import locate
from oomc.errors import CheckpointError
from oomc.manifest import (
    EDITABLE,
    OWN,
    FileRecord,
    ParameterRecord,
    TensorRecord,
    crc32_of_bytes,
    dtype_name,
    names_by_group,
    read_manifest,
    record_tensor,
    set_options,
)
from oomc.random_state import set_random_state
from oomc.runtime.layout import StateArray
from oomc.runtime.optim import UpdateRule
from oomc.runtime.slabs import Slab
from oomc.slab_state import arrays_of, weights_of

_READERS = 8


@dataclass(frozen=True)
class Loaded:
    """What `load` gives back: the user's `extra`, and the step's own counters."""

    extra: Any
    progress: Mapping[str, int]


class Opened:
    """A checkpoint whose files are open and have been checked: whole, and of this step's model and optimizer.

    Tensors are views of the files' pages, which stay what they are if the checkpoint is replaced meanwhile.

    Args:
        directory: the checkpoint's name.
        model, optimizer, rule, slabs: what it is for.
        buffers: names of the model's persistent buffers.

    Raises:
        CheckpointError: says what is wrong, and in which file or parameter.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule,
        slabs: Sequence[Slab],
        buffers: Sequence[str],
    ) -> None:
        self.path = locate(directory)
        self._manifest = read_manifest(self.path)
        self._model, self._optimizer, self._rule, self._slabs, self._buffers = model, optimizer, rule, slabs, buffers
        self._check_parameters()
        self._check_optimizer()
        contents = _check_files(self.path, self._manifest.files)
        self._stack = ExitStack()
        try:
            self._weights, self._state = _open_tensors(self.path, self._manifest.files, self._stack)
            self._random = torch.load(io.BytesIO(contents[f"{OWN}/random.pt"]), weights_only=True)
            self._extra = torch.load(io.BytesIO(contents[f"{OWN}/extra.pt"]), weights_only=True)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._weights, self._state = {}, {}
        self._stack.close()

    def restore(self) -> Loaded:
        """Set the step's whole state: weights, masters, optimizer state, counts, hyperparameters, random generators.

        Updates under way are waited for. Should it fail (a disk that fails, Ctrl-C), the state is part old, part new.
        """
        with torch.no_grad():
            for slab in self._slabs:
                self._restore_slab(slab)
            here = {place.spec.name for slab in self._slabs for place in slab.layout.places}
            for name, parameter in self._model.named_parameters():
                if name not in here:
                    parameter.copy_(self._weights[name])
            for name in self._buffers:
                self._model.get_buffer(name).copy_(self._weights[name])
        for group, record in zip(self._optimizer.param_groups, self._manifest.groups, strict=True):
            set_options(group, record.options)
        set_random_state(self._random)
        return Loaded(self._extra, self._manifest.progress)

    def _restore_slab(self, slab: Slab) -> None:
        slab.wait_updated()
        for name, weights in weights_of(slab):
            weights.copy_(self._weights[name])
        arrays = self._rule.arrays
        if any(f"{name}/{array.name}" in self._state for name in slab.steps for array in arrays):
            slab.add_state(arrays)
        for name, array, view in arrays_of(slab, arrays):
            saved = self._state.get(f"{name}/{array.name}")
            if saved is None:  # saved before the first update had made the arrays
                view.zero_()
            else:
                view.copy_(saved)
        for name in slab.steps:
            steps = self._manifest.parameters[name].steps
            assert steps is not None
            slab.set_steps(name, steps)

    def _check_parameters(self) -> None:
        trained = {name for slab in self._slabs for name in slab.steps}
        parameters = dict(self._model.named_parameters())
        buffers = {name: self._model.get_buffer(name) for name in self._buffers}
        for kind, here, saved in (
            ("parameter", parameters, self._manifest.parameters),
            ("persistent buffer", buffers, self._manifest.buffers),
        ):
            self._check_names(f"{kind}s", here, saved)
            for name, tensor in here.items():
                record = saved[name]
                mine = ParameterRecord(tuple(tensor.shape), dtype_name(tensor.dtype), 0 if name in trained else None)
                if replace(record, steps=mine.steps) != mine:
                    raise CheckpointError(
                        f"{kind} {name} is {record.dtype} of shape {record.shape} in the checkpoint {self.path}, and "
                        f"{mine.dtype} of shape {mine.shape} here; build the model with the same config and dtype"
                    )
                if (record.steps is None) != (mine.steps is None):
                    words = ("is not trained", "is") if record.steps is None else ("is trained", "is not")
                    raise CheckpointError(
                        f"{kind} {name} {words[0]} in the checkpoint {self.path}, and {words[1]} here; give the "
                        "optimizer the same parameters, with the same requires_grad"
                    )

    def _check_optimizer(self) -> None:
        saved, optimizer = self._manifest, self._optimizer
        kind = type(optimizer).__name__
        if saved.optimizer != kind:
            raise CheckpointError(
                f"the checkpoint {self.path} is of the optimizer {saved.optimizer}, the step of {kind}"
            )
        if saved.arrays != self._rule.arrays:
            raise CheckpointError(
                f"the checkpoint {self.path} has the optimizer state {_describe(saved.arrays)}, the step "
                f"{_describe(self._rule.arrays)}; compile the step with the state kind that it was saved with"
            )
        names = names_by_group(optimizer, self._model)
        if len(names) != len(saved.groups):
            raise CheckpointError(
                f"the optimizer of the checkpoint {self.path} has {len(saved.groups)} parameter groups, the step's "
                f"{len(names)}"
            )
        for index, (here, group) in enumerate(zip(names, saved.groups)):
            self._check_names(f"parameters in group {index}", here, group.params)

    def _check_names(self, what: str, here: Iterable[str], saved: Iterable[str]) -> None:
        here, saved = set(here), set(saved)
        if here != saved:
            raise CheckpointError(
                f"the checkpoint {self.path} has other {what}: it has also {_some(saved - here)}, and lacks "
                f"{_some(here - saved)}; build the model and the optimizer as they were when it was saved"
            )


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "none"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe(arrays: Sequence[StateArray]) -> str:
    return ", ".join(
        f"{a.name} ({dtype_name(a.dtype)}{f', one for {a.block} elements' if a.block > 1 else ''})" for a in arrays
    )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is damaged: {path} {what}. Nothing has been loaded; load another checkpoint"
    )


def _check_files(directory: Path, files: Mapping[str, FileRecord]) -> dict[str, bytes]:
    """Check every file's size, and the checksums of those that are no shards; their contents."""
    contents = {}
    for name, record in files.items():
        if name in EDITABLE:
            continue
        path = directory / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise _damaged(path, "is missing") from None
        if size != record.nbytes:
            raise _damaged(path, f"has {size} bytes instead of {record.nbytes}")
        if record.crc32 is not None:
            contents[name] = path.read_bytes()
            if crc32_of_bytes(contents[name]) != record.crc32:
                raise _damaged(path, "has other content than was written (its checksum is wrong)")
    return contents


def _open_tensors(
    directory: Path, files: Mapping[str, FileRecord], stack: ExitStack
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of all shards by name, weights and state, after a look at every byte of them."""
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    checks: list[tuple[Path, str, torch.Tensor, TensorRecord]] = []
    for name, record in files.items():
        if not record.tensors:
            continue
        path = directory / name
        try:
            file = stack.enter_context(safe_open(path, "pt"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no mapping
        except SafetensorError as error:
            raise _damaged(path, f"cannot be read ({error})") from error
        if set(tensors) != set(record.tensors):
            raise _damaged(path, "holds other tensors than were written")
        checks += [(path, key, tensor, record.tensors[key]) for key, tensor in tensors.items()]
        found[name.startswith(f"{OWN}/")].update(tensors)

    def check(item: tuple[Path, str, torch.Tensor, TensorRecord]) -> None:
        path, key, tensor, record = item
        if record_tensor(tensor) != record:
            raise _damaged(path, f"has other content than was written in {key} (its checksum is wrong)")

    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(check, checks):
            pass
    return found

"""The manifest of a checkpoint: what it holds, in JSON that notices its own damage.

It knows parameters by name and nothing of plans, budgets, slabs or devices, so that a checkpoint suits them all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from oomc.errors import CheckpointError
from oomc.optimizers import groups_of
from oomc.runtime.layout import StateArray

FORMAT, VERSION = "oomc checkpoint", 1
OWN = "oomc"
"""Folder of a checkpoint with all that is not the model's weights."""
MANIFEST = f"{OWN}/manifest.json"
EDITABLE = ("config.json", "generation_config.json")
"""Files that a user may change: `load` does not read them."""
LO = "lo"
"""Name of a split master's lower half among a parameter's arrays."""
SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of a file: its dtype (torch's name without `torch.`), shape, and the crc32 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class FileRecord:
    """A file: its size, and the crc32 of its bytes or of each of its tensors."""

    nbytes: int
    crc32: int | None
    tensors: Mapping[str, TensorRecord]


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter or persistent buffer: shape, dtype, and the number of its updates (None: it is not trained)."""

    shape: tuple[int, ...]
    dtype: str
    steps: int | None = None


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group: the names of its parameters, sorted, and its hyperparameters."""

    params: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without opening its other files.

    Attributes:
        saved_ns: when it was complete, in ns since 1970.
        progress: the step's own counters, by name.
        parameters: those of the model, tied ones once, by name.
        buffers: the persistent buffers.
        optimizer: the class of the torch optimizer.
        arrays: the optimizer's state arrays.
        groups: the optimizer's parameter groups.
        files: by path in the checkpoint.
    """

    saved_ns: int
    progress: Mapping[str, int]
    parameters: Mapping[str, ParameterRecord]
    buffers: Mapping[str, ParameterRecord]
    optimizer: str
    arrays: tuple[StateArray, ...]
    groups: tuple[GroupRecord, ...]
    files: Mapping[str, FileRecord]

    def text(self) -> str:
        """As JSON."""
        body = asdict(self)
        body["arrays"] = [[a.name, dtype_name(a.dtype), a.block] for a in self.arrays]
        body |= {"format": FORMAT, "version": VERSION}
        return json.dumps(body | {"crc32": _crc(body)}, indent=1)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another format.
    """
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_text())
        checksum = body.pop("crc32")
        kind, version = body.pop("format"), body.pop("version")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{directory} is no checkpoint of oomc: it has no {MANIFEST}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:200]}. Load another checkpoint") from error
    if checksum != _crc(body | {"format": kind, "version": version}):
        raise CheckpointError(f"{path} is damaged or was edited: its checksum is wrong. Load another checkpoint")
    if (kind, version) != (FORMAT, VERSION):
        raise CheckpointError(f"{path} is {kind} {version}; this version of oomc reads {FORMAT} {VERSION}")
    return Manifest(
        body["saved_ns"],
        body["progress"],
        _parameters(body["parameters"]),
        _parameters(body["buffers"]),
        body["optimizer"],
        tuple(StateArray(name, getattr(torch, dtype), block) for name, dtype, block in body["arrays"]),
        tuple(GroupRecord(tuple(g["params"]), g["options"]) for g in body["groups"]),
        {path: _file(record) for path, record in body["files"].items()},
    )


def _crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _parameters(records: Mapping[str, Any]) -> dict[str, ParameterRecord]:
    return {name: ParameterRecord(tuple(r["shape"]), r["dtype"], r["steps"]) for name, r in records.items()}


def _file(record: Mapping[str, Any]) -> FileRecord:
    tensors = {n: TensorRecord(t["dtype"], tuple(t["shape"]), t["crc32"]) for n, t in record["tensors"].items()}
    return FileRecord(record["nbytes"], record["crc32"], tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def record_tensor(tensor: torch.Tensor) -> TensorRecord:
    """The record of a contiguous CPU tensor; reads all of it, without the GIL."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), zlib.crc32(content))


def crc32_of_bytes(content: bytes) -> int:
    """A file's checksum."""
    return zlib.crc32(content)


def names_by_group(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[list[str]]:
    """For each of the optimizer's groups, the model's names of its parameters."""
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    for name, index in groups_of(optimizer, model).items():
        names[index].append(name)
    return names


def group_record(group: Mapping[str, Any], names: Sequence[str], index: int) -> GroupRecord:
    """One of an optimizer's `param_groups` as it is now; tensors (a tensor lr) are read.

    Raises:
        CheckpointError: a hyperparameter is neither a number, a string, None, a tensor of one element, nor a list of
            these.
    """

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.item()
        if isinstance(value, list | tuple):
            return [plain(key, v) for v in value]
        if isinstance(value, SCALARS):
            return value
        raise CheckpointError(
            f"param_groups[{index}] of the optimizer has {key!r} of type {type(value).__name__}, which cannot be "
            "saved; take it out of the group and hand it to save as part of `extra`"
        )

    options = {key: plain(key, value) for key, value in group.items() if key != "params"}
    return GroupRecord(tuple(sorted(names)), options)


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set a group's hyperparameters to recorded ones; a tensor (a tensor lr) stays the tensor that it is."""
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        elif isinstance(value, list) and not isinstance(current, list):
            group[key] = tuple(value)
        else:
            group[key] = value

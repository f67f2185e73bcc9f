"""Reading safetensors files, one or several: headers first, then tensors straight to where they are wanted.

A file is the length of a header (8 bytes, little-endian), the header (JSON: of each tensor its dtype, shape and byte
range), and the bytes. Tensors are read with `pread` by several threads into memory of the caller's choice, so that
nothing is held that was not asked for; a mapped file would count as this process's memory page by page.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oomc.errors import CheckpointError, UnsupportedError
from oomc.runtime.pool import physical_cores

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PIECE = 32 << 20  # bytes read by one task
_READERS = 8  # threads at most: more do not make a disk faster
_HEADER_LIMIT = 100 << 20
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its file, dtype, shape, and first byte in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


class Shards:
    """The tensors of some safetensors files.

    Args:
        paths: the files; only their headers are read.

    Attributes:
        entries: by key.

    Raises:
        CheckpointError: a file is missing, damaged or cut short, or two files have one key.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.entries: dict[str, Entry] = {}
        for path in paths:
            for key, entry in _read_header(path).items():
                if key in self.entries:
                    raise CheckpointError(f"{key} is in {self.entries[key].path.name} and in {path.name}")
                self.entries[key] = entry

    @staticmethod
    def of(directory: Path) -> Shards:
        """The weights of a model directory: `model.safetensors`, or the files of its index.

        Raises:
            UnsupportedError: the weights are in another format.
            CheckpointError: there are none, or as above, or a file lacks what the index says is in it.
        """
        if (directory / SINGLE).exists():
            return Shards([directory / SINGLE])
        if not (directory / INDEX).exists():
            raise _nothing_to_read(directory)
        places = _read_index(directory / INDEX)
        shards = Shards([directory / name for name in sorted(set(places.values()))])
        lost = [k for k, name in places.items() if k not in shards.entries or shards.entries[k].path.name != name]
        if lost:
            raise CheckpointError(
                f"{directory / INDEX} says that {lost[0]} is in {places[lost[0]]}, which it is not ({len(lost)} such "
                "keys): files of different checkpoints are mixed, or a download is incomplete"
            )
        return shards

    def read(self, key: str) -> torch.Tensor:
        """A new tensor with what is stored under `key`."""
        entry = self.entries[key]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into([(key, out)])
        return out

    def read_into(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill each tensor with what is stored under its key.

        Args:
            wanted: keys and contiguous CPU tensors of the stored dtype and number of elements.

        Raises:
            CheckpointError: a file has become shorter than its header says.
        """
        pieces: list[tuple[Path, memoryview, int]] = []
        for key, out in wanted:
            entry = self.entries[key]
            assert out.is_contiguous() and out.dtype == entry.dtype and out.nbytes == entry.nbytes, key
            if entry.nbytes:
                target = out.reshape(-1).view(torch.uint8).numpy().data
                for start in range(0, entry.nbytes, _PIECE):
                    pieces.append((entry.path, target[start : start + _PIECE], entry.offset + start))
        files = {path: os.open(path, os.O_RDONLY) for path in {path for path, _, _ in pieces}}
        try:
            with ThreadPoolExecutor(min(_READERS, physical_cores(), max(len(pieces), 1))) as threads:
                tasks = [threads.submit(_fill, files[path], path, part, offset) for path, part, offset in pieces]
                for task in tasks:
                    task.result()
        finally:
            for file in files.values():
                os.close(file)


def _fill(file: int, path: Path, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(file, [target], offset)
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {offset}, within a tensor")
        target, offset = target[count:], offset + count


def _read_header(path: Path) -> Mapping[str, Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(f"{path} is no safetensors file, or is cut short within its header")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    header.pop("__metadata__", None)
    entries = {key: _entry(path, key, info, 8 + length) for key, info in header.items()}
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + length)
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes where its header describes {end}: it is cut short or damaged")
    return entries


def _entry(path: Path, key: str, info: Any, data: int) -> Entry:
    try:
        dtype, shape, (start, stop) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a damaged header: {key} is {info!r}") from error
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{key} in {path} is stored as {dtype}, which oomc cannot read")
    entry = Entry(path, _DTYPES[dtype], shape, data + start)
    if entry.nbytes != stop - start:
        raise CheckpointError(f"{path} has a damaged header: {key} of shape {shape} has {stop - start} bytes")
    return entry


def _read_index(path: Path) -> dict[str, str]:
    try:
        places: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:200]}") from error
    return places


def _nothing_to_read(directory: Path) -> Exception:
    others = sorted(p.name for ending in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5") for p in directory.glob(ending))
    if others:
        return UnsupportedError(
            f"{directory} has its weights as {others[0]}; oomc reads safetensors. Convert them once: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return CheckpointError(f"{directory} has no weights: neither {SINGLE} nor {INDEX}")

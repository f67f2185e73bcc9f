"""How a checkpoint's files are written: slab by slab, by way of one buffer, while training may go on."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oomc.checkpoint_files import Draft, sync
from oomc.errors import CheckpointError
from oomc.manifest import MANIFEST, OWN, FileRecord, Manifest, crc32_of_bytes, record_tensor
from oomc.runtime.chaos import attempt
from oomc.runtime.lanes import mark
from oomc.runtime.layout import StateArray
from oomc.runtime.pool import Copying
from oomc.runtime.slabs import Slab
from oomc.slab_state import arrays_of, weights_of

_CHECKERS = 2
_ALIGN = 16  # of a tensor in the buffer: enough for every dtype


class Files:
    """Writes a checkpoint's files, each on the disk when its call returns, and keeps their records."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.records: dict[str, FileRecord] = {}

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file that is read as a whole."""
        path = self._directory / name
        path.write_bytes(content)
        sync(path)
        self.records[name] = FileRecord(len(content), crc32_of_bytes(content), {})

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write contiguous CPU tensors that share no memory as a safetensors file; takes no memory for it."""
        path = self._directory / name
        with ThreadPoolExecutor(_CHECKERS) as pool:  # checksums are computed while the disk is busy
            records = pool.map(record_tensor, tensors.values())
            save_file(dict(tensors), path, {"format": "pt"})
            sync(path)
            self.records[name] = FileRecord(path.stat().st_size, None, dict(zip(tensors, records)))

    def write_index(self) -> None:
        """Write Hugging Face's index of the shards that there are so far."""
        shards = {name: file for name, file in sorted(self.records.items()) if name.startswith("model-")}
        size = sum(file.nbytes for file in shards.values())
        where = {key: name for name, file in shards.items() for key in file.tensors}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2)
        self.write_bytes("model.safetensors.index.json", text.encode())


class Shard:
    """A slab's part of a checkpoint. From `hold` on updates of the slab wait, until `release`.

    Attributes:
        steps: from `write` on, how many updates each trained parameter has had.
    """

    def __init__(self, slab: Slab, arrays: Sequence[StateArray], number: int, count: int) -> None:
        self._slab, self._arrays = slab, arrays
        self._suffix = f"{number:05d}-of-{count:05d}.safetensors"
        self._copied = Copying(1)
        self.steps: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Most bytes of buffer that it takes."""
        total = 0
        for place in self._slab.layout.places:
            spec = place.spec
            total += _padded(spec.nbytes)
            if spec.trainable:
                total += _padded(2 * spec.numel) if spec.dtype == torch.bfloat16 else 0
                total += sum(_padded(a.dtype.itemsize * a.elements(spec.numel)) for a in self._arrays)
        return total

    def hold(self) -> None:
        """Let the slab's state be that of now, with the updates that are under way, until it has been copied."""
        self._earlier, self._mark = self._slab.pending(), mark(self._slab.lo.device)
        self._slab.add_pending(self._slab.layout.gradient_ranges, self._copied)

    def release(self) -> None:
        """Let updates go on, whether or not it has been copied."""
        if not self._copied.succeeded():
            self._copied.part_done()

    def write(self, files: Files, buffer: torch.Tensor) -> None:
        """Copy the slab into `buffer`, release it, and write the copy."""
        for countdown in self._earlier:
            countdown.wait()
        self.steps = dict(self._slab.steps)
        device = self._slab.lo.device
        with _own_stream(device):
            if self._mark is not None:
                torch.cuda.current_stream(device).wait_event(self._mark)
            copies = self._copy(buffer)
        self.release()
        for name, tensors in copies.items():
            if tensors:
                files.write_tensors(name, tensors)

    def _copy(self, buffer: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        slab, start = self._slab, 0
        parts = {
            f"model-{self._suffix}": weights_of(slab),
            f"{OWN}/state-{self._suffix}": ((f"{n}/{array.name}", t) for n, array, t in arrays_of(slab, self._arrays)),
        }
        copies: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensors in parts.items():
            copies[name] = {}
            for key, tensor in tensors:
                target = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[name][key] = target.copy_(tensor)
                start += _padded(tensor.nbytes)
        return copies


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream that is not training's, so that the copies neither wait for all that it has been given nor delay it."""
    return nullcontext() if device.type != "cuda" else torch.cuda.stream(torch.cuda.Stream(device))


class Save:
    """A save that has been asked for.

    Attributes:
        reported: whether `wait` has returned or raised.
        begun: a thread writes it, or is about to; then the draft is that thread's.
    """

    def __init__(self, draft: Draft, files: Files, manifest: Manifest, shards: Sequence[Shard]) -> None:
        self._draft, self._files, self._manifest, self._shards = draft, files, manifest, shards
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.reported = self.begun = False
        for shard in shards:
            shard.hold()

    def start(self) -> None:
        """Write it in a thread."""
        # not a daemon: a program that ends does so when its last checkpoint is there
        thread = threading.Thread(target=self.run, name="oomc-checkpoint")
        self.begun = True
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            self.begun = False
            raise

    def run(self) -> None:
        """Write it; an error waits for `wait`."""
        try:
            self._error = attempt(self._write)
            for shard in self._shards:
                shard.release()
            self._shards = ()
            if self._error is not None:
                self._draft.discard()
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self.begun or self._ended.is_set()

    def wait(self) -> None:
        """Block until it has ended; CheckpointError if it failed."""
        if self.begun:  # not by joining the thread, which an interrupt may have kept from saying that it has started
            self._ended.wait()
        self.reported = True
        if isinstance(self._error, Exception):
            raise failed(self._draft.target, self._error) from self._error
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        steps: dict[str, int] = {}
        buffer = torch.empty(max((shard.nbytes for shard in self._shards), default=0), dtype=torch.uint8)
        for shard in reversed(self._shards):  # the next updates come in this order
            shard.write(self._files, buffer)
            steps |= shard.steps
        self._files.write_index()
        manifest = replace(
            self._manifest,
            saved_ns=time.time_ns(),
            parameters={n: replace(record, steps=steps.get(n)) for n, record in self._manifest.parameters.items()},
            files=self._files.records,
        )
        self._files.write_bytes(MANIFEST, manifest.text().encode())
        self._draft.finish()


def unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as contiguous CPU tensors with memory of their own; copied only where they are not.

    Raises:
        CheckpointError: one is on the meta device.
    """
    result: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise CheckpointError(f"{name} is on the meta device and has no values to save; load the model's weights")
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def pickled(value: Any) -> bytes:
    """What `torch.save` writes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickled_safely(extra: Any) -> bytes:
    """The same, of what the user wants saved.

    Raises:
        CheckpointError: torch cannot save it, or its loader that runs no code would not take it.
    """
    try:
        content = pickled(extra)
        torch.load(io.BytesIO(content), weights_only=True)
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"`extra` holds what cannot be loaded again safely: {error}. Use tensors, numbers, strings, and "
            "dicts, lists and tuples of these"
        ) from error
    return content


def failed(target: str | os.PathLike[str], error: Exception) -> CheckpointError:
    """What a save that failed raises."""
    return CheckpointError(
        f"the checkpoint {target} could not be written: {error}. What was saved there before is still there"
    )


def write_config(model: torch.nn.Module, files: Files) -> None:
    """Write what transformers needs to build the model, if it is one of its models."""
    if not hasattr(model, "save_pretrained"):
        return
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    files.write_bytes("config.json", config.to_json_string().encode())
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        files.write_bytes("generation_config.json", generation.to_json_string().encode())

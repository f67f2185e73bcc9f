"""Checkpoints: what they look like, and how they are written.

    out/config.json, generation_config.json           of a Hugging Face model
    out/model-00001-of-00003.safetensors, ...         working weights and persistent buffers, by the model's own names
    out/model.safetensors.index.json
    out/oomc/state-00001-of-00003.safetensors, ...    "<parameter>/lo", "<parameter>/m", ...: the rest of the state
    out/oomc/random.pt, extra.pt                      random generators; what the user handed in
    out/oomc/manifest.json                            names, shapes, groups, counts, checksums: `oomc.manifest`

There is one shard for each slab and one for what is in none, but nothing else of slabs, plans or devices: any step of
the same model and optimizer can load it (`oomc.checkpoint_load`). It appears whole or not at all
(`oomc.checkpoint_files`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError

from oomc.checkpoint_files import Draft
from oomc.checkpoint_load import Opened
from oomc.checkpoint_write import Files, Save, Shard, failed, pickled, pickled_safely, unshared, write_config
from oomc.manifest import OWN, Manifest, ParameterRecord, dtype_name, group_record, names_by_group
from oomc.random_state import random_state
from oomc.runtime.optim import UpdateRule
from oomc.runtime.slabs import Slab


class Checkpoints:
    """Saves and loads the checkpoints of one step.

    Args:
        model: the user's model; its parameters alias the slabs.
        optimizer: the user's optimizer.
        rule: what computes its updates.
        slabs: gives the slabs as they are now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule,
        slabs: Callable[[], Sequence[Slab]],
    ) -> None:
        self._model, self._optimizer, self._rule, self._slabs = model, optimizer, rule, slabs
        self._running: Save | None = None
        kept = model.state_dict(keep_vars=True)
        self._buffers = [name for name, _ in model.named_buffers() if name in kept]

    def save(
        self, directory: str | os.PathLike[str], progress: Mapping[str, int], extra: Any = None, *,
        asynchronous: bool = False,
    ) -> Save:  # fmt: skip
        """Write a checkpoint of the state as it is now, updates under way included; it replaces an older one.

        Takes `buffer_bytes` of host memory until it is done.

        Args:
            directory: where. Files in it that are no part of a checkpoint (a tokenizer's) stay.
            progress: the step's own counters, which loading gives back.
            extra: what else the user wants back: tensors, numbers, strings, and dicts, lists and tuples of these.
            asynchronous: return as soon as everything is noted; a thread writes while training goes on. Each slab's
                next update waits until the slab has been copied. Until then nothing else may write to parameters.

        Returns:
            A handle; without `asynchronous` all is done.

        Raises:
            CheckpointError: this save, or an earlier asynchronous one whose handle has not said so, failed; what was
                saved before is still there. Or `directory` holds something else than a checkpoint.
        """
        self.settle()
        extra_bytes = pickled_safely(extra)
        try:
            draft = Draft(directory)
        except OSError as error:
            raise failed(directory, error) from error
        shards: list[Shard] = []
        try:
            files = Files(draft.path)
            files.write_bytes(f"{OWN}/extra.pt", extra_bytes)
            files.write_bytes(f"{OWN}/random.pt", pickled(random_state()))
            write_config(self._model, files)
            slabs = [slab for slab in self._slabs() if slab.layout.places]
            rest = self._in_no_slab(slabs)
            count = len(slabs) + bool(rest)
            if rest:  # now, since nobody would wait with writing to it
                files.write_tensors(f"model-{count:05d}-of-{count:05d}.safetensors", unshared(rest))
            manifest = self._manifest(progress)
            shards += [Shard(slab, self._rule.arrays, index + 1, count) for index, slab in enumerate(slabs)]
            save = Save(draft, files, manifest, shards)
            if asynchronous:
                self._running = save
                save.start()
        except BaseException as error:
            if self._running is not None and self._running.begun:
                raise  # interrupted, but it is being written
            self._running = None
            for shard in shards:
                shard.release()  # or updates would wait for ever
            draft.discard()
            if isinstance(error, OSError | SafetensorError):
                raise failed(draft.target, error) from error
            raise
        if not asynchronous:
            save.run()
            save.wait()
        return save

    def open(self, directory: str | os.PathLike[str]) -> Opened:
        """Open the checkpoint of this name and check all of it against the step; its `restore` then loads it.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model or optimizer; nothing has changed.
                Or an earlier asynchronous save failed.
        """
        self.settle()
        return Opened(directory, self._model, self._optimizer, self._rule, self._slabs(), self._buffers)

    def settle(self) -> None:
        """Wait for an asynchronous save; CheckpointError if it failed and its handle has not said so yet."""
        running, self._running = self._running, None
        if running is not None and not running.reported:
            running.wait()

    @property
    def buffer_bytes(self) -> int:
        """Host bytes that a save takes: those of the largest slab."""
        return max((Shard(slab, self._rule.arrays, 1, 1).nbytes for slab in self._slabs()), default=0)

    def _in_no_slab(self, slabs: Sequence[Slab]) -> dict[str, torch.Tensor]:
        """Parameters that no slab has, and persistent buffers."""
        names = {place.spec.name for slab in slabs for place in slab.layout.places}
        rest: dict[str, torch.Tensor] = {n: p for n, p in self._model.named_parameters() if n not in names}
        return rest | {name: self._model.get_buffer(name) for name in self._buffers}

    def _manifest(self, progress: Mapping[str, int]) -> Manifest:
        """What is known before the slabs are written."""
        names = names_by_group(self._optimizer, self._model)
        return Manifest(
            saved_ns=0,
            progress=dict(progress),
            parameters={
                name: ParameterRecord(tuple(p.shape), dtype_name(p.dtype)) for name, p in self._model.named_parameters()
            },
            buffers={
                name: ParameterRecord(tuple(buffer.shape), dtype_name(buffer.dtype))
                for name, buffer in ((name, self._model.get_buffer(name)) for name in self._buffers)
            },
            optimizer=type(self._optimizer).__name__,
            arrays=self._rule.arrays,
            groups=tuple(group_record(g, names[i], i) for i, g in enumerate(self._optimizer.param_groups)),
            files={},
        )

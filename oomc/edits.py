"""Writes of the user to the model between steps: they become the new weights, or are refused, and are never lost.

A write in place shows in a tensor's version counter, another storage in its address. The step's own updates write to
memory and leave both alone. Writes through `parameter.data` or numpy show nowhere; since a parameter aliases the
step's memory they are in effect nevertheless, on top of what a bf16 weight's fp32 master has beyond it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oomc import private
from oomc.errors import OomcError, UnsupportedError

FREQUENCIES = "inv_freq"
"""How rotary embeddings call the buffer of their frequencies, in transformers and most code beside it."""


@dataclass(frozen=True)
class _Seen:
    """A parameter as the step left it."""

    parameter: nn.Parameter
    address: int
    version: int
    kind: dict[str, Any]

    @staticmethod
    def of(parameter: nn.Parameter) -> _Seen:
        kind = {
            "dtype": parameter.dtype,
            "shape": tuple(parameter.shape),
            "requires_grad": parameter.requires_grad,
            "is_meta": parameter.is_meta,
        }
        return _Seen(parameter, parameter.data_ptr(), private.version(parameter), kind)

    def same_values(self, other: _Seen) -> bool:
        """Whether nothing was written to it in between."""
        return self.parameter is other.parameter and self.address == other.address and self.version == other.version


class Edits:
    """Notices what the user writes to parameters.

    Call `remember` after whatever the step itself has done to the parameters, `settle` when it has waited for all
    updates, `take` before weights are used.

    Args:
        model: whose parameters are watched.
        bind: lets every parameter alias the step's memory, also one that the user has given another storage.
    """

    def __init__(self, model: nn.Module, bind: Callable[[], None] = lambda: None) -> None:
        self._model, self._bind = model, bind
        self._seen: dict[str, _Seen] = {}
        self._under_way = False
        self.remember(under_way=False)

    @property
    def under_way(self) -> bool:
        """Whether updates may be under way."""
        return self._under_way

    def remember(self, under_way: bool) -> None:
        """Take the parameters as they are; updates may be under way from now on, or are done."""
        self._seen = {name: _Seen.of(p) for name, p in self._model.named_parameters()}
        self._under_way = under_way

    def find(self) -> list[str]:
        """Names of the parameters that were written to, moved or replaced since `remember`.

        Raises:
            OomcError: one has another dtype, shape or requires_grad, or was moved to the meta device, or there are
                other parameters: the step was not compiled for these.
        """
        current = dict(self._model.named_parameters())
        new = [name for name in current if name not in self._seen]
        gone = [name for name in self._seen if name not in current]
        if new or gone:
            raise OomcError(
                f"the model has other parameters than it was compiled with: new are {new[:3] or 'none'}, missing are "
                f"{gone[:3] or 'none'}; compile it again"
            )
        found = []
        for name, parameter in current.items():
            now, before = _Seen.of(parameter), self._seen[name]
            for what, value in now.kind.items():
                if value != before.kind[what]:
                    raise OomcError(
                        f"parameter {name} now has {what} {value}; the step was compiled for {before.kind[what]}. "
                        "Change the model before it is compiled, or compile it again"
                    )
            if not now.same_values(before):
                found.append(name)
        return found

    def settle(self) -> None:
        """Updates are done.

        Raises:
            OomcError: the user has written to a parameter before.
        """
        if self._under_way:
            self._refuse(self.find())
            self._under_way = False

    def take(self) -> list[str]:
        """Names of the parameters that the user has given other values, to be loaded; then call `remember`.

        Raises:
            OomcError: they were written to while updates may have been under way.
        """
        names = self.find()
        if self._under_way:
            self._refuse(names)
        return names

    def _refuse(self, names: list[str]) -> None:
        if not names:
            return
        self._bind()  # what was written elsewhere than to the step's memory is lost, and may not seem to be there
        self.remember(under_way=False)  # the error is raised once; what is written from now on counts
        raise OomcError(
            f"{names[0]}{f' and {len(names) - 1} more parameters were' if len(names) > 1 else ' was'} written to while "
            "the last step's update may have been under way, so that what is there now may be half of each; call "
            "step.synchronize() before writing to the model (load_state_dict does so itself), and write again"
        )


def check_buffers(model: nn.Module) -> None:
    """Make sure that the model's buffers have values: those that no checkpoint holds are easily left without.

    Raises:
        UnsupportedError: a buffer is on the meta device, or holds what memory held before it.
    """
    for prefix, module in model.named_modules():
        absent = private.non_persistent(module)
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if buffer.is_meta:
                raise UnsupportedError(
                    f"buffer {full} is on the meta device and has no values; {_remedy(name in absent)}"
                )
            if not buffer.is_floating_point():
                continue
            frequencies = name.endswith(FREQUENCIES)
            if frequencies and buffer.dtype in (torch.bfloat16, torch.float16):
                warnings.warn(
                    f"buffer {full} has dtype {buffer.dtype}, in which distant positions run together; models compute "
                    "it in fp32 (model.to(dtype) casts buffers too, from_pretrained(dtype=...) does not)",
                    stacklevel=3,
                )
            if name in absent and (buffer.isnan().any() or (frequencies and not _are_frequencies(buffer))):
                raise UnsupportedError(
                    f"buffer {full} holds what memory holds after to_empty(): "
                    f"{'no frequencies' if frequencies else 'NaN'}; {_remedy(True)}"
                )


def _are_frequencies(buffer: torch.Tensor) -> bool:
    """Finite, not negative, and not all zero; some models pad them with zeros."""
    return bool(buffer.isfinite().all() and (buffer >= 0).all() and (buffer > 0).any())


def _remedy(absent: bool) -> str:
    if not absent:
        return "load the weights before compiling (from_pretrained, or to_empty and load_state_dict)"
    return (
        "no checkpoint holds it, so that it must be computed: build the model on the CPU, or with from_pretrained, or "
        "with oomc.load, which all do so"
    )

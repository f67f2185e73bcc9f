"""What binds the user's model to the step outside of a step's call: `model(...)`, `model.generate(...)`, `evaluate`.

The model's parameters live in host memory. Outside of a step, each module's parameters and buffers are lent to the
device while the module runs: their `.data` is a copy there, and the host's memory again afterwards. A block (an entry
of an outermost module list) is lent as a whole, as a step fetches it, since its code may read the weights of a part
that it does not call. What is on the device already stays as it is. A module that reads weights outside of its block
without calling their owner is told by torch that its tensors are on two devices.

On the CPU stand-in nothing is lent; all that happens there is the wait for updates under way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from oomc import private
from oomc.errors import OomcError


@dataclass
class _Loan:
    """A tensor whose `.data` is a copy on the device.

    Attributes:
        home: the data that it has otherwise.
        version: of the tensor, when the copy was made.
        counted: whether the version tells of writes; batch norm, for one, writes its buffers uncounted.
        users: how many running modules want it there.
    """

    tensor: torch.Tensor
    home: torch.Tensor
    version: int
    counted: bool
    users: int = 0


@dataclass
class _Call:
    """A module that is running, and what was lent for it."""

    module: nn.Module
    loans: list[_Loan] = field(default_factory=list)


class _Hook:
    """A hook of a module that stays with it: copies and pickles of the model have one that does nothing.

    Whoever makes one reads the weights, and has to wait for them; the hooks of a module are copied before its weights
    and parts.
    """

    def __init__(self, function: Callable[..., Any] | None = None, settle: Callable[[], None] = lambda: None) -> None:
        self._function, self._settle = function, settle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._function is None else self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        self._settle()
        return _Hook, ()


class Attachment:
    """The hooks on a model whose weights are in the step's memory.

    Args:
        model: called by the user outside of steps.
        device: where it is to compute.
        settle: waits until the weights are current; called before they are read or written. It is called often, and
            must be cheap when there is nothing to wait for; it must not keep the step alive.
        settle_to_write: the same before all weights are written, when a checkpoint must not be under way either.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, settle: Callable[[], None],
        settle_to_write: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._device, self._settle, self._settle_to_write = device, settle, settle_to_write or settle
        self._lends = device.type == "cuda"
        self._root = weakref.ref(model)
        self._blocks = weakref.WeakSet(blocks_of(model))
        self._running: list[_Call] = []
        self._loans: dict[int, _Loan] = {}
        self._copied: torch.cuda.Event | None = None
        self._handles: list[Any] = []
        for module in model.modules():
            holds = any(True for _ in _tensors(module, recurse=False))
            if holds or module is model or module in self._blocks:
                # who copies or pickles a module takes its attributes in order, and has to meet a hook first
                for name in ("_parameters", "_buffers", "_modules"):
                    module.__dict__[name] = module.__dict__.pop(name)
            if holds or module is model:
                self._handles += [
                    module.register_state_dict_pre_hook(_Hook(self._before_state, settle)),
                    module.register_load_state_dict_pre_hook(_Hook(self._before_load, settle)),
                ]
            if holds or module is model or module in self._blocks:
                self._handles += [
                    module.register_forward_pre_hook(_Hook(self._enter, settle), prepend=True, with_kwargs=True),
                    module.register_forward_hook(_Hook(self._leave, settle), always_call=True),
                ]

    def remove(self) -> None:
        """Take the hooks off the model, with everything at home."""
        self.bring_home()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def bring_home(self) -> None:
        """Give back what an interrupted call has left on the device, where torch runs no hooks."""
        for loan in self._loans.values():
            self._give_back(loan)
        self._loans.clear()
        self._running.clear()
        self._wait_for_copies()

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _before_state(self, *_: Any, **__: Any) -> None:
        self._settle()

    def _before_load(self, *_: Any, **__: Any) -> None:
        self._settle_to_write()

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if _is_traced(module):
            return None
        if module is self._root():
            self.bring_home()  # no model calls itself: what is still lent, an interrupted call has left
        outermost = not self._running
        call = _Call(module)
        self._running.append(call)  # first of all, since `_leave` is called also when this raises
        if outermost:
            self._settle()
        if not self._lends:
            return None
        if torch.is_grad_enabled():
            raise OomcError(
                f"{type(module).__name__} is called outside of the step with gradients enabled, but its weights pass "
                "through the device only one after another. To train, call step(...); for the model's output, call "
                "step.evaluate(...), or call the model under torch.no_grad()"
            )
        with torch.inference_mode(False), torch.no_grad():
            for tensor in _tensors(module, recurse=module in self._blocks):
                loan = self._lend(tensor, counted=isinstance(tensor, nn.Parameter) or not module.training)
                if loan is not None:
                    loan.users += 1
                    call.loans.append(loan)
        return self._moved((args, kwargs)) if outermost else None

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._running or self._running[-1].module is not module:
            return  # its `_enter` has not run: it is being traced, or a hook before ours has failed
        for loan in self._running.pop().loans:
            loan.users -= 1
            if not loan.users:
                self._give_back(loan)
                del self._loans[id(loan.tensor)]
        if not self._running:
            self._wait_for_copies()

    # -- lending --------------------------------------------------------------------------------------------------

    def _is_away(self, tensor: torch.Tensor) -> bool:
        return tensor.device != self._device

    def _moved(self, tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._device, non_blocking=True), tree)

    def _lend(self, tensor: torch.Tensor, counted: bool) -> _Loan | None:
        if id(tensor) in self._loans:
            return self._loans[id(tensor)]
        if not self._is_away(tensor):
            return None
        home = tensor.data
        loan = _Loan(tensor, home, private.version(tensor), counted)
        try:
            tensor.data = home.to(self._device, non_blocking=True, copy=True)
        except torch.OutOfMemoryError as error:
            raise OomcError(
                "outside of a step a block's weights are on the device as a whole, with all experts of a layer, and "
                f"there is no memory for them beside the step's own ({error}). Save the model and evaluate it "
                "elsewhere, or give the step a smaller device budget"
            ) from error
        self._loans[id(tensor)] = loan
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()
        return loan

    @staticmethod
    def _give_back(loan: _Loan) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if not loan.counted or private.version(loan.tensor) != loan.version:  # the module's code may write to it
                loan.home.copy_(loan.tensor.data)
            loan.tensor.data = loan.home

    def _wait_for_copies(self) -> None:
        """Nobody may write to the host's memory while it is still being copied from."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost module lists that have more than one."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            found += child
        else:
            found += blocks_of(child)
    return found


def evaluate(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """The model's own output in evaluation mode, without gradients; each module's training flag is as before.

    An attached model's weights pass through the device; tensors in the output are where the model computes.
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            return model(*args, **(kwargs or {}))
    finally:
        for module, flag in flags:
            module.training = flag


def _tensors(module: nn.Module, recurse: bool) -> list[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _is_traced(module: nn.Module) -> bool:
    """Whether fakes stand in for the module's weights: capture is tracing it."""
    return any(
        isinstance(t, private.FakeTensor) for t in (next(module.parameters(), None), next(module.buffers(), None))
    )

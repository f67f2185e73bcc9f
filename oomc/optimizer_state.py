"""`optimizer.state_dict()` and `load_state_dict()` of an optimizer whose state lies in slabs.

torch's optimizer keeps its state in a dict by parameter; here that dict is filled when a state dict is made, with views
of the slabs, and is empty at all other times: nothing is held twice, and nobody can keep a stale entry. A state dict is
torch's own, with its names, so that an eager optimizer takes it, and an eager optimizer's is taken here.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from oomc import private
from oomc.errors import CheckpointError
from oomc.manifest import LO
from oomc.runtime.layout import ParamSpec, StateArray
from oomc.runtime.optim import UpdateRule
from oomc.runtime.slabs import Slab
from oomc.slab_state import arrays_of

TORCH_NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}
"""What torch calls an array that has an element for each weight; others keep their names."""

State = dict[str, torch.Tensor]
_HOOKS: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()


def warn_if_lost(optimizer: torch.optim.Optimizer) -> None:
    """Warn of an optimizer that another step has updated with: its moments are that step's, and start anew."""
    if optimizer in _HOOKS and private.has_stepped(optimizer):
        warnings.warn(
            "this optimizer was compiled and stepped before: its moments and step counts stay with the earlier step "
            "and start anew here. To keep them, save(directory) by that step before, and load(directory) by this one",
            stacklevel=4,
        )


def expose_state(
    optimizer: torch.optim.Optimizer,
    rule: UpdateRule,
    slabs: Callable[[], Sequence[Slab]],
    params: Mapping[str, torch.nn.Parameter],
    before: Callable[[], None],
) -> None:
    """Let `optimizer`'s state dict be that of the slabs, for both directions.

    A state dict's tensors are views of the slabs, as torch's are of its state: a later update changes them.

    Args:
        optimizer: torch's, never stepped itself.
        rule: what updates in its place.
        slabs: gives the slabs as they are now.
        params: the model's parameters by name, as they are whenever that is asked.
        before: called before state is read or written; waits for updates under way, or raises if there are no slabs.

    What an earlier call has exposed for the same optimizer is forgotten.
    """
    for handle in _HOOKS.pop(optimizer, ()):
        handle.remove()
    staged: dict[str, State] = {}

    def fill(_: torch.optim.Optimizer) -> None:
        before()
        for slab in slabs():
            views = _views(slab, rule.arrays)
            for name, steps in slab.steps.items():
                if steps:
                    optimizer.state[params[name]] = {"step": torch.tensor(float(steps)), **views[name]}

    def empty(_: torch.optim.Optimizer, __: dict[str, Any]) -> None:
        optimizer.state.clear()

    def stage(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        before()
        staged.clear()
        names = {id(param): name for name, param in params.items()}
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        held = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
        if len(saved) != len(held):
            return None  # torch refuses it
        shapes = {n: s for slab in slabs() for n, s in _shapes(slab, rule.arrays).items()}
        for index, name in zip(saved, held):
            state = {k: v for k, v in state_dict["state"].get(index, {}).items() if v is not None}
            if state:
                staged[name] = _checked(name, state, shapes.get(name))
        # without the state, which torch would convert to the parameters' dtype
        return {**state_dict, "state": {}}

    def commit(_: torch.optim.Optimizer) -> None:
        before()
        for slab in slabs():
            slab.wait_updated()
            if staged.keys() & slab.steps.keys():
                slab.add_state(rule.arrays)
            for name, views in _views(slab, rule.arrays).items():
                for key, view in views.items():
                    if name in staged:
                        view.copy_(staged[name][key])
                    else:
                        view.zero_()
                slab.set_steps(name, int(staged[name]["step"]) if name in staged else 0)
        staged.clear()
        optimizer.state.clear()

    _HOOKS[optimizer] = [
        optimizer.register_state_dict_pre_hook(fill),
        optimizer.register_state_dict_post_hook(empty),
        optimizer.register_load_state_dict_pre_hook(stage),
        optimizer.register_load_state_dict_post_hook(commit),
    ]


def _as_torch(array: StateArray, spec: ParamSpec) -> tuple[str, tuple[int, ...]]:
    """The name and shape under which a parameter's part of an array is shown."""
    if array.block == 1 and array.dtype.is_floating_point:
        return TORCH_NAMES.get(array.name, array.name), spec.shape
    return array.name, (array.elements(spec.numel),)


def _shapes(slab: Slab, arrays: Sequence[StateArray]) -> dict[str, dict[str, tuple[int, ...]]]:
    specs = [place.spec for place in slab.layout.places if place.spec.trainable]
    return {spec.name: dict(_as_torch(array, spec) for array in arrays) for spec in specs}


def _views(slab: Slab, arrays: Sequence[StateArray]) -> dict[str, State]:
    views: dict[str, State] = {name: {} for name in slab.steps}
    for name, array, view in arrays_of(slab, arrays):
        if array.name != LO:
            key, shape = _as_torch(array, slab.layout.place(name).spec)
            views[name][key] = view.view(shape)
    return views


def _checked(name: str, state: State, shapes: dict[str, tuple[int, ...]] | None) -> State:
    if shapes is None:
        raise CheckpointError(
            f"the state dict has optimizer state for {name}, which the step does not train (or does not know yet: "
            "compile it with an example, or call step.prepare first)"
        )
    if state.keys() - {"step"} != shapes.keys():
        raise CheckpointError(
            f"the state dict has {', '.join(sorted(state))} for {name}; this optimizer has "
            f"{', '.join(shapes) or 'none'}"
        )
    for key, shape in shapes.items():
        if tuple(state[key].shape) != shape:
            raise CheckpointError(f"{key} of {name} has shape {tuple(state[key].shape)} in the state dict, not {shape}")
    # an optimizer that does not count (SGD) has a state once it has made a step
    return {"step": torch.tensor(1.0), **state}

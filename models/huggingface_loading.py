"""Building transformers models without weights, and how their weights come out of a checkpoint.

All of transformers that is private and that loading needs is here; tests/test_huggingface_loading.py fails when it
changes. What is done is what `from_pretrained` does, but from headers and a few tensors at a time:

- `build` makes the model on the meta device;
- `compute_buffers` gives buffers that no checkpoint holds their values, which are never cast (rotary `inv_freq`);
- `plan_recipes` finds out by transformers' own rules which stored tensors make which parameters. Checkpoints on the hub
  hold experts one by one, transformers' models hold them fused;
- `draw` makes the random weights of one module by the model's own rules.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, conversion_mapping, core_model_loading, initialization
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from oomc.errors import CheckpointError, UnsupportedError
from oomc.runtime.pool import physical_cores

Read = Callable[[str], torch.Tensor]
_DRAWN = 1 << 20  # elements drawn by one task
_LOADED = "_is_hf_initialized"  # transformers' mark on tensors and modules that its initialisation leaves alone


@dataclass(frozen=True)
class Merge:
    """A parameter [E, ...] whose rows are stored tensors, or stored tensors one after the other.

    Attributes:
        name: of the parameter.
        shape: its shape.
        dtype: that of the stored tensors.
        rows: for each row of the first dimension the keys whose elements follow one another in it.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Recipe:
    """How some parameters (or persistent buffers) are made of stored tensors.

    Attributes:
        keys: the stored tensors.
        shapes: the results' shapes, by name in the model.
        merge: set if the result is nothing but stored tensors side by side; it can then be read in place.
    """

    keys: tuple[str, ...]
    shapes: Mapping[str, torch.Size]
    convert: Callable[[nn.Module, Read], dict[str, torch.Tensor]]
    """The results by name, from the model and a function that reads a key."""
    merge: Merge | None = None


def build(config: Any, dtype: torch.dtype, auto_class: Any, trust_remote_code: bool) -> nn.Module:
    """The model of `config` on the meta device, tied, with the dtypes that `from_pretrained(dtype=dtype)` gives it."""
    with torch.device("meta"):
        model: nn.Module = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # parts that a model keeps in fp32 (a router's bias, say)
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # type: ignore[operator]
    for name, tensor in model.state_dict(keep_vars=True).items():
        for pattern, kept in plan.items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)
    return model


def is_persistent(model: nn.Module, name: str) -> bool:
    """Whether buffer `name` is part of the state dict."""
    module, _, own = name.rpartition(".")
    return own not in model.get_submodule(module)._non_persistent_buffers_set


def set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put `value` in the place of buffer `name`."""
    module, _, own = name.rpartition(".")
    model.get_submodule(module)._buffers[own] = value


def take_over(model: nn.Module, directory: Path) -> None:
    """What else of a model directory `from_pretrained` keeps: its name, and how to generate."""
    model.config.name_or_path = str(directory)  # type: ignore[union-attr]
    if (directory / "generation_config.json").exists() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)


def ignored_keys(model: nn.Module, keys: Iterable[str]) -> set[str]:
    """Those of `keys` that a checkpoint of this model may have for nothing."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())  # type: ignore[arg-type]
    # buffers that checkpoints used to hold, as transformers knows them too
    patterns |= {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    return {key for key in keys if any(re.search(pattern, key) for pattern in patterns)}


# --- buffers and random weights --------------------------------------------------------------------------------------


def compute_buffers(model: nn.Module, names: Sequence[str]) -> None:
    """Give buffers `names`, which are on the meta device, the values that the model's initialisation computes.

    Raises:
        UnsupportedError: the initialisation leaves a buffer, or a tensor that is not even a buffer, without a value.
    """
    buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
    values: list[dict[str, torch.Tensor]] = []
    for fill in (0, 1):  # what is computed does not depend on what was there before
        values.append({n: torch.full_like(buffers[n], fill, device="cpu") for n in names})
        for name, value in values[-1].items():
            set_buffer(model, name, value)
        _initialise(model, set(names))
    unset = [n for n in names if not torch.equal(_bits(values[0][n]), _bits(values[1][n]))]
    unset += [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.device.type == "meta"
    ]
    if unset:
        raise UnsupportedError(
            f"{type(model).__name__} computes {unset[0]} when it is built and nowhere else, so that a model built "
            "without memory has no value for it; load the model with from_pretrained and compile that"
        )


def draw(model: nn.Module, module_name: str, seed: int) -> dict[str, torch.Tensor]:
    """Random values of a module's own parameters, by their names in the model, by the model's own rules.

    They depend on the seed, the module's name and its shapes, not on what else was drawn. They are not the values that
    `from_config` draws from the same seed, which come from one stream of numbers in the order of its modules.

    Raises:
        UnsupportedError: neither the model nor the module sets one of the parameters.
    """
    module = model.get_submodule(module_name)
    own = {name: param for name, param in module._parameters.items() if param is not None}
    real = {name: nn.Parameter(torch.full_like(param, torch.nan, device="cpu")) for name, param in own.items()}
    module._parameters.update(real)
    parents = module_name.split(".")
    chain = {".".join(parents[:count]) for count in range(len(parents) + 1)}

    def unset_after_initialising() -> list[str]:
        digest = hashlib.sha256(f"{seed} {module_name}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:4], "big"))
        _initialise(model, {f"{module_name}.{name}".lstrip(".") for name in own}, chain)
        return [name for name, param in real.items() if not param.sum(dtype=torch.float32).isfinite()]

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _parallel_normals():
            unset = unset_after_initialising()
            if unset and hasattr(module, "reset_parameters"):
                # left to torch's own initialisation, as it is when the module is built
                module.reset_parameters()  # type: ignore[operator]
                unset = unset_after_initialising()
    finally:
        module._parameters.update(own)
    if unset:
        raise UnsupportedError(
            f"{type(model).__name__} has no initialisation for parameter {module_name}.{unset[0]}; build the model "
            "yourself and compile that"
        )
    return {f"{module_name}.{name}".lstrip("."): param.detach() for name, param in real.items()}


def _initialise(model: nn.Module, tensors: set[str], modules: set[str] | None = None) -> None:
    """Run the model's initialisation, which looks at `modules` (None: all) and sets `tensors` and nothing else."""
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        setattr(tensor, _LOADED, name not in tensors)
    for name, module in model.named_modules():
        module.__dict__[_LOADED] = modules is not None and name not in modules
    model.initialize_weights()  # type: ignore[operator]


@contextmanager
def _parallel_normals() -> Iterator[None]:
    """Within, transformers' initialisation draws normal numbers with all cores; torch's own draw is serial."""
    functions = initialization.TORCH_INIT_FUNCTIONS
    torchs = functions["normal_"]
    with ThreadPoolExecutor(physical_cores()) as threads:

        def normal_(
            tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
        ) -> torch.Tensor:
            if not tensor.is_contiguous() or generator is not None:
                return torchs(tensor, mean, std, generator)
            parts = tensor.detach().view(-1).split(_DRAWN)
            seeds = torch.randint(1 << 32, (len(parts),)).tolist()
            list(threads.map(lambda part, seed: _draw_normal(part, mean, std, seed), parts, seeds))
            return tensor

        functions["normal_"] = normal_
        try:
            yield
        finally:
            functions["normal_"] = torchs


def _draw_normal(part: torch.Tensor, mean: float, std: float, seed: int) -> None:
    # in fp32, since torch draws bf16 several times slower
    part.copy_(torch.empty(part.numel()).normal_(mean, std, generator=torch.Generator().manual_seed(seed)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def plan_recipes(model: nn.Module, stored: Mapping[str, torch.Tensor]) -> tuple[list[Recipe], list[str]]:
    """What is made of a checkpoint's tensors, and the keys that nothing is made of.

    Afterwards `model.save_pretrained` writes keys in the style of this checkpoint, as after `from_pretrained`.

    Args:
        model: on the meta device.
        stored: a meta tensor of the stored shape and dtype for each key.

    Raises:
        CheckpointError: stored tensors do not fit together, or some of a list are missing.
    """
    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    names = model.state_dict()
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    plain: dict[str, str] = {}
    converted: dict[str, list[tuple[str, str]]] = {}
    unused: list[str] = []
    for key in sorted(stored, key=core_model_loading.dot_natural_key):
        name, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = core_model_loading.rename_source_key(key, [], [], prefix, names)
        if name not in names or (pattern is None and name in plain):
            unused.append(key)
        elif pattern is None:
            plain[name] = key
        else:
            converted.setdefault(name, []).append((pattern, key))
    recipes = [_rename(name, key, stored[key].shape) for name, key in plain.items()]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    for name, sources in converted.items():
        recipes.append(_convert(model, name, sources, by_pattern[sources[0][0]], stored))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]  # type: ignore[assignment]
    return recipes, unused


def _rename(name: str, key: str, shape: torch.Size) -> Recipe:
    return Recipe((key,), {name: shape}, lambda _, read: {name: read(key)})


def _convert(
    model: nn.Module, name: str, sources: Sequence[tuple[str, str]], rule: Any, stored: Mapping[str, torch.Tensor]
) -> Recipe:
    def convert(model: nn.Module, read: Read) -> dict[str, torch.Tensor]:
        fresh = copy.deepcopy(rule)
        for pattern, key in sources:
            fresh.add_tensor(name, key, pattern, lambda key=key: read(key))
        made = fresh.convert(name, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    keys = tuple(key for _, key in sources)
    columns = [column for p in rule.source_patterns if (column := [key for pattern, key in sources if pattern == p])]
    if isinstance(rule.operations[0], MergeModulelist):
        for column in columns:
            _check_numbers(column)
    try:
        made = convert(model, stored.__getitem__)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{name} cannot be made of {keys[0]} and {len(keys) - 1} more stored tensors, some missing perhaps: {error}"
        ) from error
    shapes = {target: value.shape for target, value in made.items()}
    merges = _is_merge(rule.operations, len(columns)) and len({stored[key].dtype for key in keys}) == 1
    (target, value), *_ = made.items()
    merge = Merge(target, value.shape, value.dtype, tuple(zip(*columns, strict=True))) if merges else None
    return Recipe(keys, shapes, convert, merge)


def _is_merge(operations: Sequence[Any], lists: int) -> bool:
    """Whether `operations` stack lists of tensors and do no more than join the stacks row by row."""
    if type(operations[0]) is not MergeModulelist or operations[0].dim != 0:
        return False
    if len(operations) == 1:
        return lists == 1
    return len(operations) == 2 and type(operations[1]) is Concatenate and operations[1].dim == 1


def _check_numbers(keys: Sequence[str]) -> None:
    """Make sure that the keys of a list, if they differ in one number, count from 0 without a gap."""
    columns = [column for column in zip(*(key.split(".") for key in keys)) if len(set(column)) > 1]
    if len(columns) == 1 and all(part.isdigit() for part in columns[0]):
        numbers = {int(part) for part in columns[0]}
        gaps = sorted(set(range(max(numbers))) - numbers)
        if gaps:
            raise CheckpointError(f"number {gaps[0]} is missing in the checkpoint beside {keys[0]} ({len(gaps)} gaps)")


def place_merge(merge: Merge, stored: Mapping[str, int]) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """Memory for a merged parameter, and the part of it, contiguous, that each stored tensor fills.

    Args:
        merge: what is merged.
        stored: number of elements by key.
    """
    out = torch.empty(merge.shape, dtype=merge.dtype)
    parts = []
    for row, keys in zip(out.view(merge.shape[0], -1), merge.rows, strict=True):
        ends = list(accumulate(stored[key] for key in keys))
        assert ends[-1] == row.numel(), merge.name
        parts += [(key, row[end - stored[key] : end]) for key, end in zip(keys, ends, strict=True)]
    return out, parts

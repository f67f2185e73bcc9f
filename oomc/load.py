"""Models whose weights stay where they are until a step takes them, block by block.

    model = oomc.load("path/to/model")                  # on the meta device: no memory
    step = oomc.compile(model, budget=..., optimizer=torch.optim.AdamW(model.parameters()))

A loaded model's parameters are on the meta device; its buffers are real. `weights_of` says where the parameters' values
come from, for whoever has memory for them: the files of a checkpoint, or random numbers where the model was made from a
config. `materialize` puts them in place.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from oomc.errors import CheckpointError, UnsupportedError
from oomc.shards import Entry, Shards

if TYPE_CHECKING:
    from oomc.models.huggingface_loading import Recipe


class WeightSource(ABC):
    """Where the values of a model's parameters come from."""

    def __init__(self, model: nn.Module) -> None:
        self._weak_model = weakref.ref(model)  # the model keeps its source, not the other way round

    @property
    def _model(self) -> nn.Module:
        model = self._weak_model()
        if model is None:
            raise ReferenceError("the model whose weights these are is gone")
        return model

    @abstractmethod
    def shape(self, name: str) -> torch.Size | None:
        """The shape of what `read` gives for `name`; None if it has nothing for it."""

    @abstractmethod
    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The values of parameters or persistent buffers, in the order of `names`.

        Each value is a new CPU tensor of the parameter's shape, in the precision in which it is stored. What is held at
        a time is the value that is being made and what the caller keeps of those before (a `for` variable keeps one);
        neighbours in `names` that come from one stored tensor or one module are made together. A conversion that is
        more than putting stored tensors side by side holds its result about twice.

        Args:
            names: of parameters or persistent buffers, as in the model's `state_dict()`; any name of a tied parameter.

        Raises:
            KeyError: there is nothing for a name; `check` tells before.
            CheckpointError: a file has been cut short since its header was read.
        """

    def check(self, model: nn.Module) -> None:
        """Make sure that there is a value of the right shape for all of `model` that is on the meta device.

        Nothing is read for it and nothing allocated.

        Raises:
            CheckpointError: parameters or persistent buffers are missing, or have another shape.
        """
        wanted = {n: t.shape for n, t in model.state_dict().items() if isinstance(t, torch.Tensor) and t.is_meta}
        missing = [name for name in wanted if self.shape(name) is None]
        if missing:
            raise CheckpointError(f"{self} lacks {_some(missing)} of {type(model).__name__}")
        other = [name for name, shape in wanted.items() if self.shape(name) != shape]
        if other:
            name = other[0]
            raise CheckpointError(
                f"{self} has shapes that are not those of {type(model).__name__}: {_some(other)}; {name} is "
                f"{_shape(self.shape(name))} there and {_shape(wanted[name])} in the model. Does config.json belong to "
                "these weights?"
            )


_SOURCES: weakref.WeakKeyDictionary[nn.Module, WeightSource] = weakref.WeakKeyDictionary()


class Checkpoint(WeightSource):
    """The weights in a model directory's safetensors files.

    Args:
        model: on the meta device.
        directory: where the files are.
        shards: the files.
        allow_unexpected: warn about stored tensors that the model has no place for instead of raising.

    Raises:
        CheckpointError: the model and the files do not fit together.
    """

    def __init__(self, model: nn.Module, directory: Path, shards: Shards, allow_unexpected: bool = False) -> None:
        from oomc.models import huggingface_loading

        super().__init__(model)
        self._directory = directory
        self._shards = shards
        stored = {k: torch.empty(e.shape, dtype=e.dtype, device="meta") for k, e in shards.entries.items()}
        recipes, unused = huggingface_loading.plan_recipes(model, stored)
        self._recipes: dict[str, Recipe] = {name: recipe for recipe in recipes for name in recipe.shapes}
        self._origin = {name: name for name in self._recipes}
        self._tie(model)
        unexpected = sorted(set(unused) - huggingface_loading.ignored_keys(model, unused))
        unexpected += sorted(set(self._recipes) - set(model.state_dict()))
        if unexpected:
            message = f"{self} has {_some(unexpected)}, for which {type(model).__name__} has no place"
            if not allow_unexpected:
                raise CheckpointError(f"{message}; allow_unexpected=True leaves them out")
            warnings.warn(message, stacklevel=3)
        self.check(model)

    def __str__(self) -> str:
        return str(self._directory)

    def shape(self, name: str) -> torch.Size | None:
        origin = self._origin.get(name)
        return None if origin is None else self._recipes[origin].shapes[origin]

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for _, group in groupby(names, key=lambda name: id(self._recipes[self._origin[name]])):
            wanted = list(group)
            made = self._make(self._recipes[self._origin[wanted[0]]])
            while wanted:
                name = wanted.pop(0)
                origin = self._origin[name]
                again = any(self._origin[other] == origin for other in wanted)
                yield name, made[origin] if again else made.pop(origin)
            made.clear()

    def _make(self, recipe: Recipe) -> dict[str, torch.Tensor]:
        from oomc.models import huggingface_loading

        if recipe.merge is None:
            return recipe.convert(self._model, self._shards.read)
        sizes = {key: self._shards.entries[key].elements for key in recipe.keys}
        value, parts = huggingface_loading.place_merge(recipe.merge, sizes)
        self._shards.read_into(parts)
        return {recipe.merge.name: value}

    def _tie(self, model: nn.Module) -> None:
        """Let a tied parameter have its value by any of its names; if several are stored they have to be the same."""
        groups: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(param), []).append(name)
        for names in groups.values():
            stored = [name for name in names if name in self._recipes]
            for other in stored[1:]:
                (_, a), (_, b) = self.read([stored[0], other])
                if a.dtype != b.dtype or not torch.equal(a, b):
                    raise CheckpointError(
                        f"{self} has different values for {stored[0]} and {other}, which the model's config ties; set "
                        "tie_word_embeddings to false in config.json"
                    )
            self._origin.update(dict.fromkeys(names, stored[0]) if stored else {})


class RandomWeights(WeightSource):
    """Random weights by the model's own rules; what a module gets depends on the seed and its name only.

    Args:
        model: on the meta device.
        seed: any integer.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        super().__init__(model)
        self._seed = seed

    def __str__(self) -> str:
        return "the random initialisation"

    def shape(self, name: str) -> torch.Size | None:
        try:
            return self._model.get_parameter(name).shape
        except AttributeError:
            return None

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from oomc.models import huggingface_loading

        first = {id(p): n for n, p in self._model.named_parameters()}
        origin = {n: first[id(p)] for n, p in self._model.named_parameters(remove_duplicate=False)}
        for module, group in groupby(names, key=lambda name: origin[name].rpartition(".")[0]):
            made = huggingface_loading.draw(self._model, module, self._seed)
            for name in group:
                yield name, made[origin[name]]
            made.clear()


def load(
    path_or_config: Any,
    *,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    allow_unexpected: bool = False,
    auto_class: Any = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A Hugging Face model whose parameters take no memory until a step takes them.

    The model is in training mode, its parameters are on the meta device (so it cannot be called before it is compiled),
    its buffers are real and as `from_pretrained` has them. `oomc.compile` gets the parameters' values block by block:
    from the safetensors files of a directory, exactly as `from_pretrained` would; of a config, by the model's own
    random initialisation, which is reproducible from `seed` but does not draw the numbers that `from_config` draws from
    it. Nothing is downloaded.

    Args:
        path_or_config: a local model directory, or a transformers config.
        dtype: dtype of the model, or its name. None or "auto": the config's, else that of the stored weights, else
            fp32. Weights that are stored in fp32 are the exact masters of a bf16 model.
        seed: of the random weights.
        allow_unexpected: warn about stored tensors that the model has no place for instead of raising.
        auto_class: transformers' class to make the model with; None for AutoModelForCausalLM.
        trust_remote_code: as in transformers.

    Raises:
        CheckpointError: there is no such directory, files are missing or damaged, or they do not fit the model.
        UnsupportedError: the weights are quantized or no safetensors, or the model cannot be built without memory.
        ImportError: transformers is not installed.
    """
    import transformers

    from oomc.models import huggingface_loading

    directory = None
    if isinstance(path_or_config, str | Path):
        directory = Path(path_or_config)
        if not directory.is_dir():
            raise CheckpointError(
                f"{path_or_config} is not a directory; oomc.load downloads nothing, so fetch the model first, for "
                f"example with: hf download {path_or_config} --local-dir DIRECTORY"
            )
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    else:
        config = copy.deepcopy(path_or_config)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{directory or type(config).__name__} is quantized; full-parameter training needs bf16 or fp32 weights. "
            "Save it dequantized first"
        )
    shards = None if directory is None else Shards.of(directory)
    chosen = _dtype(dtype, config, () if shards is None else shards.entries.values())
    model = huggingface_loading.build(
        config, chosen, auto_class or transformers.AutoModelForCausalLM, trust_remote_code
    )
    buffers = dict(model.named_buffers())
    source: WeightSource
    if directory is None or shards is None:
        source, stored = RandomWeights(model, seed), []
    else:
        source = Checkpoint(model, directory, shards, allow_unexpected)
        stored = [name for name in buffers if huggingface_loading.is_persistent(model, name)]
        huggingface_loading.take_over(model, directory)
    huggingface_loading.compute_buffers(model, [name for name in buffers if name not in stored])
    for name, value in source.read(stored):
        huggingface_loading.set_buffer(model, name, value.to(buffers[name].dtype))
    _SOURCES[model] = source
    return model.train()


def weights_of(model: nn.Module) -> WeightSource | None:
    """Where the weights of a model from `load` come from; None for any other model."""
    return _SOURCES.get(model)


def materialize(param: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter on the meta device `data`; it stays the same object, with its flags and attributes.

    Args:
        param: on the meta device; it may be held by modules, by an optimizer and by other names.
        data: of its shape, on any device; the parameter aliases it.
    """
    assert param.is_meta and param.shape == data.shape, (param.shape, data.shape)
    real = nn.Parameter(data, requires_grad=param.requires_grad)
    vars(real).update(vars(param))
    torch.utils.swap_tensors(param, real)  # `param.data = data` is refused across these devices


def _dtype(dtype: torch.dtype | str | None, config: Any, entries: Iterable[Entry]) -> torch.dtype:
    if dtype is None or dtype == "auto":
        stored = next((entry.dtype for entry in entries if entry.dtype.is_floating_point), torch.float32)
        return config.dtype or stored
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype; write bfloat16 or float32, for example")
    return found


def _shape(shape: torch.Size | None) -> str:
    return "x".join(map(str, shape or ())) or "scalar"


def _some(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")

"""Hooks that make a transformers model speak oomc's operators while it is captured.

transformers looks up attention, attention masks and experts by a name in the config. `hooks(model)` registers oomc's
own functions under the name "oomc", points the model's configs (and all their sub-configs) at it, and puts everything
back afterwards. Nothing here knows the name of a model: whatever uses the interfaces works.

A mask function returns a `Mask`, a few words about who sees whom, in place of a tensor; the attention function turns it
into the arguments of `oomc::attention`. A mask that these words cannot express (chunked attention, bidirectional
blocks, a mask function of the model's own) is refused instead of dropped.

Padding (a 2-D `attention_mask`) becomes a segment of its own: real tokens see real tokens, padding sees padding. So
real tokens are computed as in eager; what is computed at padded positions differs from eager, where it has no meaning
either: labels there must be -100. Packed rows (`position_ids` that restart, no `attention_mask`) become one segment a
document, as transformers finds them where it keeps no cache.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomc.attention import attention as attention_op
from oomc.delta_rule import gated_delta_rule
from oomc.errors import UnsupportedError
from oomc.experts import grouped_bias, grouped_mm, moe_forward

NAME = "oomc"
_CONFIG_FIELDS = ("_attn_implementation_internal", "_experts_implementation_internal", "use_cache")
_DELTA_RULE = ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")


@dataclass(frozen=True)
class Mask:
    """Who sees whom.

    Attributes:
        causal: queries see no later keys.
        window: number of visible keys with the query's own, or None.
        segments: integers [B, T]; a query sees the keys of its own segment only. None: one segment.
    """

    causal: bool
    window: int | None = None
    segments: Tensor | None = None


@dataclass
class _Call:
    """What is known of the model call under way."""

    packed: bool = False


# --- masks and attention ---------------------------------------------------------------------------------------------


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The elementary mask functions that `function` is the intersection of: name and closed-over values."""
    name = getattr(function, "__qualname__", repr(function)).split(".")[0]
    values = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        # Within a document positions differ as indices do, so that the inner mask means the same on indices.
        yield from _parts(values["mask_function"])
    else:
        yield name, values


def _make_mask(call: _Call, mask_function: Callable[..., Any], attention_mask: Tensor | None) -> Mask:
    causal, window, packed = False, None, None
    for name, values in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = values["sliding_window"]
        elif name == "packed_sequence_mask_function":
            packed = values["packed_sequence_mask"]
        elif name != "bidirectional_mask_function":
            raise UnsupportedError(
                f"this model masks attention with transformers' `{name}`; oomc supports causal and sliding-window "
                "masks, padding and packed rows"
            )
    if attention_mask is not None:
        return Mask(causal, window, attention_mask.to(torch.bool).to(torch.int64))
    if call.packed and packed is None:
        raise UnsupportedError(
            "this model's code makes its attention masks without looking at position_ids: documents packed into "
            "one row would see each other; pass one document a row, without position_ids"
        )
    # Under tracing transformers always reports segments; they are real only if the caller gave positions.
    return Mask(causal, window, packed if call.packed else None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: heads first in ([B, H, S, D]), rows first out ([B, S, H, Dv])."""
    where = type(module).__name__
    if isinstance(attention_mask, Tensor):
        raise UnsupportedError(f"{where} is given a {attention_mask.dim()}-D attention mask; pass a 2-D padding mask")
    if dropout:
        raise UnsupportedError(f"{where} uses attention dropout {dropout}; set the config's attention_dropout to 0")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError(f"{where} adds a position bias to attention scores, which oomc::attention cannot")
    mask = attention_mask
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = Mask(causal and query.shape[2] != 1, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out, _ = attention_op(
        query, key, value, s_aux, mask.segments, scale, mask.causal, mask.window, float(softcap or 0.0)
    )
    return out.transpose(1, 2), None


# --- experts ---------------------------------------------------------------------------------------------------------


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: hidden [T, D], index and weights [T, k], result [T, D]."""
    if getattr(self, "_is_expert_parallel", False):
        raise UnsupportedError(f"{type(self).__name__} is set up for transformers' own expert parallelism")

    def linear(x: Tensor, name: str, offsets: Tensor) -> Tensor:
        weight = getattr(self, name)
        y: Tensor = grouped_mm(x, weight if self.is_transposed else weight.transpose(1, 2), offsets)
        if self.has_bias:
            y = grouped_bias(y, getattr(self, f"{name}_bias"), offsets)
        return y

    def run(slots: Tensor, offsets: Tensor) -> Tensor:
        up = linear(slots, "gate_up_proj" if self.has_gate else "up_proj", offsets)
        y = linear(self._apply_gate(up) if self.has_gate else self.act_fn(up), "down_proj", offsets)
        return self.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y

    return moe_forward(hidden_states, top_k_index, top_k_weights, run, self.down_proj.shape[0]).to(hidden_states.dtype)


def find_eager_expert_loops(model: nn.Module) -> list[str]:
    """Names of modules whose forward loops over experts that data selects; such a loop cannot be traced.

    Found in the source of a module's own forward: a `for` loop together with `nonzero`, one-argument `where`, `tolist`
    or `unique`. Modules that go through transformers' experts interface do not count, since the interface replaces it.
    """
    verdicts: dict[type, bool] = {}
    found = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in verdicts:
            verdicts[kind] = not hasattr(module, "_apply_gate") and _loops_over_data(kind)
        if verdicts[kind]:
            found.append(name)
    return found


def _loops_over_data(kind: type) -> bool:
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    if forward.__module__.startswith("torch."):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    nodes = list(ast.walk(tree))
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    by_data = any(
        c.func.attr in ("nonzero", "tolist", "unique") or (c.func.attr == "where" and len(c.args) == 1)  # type: ignore[attr-defined]
        for c in calls
    )
    return by_data and any(isinstance(n, ast.For) for n in nodes)


# --- linear attention ------------------------------------------------------------------------------------------------


def _delta_rule(call: _Call) -> Callable[..., tuple[Tensor, None]]:
    """A function with the signature of transformers' torch_chunk_gated_delta_rule."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if call.packed or kwargs.get("cu_seqlens") is not None:
            raise UnsupportedError(
                "this model has linear attention, whose state would run on from one packed document into the next; "
                "pass one document a row, without position_ids"
            )
        if initial_state is not None or output_final_state:
            raise UnsupportedError("linear attention with a cache is not part of a training step; pass use_cache=False")
        out, *_ = gated_delta_rule(query, key, value, g, beta, None, chunk_size, use_qk_l2norm_in_kernel)
        return out, None

    return rule


# --- installing and removing -----------------------------------------------------------------------------------------


def _configs(model: nn.Module) -> list[Any]:
    """Every config that a module of `model` holds or that such a config contains, parents first."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation"):
            return
        found[id(config)] = config
        for key in getattr(config, "sub_configs", {}):
            visit(getattr(config, key, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(found.values())


def _register(interface: Any, function: Callable[..., Any], stack: ExitStack) -> None:
    """Register under our name. The mask interface is asked for its class-wide mapping, so that is where it goes."""
    interface.register(NAME, function)
    stack.callback(interface._global_mapping.pop, NAME)


@contextmanager
def hooks(model: nn.Module) -> Iterator[None]:
    """Within this context `model` computes with oomc's operators; afterwards it is as before, also after an exception.

    A model without transformers configs is left alone. Not reentrant.
    """
    configs = _configs(model)
    if not configs:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    call = _Call()

    def see_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        inner = given.get("kwargs", {})
        call.packed |= given.get("position_ids", inner.get("position_ids")) is not None

    def mask(mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **_: Any) -> Mask:
        return _make_mask(call, mask_function, attention_mask)

    with ExitStack() as stack:
        _register(ALL_ATTENTION_FUNCTIONS, _attention, stack)
        _register(ALL_MASK_ATTENTION_FUNCTIONS, mask, stack)
        _register(ALL_EXPERTS_FUNCTIONS, _experts, stack)
        for config in configs:
            for name in _CONFIG_FIELDS:
                if name in vars(config):
                    stack.callback(vars(config).__setitem__, name, vars(config)[name])
        for config in configs:
            config._attn_implementation = NAME
            config._experts_implementation = NAME
            if "use_cache" in vars(config):
                vars(config)["use_cache"] = False  # a training step takes no cache
        rule = _delta_rule(call)
        owners = {id(sys.modules[type(m).__module__]): sys.modules[type(m).__module__] for m in model.modules()}
        for owner in [*owners.values(), *model.modules()]:
            for name in _DELTA_RULE:
                if callable(vars(owner).get(name)):
                    stack.callback(setattr, owner, name, vars(owner)[name])
                    setattr(owner, name, rule)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                handle = module.register_forward_pre_hook(see_positions, with_kwargs=True)
                stack.callback(handle.remove)
        yield

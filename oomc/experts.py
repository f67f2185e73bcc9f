"""The canonical form of a mixture-of-experts layer: route, dispatch, grouped GEMMs with the model's own gate, combine.

    order, inverse, offsets = oomc::route(expert_index, E)        # sort the T * k pairs of token and expert by expert
    slots = oomc::dispatch(x, order, inverse, k)                  # [T, D] -> [N, D], N = T * k, in expert order
    up = oomc::grouped_mm(slots, w_up, offsets)                   # one GEMM an expert
    ...                                                           # the model's own gate, ordinary ATen, slot by slot
    y = oomc::grouped_mm(hidden, w_down, offsets)
    out = oomc::combine(y, weights, order, inverse)               # [N, D] -> [T, D]

A slot is a position in expert order: `order[slot] = t * k + j`, `inverse[t * k + j] = slot`, and expert e owns slots
`offsets[e - 1]:offsets[e]`. Sums over the k slots of a token run in a fixed order and in fp32 (fp64 for fp64).

A group of experts is a layer of its own, whose results are added up (passes/split_experts.py):

    order, inverse, offsets = oomc::route(expert_index, n, first) # experts [first, first + n); others' slots come last
    slots = oomc::dispatch(x, order, inverse, k, offsets)
    ...
    out = oomc::combine(y, weights, order, inverse, offsets)      # the group's share of [T, D], in fp32

Slots from `offsets[-1]` on are no slots of the group. What is computed there may be anything, NaN too: no gradient of a
weight reads it, and combine and dispatch's backward leave it out.

All bodies serve the CPU and CUDA. A faster kernel for one device is added with `torch.library.register_kernel` for that
device and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from oomc import target
from oomc.opdef import define, wide
from oomc.private import FakeTensor

ROWS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the rows that the kernels of oomc.expert_kernels move."""


def _by_kernel(*rows: Tensor) -> bool:
    """Whether one kernel moves these rows: on CUDA, where a fake runs none and takes the memory of its results."""
    return all(target.kind(x.device) == "cuda" and x.dtype in ROWS and x.stride(1) == 1 for x in rows)


def _kernels(like: Tensor) -> Any:
    """oomc.expert_kernels, which needs Triton; None where only memory counts."""
    if isinstance(like, FakeTensor):
        return None
    from oomc import expert_kernels

    return expert_kernels


# --- route -----------------------------------------------------------------------------------------------------------


def _route(expert_index: Tensor, num_experts: int, first: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """order [N] int64, inverse [N] int64, offsets [E] int32 from expert_index [T, k]; stable, so tokens keep order.

    Of the experts `[first, first + num_experts)`, from 0 on if there is no `first`. Pairs with any other expert come
    after the last offset, as those with the null experts of a router that chooses among more than there are.
    """
    pairs = expert_index.flatten() - (first or 0)
    pairs = pairs.clamp(-1, num_experts).remainder(num_experts + 1)  # what is no expert here is the last number
    # a radix sort takes a pass over each byte of what it sorts: of int64, eight
    few = torch.uint8 if num_experts < 256 else torch.int16 if num_experts < 1 << 15 else torch.int64
    experts, order = torch.sort(pairs.to(few), stable=True)
    slot = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, slot)
    # Counting by search, since bincount has a size that depends on data.
    ids = torch.arange(num_experts, device=order.device, dtype=few)
    offsets = torch.searchsorted(experts, ids, right=True, out_int32=True)
    return order, inverse, offsets


def _route_fake(expert_index: Tensor, num_experts: int, first: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    order = expert_index.new_empty(expert_index.numel(), dtype=torch.int64)
    return order, torch.empty_like(order), order.new_empty(num_experts, dtype=torch.int32)


route = define(
    "route",
    "(Tensor expert_index, int num_experts, int? first=None) -> (Tensor, Tensor, Tensor)",
    _route,
    _route_fake,
    traceable=True,
)


def _leave_out(rows: Tensor, slots: Tensor, own: Tensor | None) -> Tensor:
    """`rows`, one for each of `slots`, with zeros for slots past the last offset of `own`; writes to them."""
    return rows if own is None else rows.masked_fill_((slots >= own[-1])[:, None], 0)


def place_(whole: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [n, D] to those of `whole` [N, D], contiguous, that `slots` [n] names, each once."""
    if _by_kernel(whole, rows) and (kernels := _kernels(whole)):
        kernels.place(whole, slots, rows)
    else:
        whole.index_copy_(0, slots, rows)


# --- dispatch --------------------------------------------------------------------------------------------------------


def _dispatch(x: Tensor, order: Tensor, inverse: Tensor, k: int, own: Tensor | None = None) -> Tensor:
    """[N, D]: slot s holds row order[s] // k of x [T, D]."""
    return x.index_select(0, order // k)


def _dispatch_fake(x: Tensor, order: Tensor, inverse: Tensor, k: int, own: Tensor | None = None) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


def _dispatch_backward(dy: Tensor, inverse: Tensor, k: int, own: Tensor | None = None) -> Tensor:
    """[T, D]: the sum over the k slots of each token of dy [N, D]; with `own`, over those below its last offset."""
    if _by_kernel(dy):
        kernels = _kernels(dy)
        return kernels.dispatch_backward(dy, inverse, k, own) if kernels else _dispatch_backward_fake(dy, inverse, k)
    slots = inverse.view(-1, k)
    total = _leave_out(dy.index_select(0, slots[:, 0]), slots[:, 0], own).to(wide(dy.dtype))
    for j in range(1, k):
        total += _leave_out(dy.index_select(0, slots[:, j]), slots[:, j], own)
    return total.to(dy.dtype)


def _dispatch_backward_fake(dy: Tensor, inverse: Tensor, k: int, own: Tensor | None = None) -> Tensor:
    return dy.new_empty(inverse.shape[0] // k, dy.shape[1])


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, inverse, ctx.k, own = inputs
    ctx.save_for_backward(inverse, own)


def _dispatch_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    inverse, own = ctx.saved_tensors
    return dispatch_backward(dy, inverse, ctx.k, own), None, None, None, None


dispatch_backward = define(
    "dispatch_backward",
    "(Tensor dy, Tensor inverse, int k, Tensor? own=None) -> Tensor",
    _dispatch_backward,
    _dispatch_backward_fake,
    traceable=True,
)
dispatch = define(
    "dispatch",
    "(Tensor x, Tensor order, Tensor inverse, int k, Tensor? own=None) -> Tensor",
    _dispatch,
    _dispatch_fake,
    traceable=True,
    setup_context=_dispatch_setup,
    backward=_dispatch_gradient,
)

# --- combine ---------------------------------------------------------------------------------------------------------


def _combine(y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, own: Tensor | None = None) -> Tensor:
    """[T, D] in y's dtype: sum over j of weights[t, j] * y[inverse[t * k + j]].

    With `own`, over the slots below its last offset only, and in fp32, since it is one of several sums to be added.
    """
    if _by_kernel(y):
        kernels = _kernels(y)
        return kernels.combine(y, weights, inverse, own) if kernels else _combine_fake(y, weights, order, inverse, own)
    slots, dtype = inverse.view(weights.shape), wide(y.dtype)
    total = y.new_zeros((weights.shape[0], y.shape[1]), dtype=dtype)
    for j in range(weights.shape[1]):
        rows = _leave_out(y.index_select(0, slots[:, j]), slots[:, j], own)
        total.addcmul_(rows.to(dtype), weights[:, j, None].to(dtype))
    return total if own is not None else total.to(y.dtype)


def _combine_fake(y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, own: Tensor | None = None) -> Tensor:
    return y.new_empty(weights.shape[0], y.shape[1], dtype=y.dtype if own is None else wide(y.dtype))


def _combine_backward(
    dout: Tensor, y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy [N, D] and dweights [T, k] from dout [T, D]."""
    if _by_kernel(dout, y):
        kernels = _kernels(y)
        if kernels:
            return kernels.combine_backward(dout, y, weights, inverse, own)
        return _combine_backward_fake(dout, y, weights, order, inverse)
    slots, dtype = inverse.view(weights.shape), wide(y.dtype)
    dy = y.new_empty(y.shape)
    dweights = weights.new_empty(weights.shape)
    dout = dout.to(dtype)
    for j in range(weights.shape[1]):
        rows = _leave_out(y.index_select(0, slots[:, j]), slots[:, j], own)
        dweights[:, j] = rows.to(dtype).mul_(dout).sum(-1)
        dy.index_copy_(0, slots[:, j], (dout * weights[:, j, None].to(dtype)).to(dy.dtype))
    return dy, dweights


def _combine_backward_fake(
    dout: Tensor, y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _combine_setup(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dy, dweights = combine_backward(dout, *ctx.saved_tensors)
    return dy, dweights, None, None, None


combine_backward = define(
    "combine_backward",
    "(Tensor dout, Tensor y, Tensor weights, Tensor order, Tensor inverse, Tensor? own=None) -> (Tensor, Tensor)",
    _combine_backward,
    _combine_backward_fake,
    traceable=True,
)
combine = define(
    "combine",
    "(Tensor y, Tensor weights, Tensor order, Tensor inverse, Tensor? own=None) -> Tensor",
    _combine,
    _combine_fake,
    traceable=True,
    setup_context=_combine_setup,
    backward=_combine_gradient,
)

# --- grouped GEMM ----------------------------------------------------------------------------------------------------


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first slot, end slot). Reads the offsets: on CUDA this waits for the device."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        yield expert, start, end
        start = end


def _one_kernel(*tensors: Tensor) -> bool:
    """Whether torch's grouped kernel takes these: CUDA, bf16, one unit stride each, the others multiples of 16 bytes.

    The last size is a multiple of 16 bytes too: the kernel would pad the rows of its result otherwise.
    """
    return all(
        t.device.type == "cuda"
        and t.dtype == torch.bfloat16
        and t.numel() > 0
        and 1 in t.stride()[-2:]
        and sum(s % 8 != 0 for s in t.stride()) == 1
        and t.shape[-1] % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def _rows(x: Tensor) -> Tensor:
    """[N, D] with unit stride inside: an incoming gradient may be expanded or transposed."""
    return x if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """[N, F]: rows of expert e are x's rows times w[e]; rows past the last offset are zero."""
    x = _rows(x)
    if _one_kernel(x, w):
        return torch._grouped_mm(x, w, offs=offsets)
    out = x.new_empty(x.shape[0], w.shape[2])
    end = 0
    for expert, start, end in _groups(offsets):
        if end > start:
            torch.mm(x[start:end], w[expert], out=out[start:end])
    out[end:].zero_()
    return out


def _grouped_mm_fake(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def _grouped_mm_weight(x: Tensor, dy: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """[E, D, F]: x[group].T @ dy[group], zero for an expert without slots; laid out as [E, F, D] if `transposed`."""
    x, dy = _rows(x), _rows(dy)
    left, right = (dy, x) if transposed else (x, dy)
    if _one_kernel(left, right):
        out = torch._grouped_mm(left.t(), right, offs=offsets)
        # The kernel leaves the result of an empty group as it finds it.
        _kernels(out).clear_empty(out, offsets)
    else:
        out = x.new_empty(offsets.shape[0], left.shape[1], right.shape[1])
        for expert, start, end in _groups(offsets):
            if end > start:
                torch.mm(left[start:end].t(), right[start:end], out=out[expert])
            else:
                out[expert].zero_()
    return out.transpose(1, 2) if transposed else out


def _grouped_mm_weight_fake(x: Tensor, dy: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1]).transpose(1, 2)
    return x.new_empty(offsets.shape[0], x.shape[1], dy.shape[1])


def _grouped_mm_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    dx = grouped_mm(dy, w.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    # The gradient of a transposed view is laid out like the view, so that the parameter's own is contiguous.
    transposed = w.stride(1) == 1 and w.stride(2) != 1
    dw = grouped_mm_weight(x, dy, offsets, transposed) if ctx.needs_input_grad[1] else None
    return dx, dw, None


grouped_mm_weight = define(
    "grouped_mm_weight",
    "(Tensor x, Tensor dy, Tensor offsets, bool transposed) -> Tensor",
    _grouped_mm_weight,
    _grouped_mm_weight_fake,
    traceable=False,
)
grouped_mm = define(
    "grouped_mm",
    "(Tensor x, Tensor w, Tensor offsets) -> Tensor",
    _grouped_mm,
    _grouped_mm_fake,
    traceable=False,
    setup_context=_grouped_mm_setup,
    backward=_grouped_mm_gradient,
)

# --- bias of an expert -----------------------------------------------------------------------------------------------


def _grouped_bias(x: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """[N, F]: x plus the bias [E, F] of each slot's expert."""
    if target.kind(x.device) == "cuda":
        slot = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
        expert_of = torch.searchsorted(offsets, slot, right=True).clamp_(max=bias.shape[0] - 1)
        return bias.index_select(0, expert_of).add_(x)
    out = x.new_empty(x.shape)
    end = 0
    for expert, start, end in _groups(offsets):
        torch.add(x[start:end], bias[expert], out=out[start:end])
    out[end:].copy_(x[end:])
    return out


def _grouped_bias_fake(x: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _grouped_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """[E, F]: the sum of the rows of each expert, zero where there are none."""
    x = _rows(x)
    if _one_kernel(x):
        ones = x.new_ones(x.shape[0], 8)  # 8 columns make the 16 bytes that the kernel asks for
        return _grouped_mm_weight(ones, x, offsets, False)[:, 0].contiguous()
    out = x.new_empty(offsets.shape[0], x.shape[1])
    for expert, start, end in _groups(offsets):
        torch.sum(x[start:end], dim=0, out=out[expert])
    return out


def _grouped_sum_fake(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1])


def _grouped_bias_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _grouped_bias_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    return dy, grouped_sum(dy, offsets), None


grouped_sum = define(
    "grouped_sum", "(Tensor x, Tensor offsets) -> Tensor", _grouped_sum, _grouped_sum_fake, traceable=False
)
grouped_bias = define(
    "grouped_bias",
    "(Tensor x, Tensor bias, Tensor offsets) -> Tensor",
    _grouped_bias,
    _grouped_bias_fake,
    traceable=False,
    setup_context=_grouped_bias_setup,
    backward=_grouped_bias_gradient,
)

# --- a whole layer ---------------------------------------------------------------------------------------------------


def moe_forward(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: Callable[[Tensor, Tensor], Tensor],
    num_experts: int,
) -> Tensor:
    """A MoE layer in canonical form.

    Args:
        hidden: tokens [T, D].
        top_k_index: experts of each token [T, k], integers below num_experts.
        top_k_weights: their weights [T, k], any float dtype.
        experts: `experts(slots [N, D], offsets [E]) -> [N, D]`, all experts at once in slot order.
        num_experts: E.

    Returns:
        [T, D] in the dtype of what `experts` returns.
    """
    order, inverse, offsets = route(top_k_index, num_experts)
    slots = dispatch(hidden, order, inverse, top_k_index.shape[1])
    out: Tensor = combine(experts(slots, offsets), top_k_weights, order, inverse)
    return out

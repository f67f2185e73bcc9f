"""FLOPs and bytes of single operators, as sympy expressions in the symbolic sizes of their fake tensors.

    calls(aten.mm.default, (x, w), {}, y) -> [Call("gemm", "bf16", flops=2*B*S*D*F, bytes=..., size=...)]

Products and attention have formulas here. Everything else is bound by memory and costs the bytes that it reads and
writes; views cost nothing. An operator of ours without a formula costs what its body does, operator by operator, so
that there is no second description of it to keep true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from oomc import attention_kernels, ops, private, target
from oomc.attention_kernels import Order
from oomc.delta_rule import chunks_together
from oomc.worksets import dtype_name

Kind = Literal["gemm", "grouped", "attention", "attention_backward", "triton", "triton_backward", "tiled", "memory"]


@dataclass(frozen=True)
class Call:
    """One kernel, or several alike.

    Attributes:
        kind: which rate of the machine it has; `triton` is attention that no kernel of cuDNN or flash takes, `tiled`
            what our own does not take either.
        dtype: of what is multiplied.
        flops: multiplications and additions, each counted; 0 where only memory counts.
        bytes: read and written.
        size: what the rate depends on: FLOPs of one product, rows of a group, length of the sequence.
        launches: kernels.
    """

    kind: Kind
    dtype: str
    flops: Any
    bytes: Any
    size: Any = 0
    launches: Any = 1


CREATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
GATHERS = frozenset({"embedding", "index_select", "gather", "index", "take"})
"""Read only those rows of their first argument that come out."""
SCATTERS = frozenset({"index_copy", "index_add", "index_put", "scatter", "scatter_add", "scatter_reduce"})
"""Write only those rows of their first argument that go in, where they work in place."""
OVERWRITES = frozenset({"copy_", "zero_", "fill_", "masked_fill_zero_"})
SORTS = {"sort": 10, "argsort": 10, "topk": 4, "kthvalue": 4, "msort": 10}
"""Passes over memory: a radix sort of 64-bit keys with values makes 8 and a count (Merrill and Grimshaw 2011)."""
DELTA_KERNELS = {"gated_delta_rule": (45, 3), "gated_delta_rule_backward": (110, 5)}
"""Kernels that the delta rule's body launches for a group of chunks, which are about how often it passes over their
[C, D] tensors, and for each chunk of it."""


ONE_PASS = ("combine", "combine_backward", "dispatch_backward", "rms_norm", "rms_norm_backward")
"""What is several operators in plain torch, and one kernel on CUDA."""


def numel(x: torch.Tensor) -> Any:
    """Elements, as an expression; a dimension that is expanded counts once."""
    count: Any = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if not (isinstance(stride, int) and stride == 0):
            count = count * private.expression(size)
    return count


def nbytes(tree: Any) -> Any:
    """Bytes of all tensors in a tree, each counted once."""
    found = {id(x): x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)}
    return sum((numel(x) * x.element_size() for x in found.values()), 0)


def is_view(op: Any) -> bool:
    """Whether an operator hands out its input's memory."""
    returns = op._schema.returns if isinstance(op, OpOverload) else []
    return bool(returns) and returns[0].alias_info is not None and not op._schema.is_mutable


def calls(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Call]:
    """What an operator costs, given the (fake) values of its arguments and results."""
    name = op._opname
    if ops.is_oomc(op):
        return _own(op, name, args, kwargs, out)
    if is_view(op):
        copies = name == "reshape" and not args[0].is_contiguous()
        return [_memory(2 * nbytes(out))] if copies else []
    if name in CREATES or not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(out)):
        return []
    product = _product(name, args, out)
    if product:
        return product
    return [_memory(_traffic(name, args, kwargs, out), 3 if name in SORTS else 1)]


def _memory(count: Any, launches: Any = 1) -> Call:
    return Call("memory", "", 0, count, launches=launches)


def _traffic(name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Bytes that an operator without FLOPs to speak of reads and writes."""
    plain = name.rstrip("_")
    if plain in GATHERS:
        return 2 * nbytes(out) + nbytes(args[1:])
    if plain in SCATTERS and name.endswith("_"):
        return 2 * nbytes([args[1:], kwargs])
    if name in OVERWRITES:
        return nbytes([args[1:], kwargs]) + nbytes(out)
    if name == "embedding_dense_backward":
        return 3 * nbytes(args[0]) + nbytes(args[1]) + nbytes(out)
    return SORTS.get(name, 1) * nbytes([args, kwargs]) + nbytes(out)


def _size(x: torch.Tensor, dim: int) -> Any:
    return private.expression(x.shape[dim])


def _product(name: str, args: Sequence[Any], out: Any) -> list[Call]:
    """Dense products and convolutions; [] for anything else."""
    if name in ("mm", "bmm", "linear"):
        left = args[0]
        flops = 2 * numel(out) * _size(left, -1)
    elif name in ("addmm", "baddbmm"):
        left = args[1]
        flops = 2 * numel(out) * _size(left, -1)
    elif name == "convolution":
        left, weight = args[0], args[1]
        flops = 2 * numel(out) * numel(weight) / _size(weight, 0)
        if args[6]:  # transposed: the weight is [in, out / groups, ...]
            flops = 2 * numel(left) * numel(weight) / _size(weight, 0)
    elif name == "convolution_backward":
        dout, left, weight = args[:3]
        one = 2 * numel(left if args[7] else dout) * numel(weight) / _size(weight, 0)
        flops = one * sum(bool(wanted) for wanted in args[10][:2])
    else:
        return []
    return [Call("gemm", dtype_name(left.dtype), flops, nbytes([args, out]), size=flops)]


def _own(op: OpOverload, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Call]:
    if name == "grouped_mm":
        x, weight = args[0], args[1]
        return [_grouped(x, 2 * numel(x) * _size(weight, -1), _size(weight, 0), nbytes([args, out]))]
    if name == "grouped_mm_weight":
        x, dy = args[0], args[1]
        # groups without rows are cleared by a kernel that looks for them
        return [_grouped(x, 2 * numel(x) * _size(dy, 1), _size(args[2], 0), nbytes([args, out])), _memory(0)]
    if name in ("attention", "attention_backward"):
        return _attention(name, args, out)
    if name in DELTA_KERNELS:
        return _delta_rule(name, args, out)
    body = ops.BODIES[op]
    if not body.traceable or (name in ONE_PASS and target.kind(args[0].device) == "cuda"):
        return [_memory(nbytes([args, kwargs, out]))]
    return _of_body(body, args, kwargs)


def _grouped(x: torch.Tensor, flops: Any, groups: Any, count: Any) -> Call:
    return Call("grouped", dtype_name(x.dtype), flops, count, size=_size(x, 0) / groups)


def visible_pairs(rows: Any, keys: Any, causal: bool, window: Any) -> Any:
    """How many (query, key) pairs an attention of `rows` queries, the last of `keys` positions, computes."""
    if not causal:
        return rows * keys
    pairs = rows * (keys - rows) + rows * (rows + 1) / 2
    if window is None:
        return pairs
    width = sympy.Min(private.expression(window), keys)
    return width * rows - (width * (width - 1) / 2 if rows == keys else 0)


def _attention(name: str, args: Sequence[Any], out: Any) -> list[Call]:
    backward = name == "attention_backward"
    q, k, v, *rest = args[1:] if backward else args
    sinks, segments, _, causal, window, softcap = rest[2:] if backward else rest
    rows, keys = _size(q, 2), _size(k, 2)
    pairs = visible_pairs(rows, keys, causal, window) * _size(q, 0) * _size(q, 1)
    of_q, of_v = _size(q, 3), _size(v, 3)
    # forward: q k, p v; backward: q k again, dv, dp, dq, dk
    flops = 2 * pairs * ((3 * of_q + 2 * of_v) if backward else (of_q + of_v))
    kind: Kind = name  # type: ignore[assignment]
    special = bool(sinks is not None or segments is not None or softcap)
    if target.kind(q.device) == "cuda":
        more = sympy.sympify(rows > keys) is sympy.true
        order: Order = "same" if rows == keys else "more" if more else "last"
        kernel = attention_kernels.choose_on_cuda(q.dtype, q.shape[3], v.shape[3], order, special, causal, window)
        own: Kind = "triton_backward" if backward else "triton"
        kind = "tiled" if kernel == "tiled" else own if kernel == "triton" else kind
    elif special or (causal and rows != keys):
        kind = "tiled"
    moved = nbytes([args, out])
    if kind == "tiled":  # scores in fp32 pass through memory: written, masked, exponentiated, summed, multiplied
        moved = moved + 4 * pairs * (16 if backward else 8)
    return [Call(kind, dtype_name(q.dtype), flops, moved, size=keys)]


def _delta_rule(name: str, args: Sequence[Any], out: Any) -> list[Call]:
    """The chunked form of oomc.delta_rule, product by product; C positions, heads of Dk and Dv, in fp32."""
    backward = name.endswith("backward")
    k, v = args[3:5] if backward else args[1:3]
    c = args[-2]
    dk, dv = _size(k, 3), _size(v, 3)
    chunks = sympy.ceiling(sympy.sympify(_size(v, 1)) / c)
    heads = _size(v, 0) * _size(v, 2)
    chunk = 4 * c * c * dk + c * c * (dk + dv)  # k k^T, q k^T, and the two triangular solves
    if backward:
        # N again; then of the derivative: 6 products with a state, 2 + 1 of [C, C] by Dv, 1 + 4 by Dk, the solves
        flops = chunk + 2 * c * dk * dv * 7 + 2 * c * c * (3 * dv + 5 * dk) + c * c * (dk + dv)
    else:
        flops = chunk + 2 * c * dk * dv * 3 + 2 * c * c * dv
    of_group, of_chunk = DELTA_KERNELS[name]
    together = chunks_together(heads, c, max(dk, dv))
    kernels = of_group * sympy.ceiling(sympy.sympify(chunks) / together) + of_chunk * chunks
    temporaries = 4 * heads * c * (dk + dv) * of_group
    product = 2 * heads * c * dk * dv
    return [Call("gemm", "f32", flops * heads * chunks, 0, size=product, launches=0),
            _memory(temporaries * chunks + nbytes([args, out]), kernels)]  # fmt: skip


class _Recorder(TorchDispatchMode):
    """Collects the calls of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += calls(func, args, kwargs or {}, out)
        return out


def _of_body(body: ops.Body, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Call]:
    fake = next(x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
    with private.mode_of(fake), private.enable_python_dispatcher(), torch.no_grad(), _Recorder() as recorder:
        body(*args, **kwargs)
    return recorder.calls

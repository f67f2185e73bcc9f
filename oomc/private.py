"""Every private torch API that oomc needs, in one place; tests/test_private.py fails when torch changes one.

What each is for, and the public thing it could become, stands with it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "ConstraintError",
    "FakeTensor",
    "FakeTensorMode",
    "below_autograd",
    "comes_before",
    "copy_all",
    "enable_python_dispatcher",
    "expression",
    "fake_mode",
    "fused_rms_norm",
    "fused_rms_norm_backward",
    "in_a_mode",
    "is_constraint",
    "is_data_dependent",
    "lazy_module",
    "mark_stepped",
    "mode_of",
    "non_persistent",
    "replace_step",
    "stop_deferring",
    "suggested_bounds",
    "trace",
    "use_expandable_segments",
    "user_frame",
    "version",
]


def fake_mode(symbolic: bool = True) -> FakeTensorMode:
    """Fake tensors, with symbolic sizes if asked."""
    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None, allow_non_fake_inputs=True)


def below_autograd() -> AbstractContextManager[None]:
    """Leaves autograd out, as inside an operator's kernel: operators that only put others together stay one operator.

    `torch.no_grad` records nothing either, but still goes through its kernels.
    """
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


def in_a_mode() -> bool:
    """Whether this thread runs under a mode that sees its operators: it traces, or a default device is set."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies, asynchronous where they can be, in one call: each call gives up Python's lock and takes it again."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def fused_rms_norm(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x by the root of the mean of its squares [..., D], and what it was multiplied by [..., 1] in fp32, in one kernel.

    `torch.nn.functional.rms_norm` is public, and does not hand out the second, which the backward needs.
    """
    out, scale = torch.ops.aten._fused_rms_norm.default(x, [x.shape[-1]], None, eps)
    return out, scale.view(*x.shape[:-1], 1)


def fused_rms_norm_backward(dout: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The gradient of x from that of `fused_rms_norm`'s first result, in one kernel."""
    args = (dout, x, [x.shape[-1]], scale, None, [True, False])
    gradient: torch.Tensor = torch.ops.aten._fused_rms_norm_backward.default(*args)[0]
    return gradient


def mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """The mode that a fake tensor belongs to."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def expression(size: Any) -> Any:
    """The sympy expression of a symbolic number, or the plain number itself."""
    node = getattr(size, "node", None)
    return size if node is None else node.expr


def trace(function: Callable[..., Any], args: list[Any], mode: FakeTensorMode) -> torch.fx.GraphModule:
    """Trace `function` on fake tensors (and symbolic ints) into a functional graph of ATen ops below autograd.

    Functionalization doubles the time of a trace, so it is only used where the plain trace holds a write to memory.
    """
    with mode, enable_python_dispatcher():
        plain = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*args)
        if not any(_writes(node) for node in plain.graph.nodes):
            return plain
        functional = dispatch_functionalize(function, FunctionalTensorMode())
        return make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(*args)


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def comes_before(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether a node stands before another one in their graph.

    Public only by numbering all the nodes, which takes longer than everything else that is asked of a large graph.
    """
    return bool(one < other)


def in_order(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """Nodes as they stand in their graph; public likewise."""
    return sorted(nodes)


def lazy_module(graph: torch.fx.Graph, name: str, root: torch.nn.Module | None = None) -> torch.fx.GraphModule:
    """A GraphModule that writes and compiles its code when it is first called or asked for it; `root` has what the
    graph gets as attributes.

    Most programs are only looked at. Public as torch.fx.GraphModule, which does it at once, and again after
    each change.
    """
    return _LazyGraphModule(torch.nn.Module() if root is None else root, graph, class_name=name)


def use_expandable_segments() -> None:
    """Let the CUDA allocator grow segments in place, so that what it reserves stays near what is allocated.

    Public only as the environment variable PYTORCH_CUDA_ALLOC_CONF, which must be set before the process starts.
    """
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's schedulers that the optimizer has made its step, or they warn that it has not."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `mark_stepped` has been called, or torch's own step."""
    return bool(getattr(optimizer, "_opt_called", False))


def replace_step(optimizer: torch.optim.Optimizer, function: Callable[..., Any]) -> None:
    """Let `optimizer.step()` call `function`; schedulers made before or after take it for their own wrapper."""
    function._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(function, optimizer)  # type: ignore[method-assign]


def stop_deferring(mode: FakeTensorMode) -> None:
    """Let what fixes a symbolic size fix it in the open from here on.

    While it exports with deferred asserts, torch answers `int(size)` with the example's number and only notes an
    assert; in a pass that would be a graph for one size, with nothing to show for it.
    """
    env = mode.shape_env
    assert env is not None
    env.settings = replace(env.settings, prefer_deferred_runtime_asserts_over_guards=False)


def version(tensor: torch.Tensor) -> int:
    """How often the tensor, or what shares its counter, was written to in place; 0 where nobody counts.

    Writes through `.data` and by other libraries are not counted. Public only as a remark in torch's documentation of
    in-place correctness checks.
    """
    return 0 if tensor.is_inference() else tensor._version


def non_persistent(module: torch.nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that no state_dict holds, without making one."""
    return frozenset(module._non_persistent_buffers_set)


class ConstraintError(Exception):
    """torch.export found the symbolic sizes constrained."""


def is_constraint(error: Exception) -> bool:
    """Whether an error of torch.export says that a dynamic size cannot be what it was declared."""
    return isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION


def suggested_bounds(error: Exception) -> list[tuple[str, int, int | None]]:
    """The dimensions that a constraint violation suggests to bound: name, least, largest or None."""
    found = []
    for name, least, most in re.findall(r"(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", str(error)):
        found.append((name, int(least) if least else 1, int(most) if most else None))
    return found


def is_data_dependent(size: Any) -> bool:
    """Whether a size is a symbol that only running can tell."""
    expr = expression(size)
    return not isinstance(expr, int) and any(symbol_is_type(s, SymT.UNBACKED_INT) for s in expr.free_symbols)


def user_frame(error: BaseException) -> str:
    """`file:line: source` of the innermost frame of `error` outside torch and oomc, or ''."""
    skip = (f"{torch.__path__[0]}/", f"{__file__.rpartition('/')[0]}/")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(skip)]
    inner = [f for f in frames if "site-packages/sympy" not in f.filename and not f.filename.startswith("<")]
    return f"{inner[-1].filename}:{inner[-1].lineno}: {inner[-1].line}" if inner else ""

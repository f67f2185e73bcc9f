"""Capture: trace a model's training step, from batch to loss, into a forward graph.

`torch.export` (non-strict) runs on fake tensors: parameters and buffers are stood in for by fakes of the same
shape, so nothing is allocated and a model of any size can be traced, also one on the meta device. The leading two
dimensions of the inputs are symbols (batch and sequence), so one trace serves every batch shape.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim
from torch.export.graph_signature import InputKind as ExportKind
from torch.utils import _pytree as pytree

from oomc import private
from oomc.errors import CaptureError, UnsupportedError
from oomc.fxutil import fake_mode_of
from oomc.program import InputSpec, Program

LossFn = Callable[[Any, Mapping[str, Any]], Any]
KINDS = {ExportKind.PARAMETER: "parameter", ExportKind.BUFFER: "buffer", ExportKind.CONSTANT_TENSOR: "constant"}


@dataclass(frozen=True)
class Batch:
    """A call's arguments, bound to the model's parameter names and split into tensors and the rest.

    Attributes:
        tensors: tensor leaves by name, in call order; a leaf inside a container is named like `images.0`.
        static: all other leaves by name: they are constants of the trace.
        spec: the pytree structure that puts both together again.
    """

    tensors: dict[str, torch.Tensor]
    static: dict[str, Any]
    names: tuple[str, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def bind(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """Bind call arguments as Python would bind them to `model.forward`.

        Raises:
            TypeError: the arguments do not fit the signature.
        """
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, val in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise UnsupportedError(
                    f"the model's forward takes *{name}; call the step with keyword arguments that forward names"
                )
            named.update(val if kind is inspect.Parameter.VAR_KEYWORD else {name: val})
        leaves, spec = pytree.tree_flatten_with_path(named)
        names = tuple(".".join(_key(k) for k in path) for path, _ in leaves)
        tensors = {n: leaf for n, (_, leaf) in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
        static = {n: leaf for n, (_, leaf) in zip(names, leaves, strict=True) if not isinstance(leaf, torch.Tensor)}
        return Batch(tensors, static, names, spec)

    def rebuild(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The keyword arguments with `tensors` in the tensors' places."""
        return pytree.tree_unflatten([tensors.get(n, self.static.get(n)) for n in self.names], self.spec)

    def shapes_only(self) -> Batch:
        """The same with tensors on the meta device, which hold no memory."""
        return replace(self, tensors={n: t.detach().to("meta") for n, t in self.tensors.items()})

    def key(self) -> tuple[Any, ...]:
        """What a trace depends on: names, dtypes, ranks and constants, but no sizes."""
        return (
            tuple((n, t.dtype, t.dim()) for n, t in self.tensors.items()),
            tuple((n, repr(v)) for n, v in self.static.items()),
        )


def _key(entry: Any) -> str:
    for attr in ("key", "idx", "name"):
        if hasattr(entry, attr):
            return str(getattr(entry, attr))
    return str(entry)


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: `output.loss`, `output["loss"]`, a tuple's first entry, or a 0-dim tensor."""
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else None
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else None


def is_sum_and_count(returned: Any) -> bool:
    """Whether a loss function returned a sum over tokens and their number: a pair of 0-dim tensors.

    Raises:
        CaptureError: the number is none that the graph could hold.
    """
    if not isinstance(returned, tuple) or len(returned) != 2 or find_loss(returned) is None:
        return False
    count = returned[1]
    if isinstance(count, int | float | torch.SymInt | torch.SymFloat) or (
        isinstance(count, torch.Tensor) and count.dim() == 0 and (count.dtype == torch.bool or count.is_complex())
    ):
        raise CaptureError(
            "loss_fn returned (sum, count) with a count that is no int or float tensor of no dimensions; count by "
            "tensor operations, as in (labels != -100).sum()"
        )
    return isinstance(count, torch.Tensor) and count.dim() == 0


def mean_and_count(total: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of what `count` tokens sum up to, 0 for none of them; and the count, through which no gradient flows."""
    count = count.detach()
    return total / torch.where(count == 0, 1, count), count


class _LossModule(torch.nn.Module):
    """From flat tensors to the loss; this is what is exported."""

    def __init__(self, model: torch.nn.Module, batch: Batch, loss_fn: LossFn | None) -> None:
        super().__init__()
        self._model = model
        self._batch = batch
        self._loss_fn = loss_fn

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        kwargs = self._batch.rebuild(dict(zip(self._batch.tensors, leaves, strict=True)))
        output = self._model(**kwargs)
        where = "the model's output"
        if self._loss_fn is not None:
            output = self._loss_fn(output, kwargs)
            where = "what loss_fn returned"
            if is_sum_and_count(output):
                return mean_and_count(*output)
        loss = find_loss(output)
        if loss is None:
            raise CaptureError(
                f"found no scalar loss in {where} ({type(output).__name__}). Give the model its labels, return the "
                "loss as `output.loss`, `output['loss']` or the first entry of a tuple, or pass loss_fn(output, batch)"
            )
        return loss


@contextlib.contextmanager
def fake_weights(model: torch.nn.Module, mode: private.FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Stand fakes on `device` in for all parameters and buffers of `model` while the context lasts."""
    stand_ins: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        with mode:
            for module in model.modules():
                for store in (module._parameters, module._buffers):
                    for name, real in list(store.items()):
                        if real is None:
                            continue
                        if id(real) not in stand_ins:
                            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
                            if isinstance(real, torch.nn.Parameter):
                                fake = torch.nn.Parameter(fake, requires_grad=real.requires_grad)
                            stand_ins[id(real)] = fake
                        replaced.append((store, name, real))
                        store[name] = stand_ins[id(real)]  # type: ignore[assignment]
        yield
    finally:
        for store, name, real in replaced:
            store[name] = real  # type: ignore[assignment]


def _sizes(batch: Batch) -> tuple[int, int | None]:
    """The batch's size and its sequence length, by convention the leading two dimensions of its integer tensors."""
    ranked = sorted(batch.tensors.values(), key=lambda t: t.is_floating_point())
    lead = next((t for t in ranked if t.dim() >= 2), None)
    if lead is not None:
        return lead.shape[0], lead.shape[1]
    lead = next((t for t in ranked if t.dim() == 1), None)
    if lead is None:
        raise CaptureError("the batch holds no tensor with a batch dimension; call the step with the model's inputs")
    return lead.shape[0], None


@dataclass(frozen=True)
class Bounds:
    """The least and the largest (None: any) batch and sequence size that the model's code allows.

    `sequence` is None where the second dimension of the inputs is no symbol: it holds features, or the code fixes it.
    """

    batch: tuple[int, int | None] = (1, None)
    sequence: tuple[int, int | None] | None = (1, None)

    def narrowed(self, error: private.ConstraintError) -> Bounds:
        """The bounds that torch.export suggests in a refusal.

        Labels shifted by slicing have a shortest sequence above one, learned positions have a longest.

        Raises:
            CaptureError: the batch size is fixed by the code.
        """
        new = self
        for name, least, most in private.suggested_bounds(error):
            if name == "S" and self.sequence is not None:
                old = self.sequence
                new = replace(new, sequence=(max(old[0], least), _smaller(old[1], most)))
            elif name == "B":
                new = replace(new, batch=(max(self.batch[0], least), _smaller(self.batch[1], most)))
        if new != self:
            return new
        if self.sequence is not None:
            return replace(self, sequence=None)
        raise CaptureError(
            f"the model's forward fixes the batch size: {_first_line(error)}\nSizes taken from a tensor (`x.shape[0]`) "
            "may change between calls; numbers written in the code may not"
        ) from error


def _smaller(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _trace_shapes(batch: Batch, bounds: Bounds) -> tuple[list[list[int]], tuple[dict[int, Any], ...]]:
    """Shapes to trace with, and which of their dimensions are which symbol.

    Sizes 0 and 1 are special to torch.export, so that a batch of one is traced as a batch of two.
    """
    size_b, size_s = _sizes(batch)
    sequence = bounds.sequence or (1, None)
    dims = {
        "batch": Dim("B", min=bounds.batch[0], max=bounds.batch[1]),
        "sequence": Dim("S", min=sequence[0], max=sequence[1]),
    }
    shapes, dynamic = [], []
    for t in batch.tensors.values():
        shape, marks = list(t.shape), {}
        if t.dim() >= 1 and t.shape[0] == size_b:
            marks[0], shape[0] = dims["batch"], max(2, bounds.batch[0], size_b)
        if bounds.sequence is not None and t.dim() >= 2 and t.shape[1] == size_s and (0 in marks or t.shape[0] == 1):
            marks[1], shape[1] = dims["sequence"], max(2, sequence[0], size_s)
        shapes.append(shape)
        dynamic.append(marks)
    return shapes, tuple(dynamic)


def capture(
    model: torch.nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    device: torch.device | str = "cpu",
) -> Program:
    """Trace the training step of `model` on a batch like `batch`.

    Args:
        model: any module; parameters and buffers may be on any device, meta included. Its own code decides the
            arithmetic (train or eval mode as it is).
        batch: an example; only names, dtypes and shapes are read.
        loss_fn: `loss_fn(output, batch_dict) -> scalar`, where the model does not compute its own loss; or
            `-> (sum, count)`, whose quotient is the loss and whose count the graph then puts out beside it.
        device: the device that the step will compute on.

    Raises:
        CaptureError: the model cannot be traced; the message names the module and the source line.
    """
    device = torch.device(device)
    bounds = Bounds()
    while True:
        try:
            exported = _export(model, batch, loss_fn, device, bounds)
            break
        except private.ConstraintError as error:
            bounds = bounds.narrowed(error)
    program = _program(exported, model, batch, device)
    program.notes["bounds"] = (bounds.batch, bounds.sequence or (1, None))
    program.notes["buffers"] = dict(model.named_buffers())
    return program


def _export(
    model: torch.nn.Module, batch: Batch, loss_fn: LossFn | None, device: torch.device, bounds: Bounds
) -> torch.export.ExportedProgram:
    """Export with sizes within `bounds`."""
    from oomc.models import huggingface

    mode = private.fake_mode()
    shapes, dynamic = _trace_shapes(batch, bounds)
    module = _LossModule(model, batch, loss_fn)
    with contextlib.ExitStack() as stack:
        stack.enter_context(huggingface.hooks(model))
        stack.enter_context(fake_weights(model, mode, device))
        with mode:
            leaves = tuple(
                torch.empty(shape, dtype=t.dtype, device=device)
                for shape, t in zip(shapes, batch.tensors.values(), strict=True)
            )
        try:
            exported = torch.export.export(
                module,
                leaves,
                dynamic_shapes=(dynamic,),
                strict=False,
                # expanded KV heads otherwise guard on sizes that torch 2.11 cannot prove
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            private.stop_deferring(fake_mode_of(exported.graph))
            return exported
        except (CaptureError, UnsupportedError):
            raise
        except Exception as error:
            if private.is_constraint(error):
                raise private.ConstraintError(str(error)) from error
            raise _explain(error, model) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _explain(error: Exception, model: torch.nn.Module) -> CaptureError:
    from oomc.passes.rewrite_experts import explain

    found = explain(error, model)
    if found is not None:
        where, fix = found
        return CaptureError(f"{where} cannot be traced: {fix}")
    where = private.user_frame(error)
    return CaptureError(
        f"the model's forward cannot be traced{' at ' + where if where else ''}: {type(error).__name__}: "
        f"{_first_line(error)}\n"
        "What depends on the values of tensors (`if x.sum() > 0`, `.item()`, `.tolist()`, `nonzero`) has no fixed "
        "graph: compute it with tensor operations (`torch.where`, masks), or move it out of forward"
    )


def _program(exported: Any, model: torch.nn.Module, batch: Batch, device: torch.device) -> Program:
    own = {id(p): n for n, p in model.named_parameters()} | {id(b): n for n, b in model.named_buffers()}
    lookup = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names = list(batch.tensors)
    inputs: list[InputSpec] = []
    constants: dict[str, torch.Tensor] = {}
    signature = exported.graph_signature
    leaf = 0
    for spec in signature.input_specs:
        target = (spec.target or "").removeprefix("_model.")
        if spec.kind is ExportKind.USER_INPUT:
            inputs.append(InputSpec("input", names[leaf]))
            leaf += 1
        elif spec.kind is ExportKind.CONSTANT_TENSOR:
            constants[spec.target] = exported.constants[spec.target]
            inputs.append(InputSpec("constant", spec.target))
        elif spec.kind in (ExportKind.PARAMETER, ExportKind.BUFFER):
            real = lookup[target]
            kind = "parameter" if spec.kind is ExportKind.PARAMETER else "buffer"
            inputs.append(InputSpec(kind, own[id(real)], kind == "parameter" and real.requires_grad))  # type: ignore[arg-type]
        else:
            raise UnsupportedError(f"the model's graph takes {spec.target} of kind {spec.kind.name}")
    return Program(forward=exported.graph_module, inputs=inputs, device=device, constants=constants)

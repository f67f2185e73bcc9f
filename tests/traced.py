"""Small models taken to a forward graph without transformers' hooks, run, and compared with eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind as ExportKind

from oomc.match import op_name
from oomc.passes.canonicalize import Canonicalize
from oomc.program import InputSpec, Program

KINDS = {ExportKind.PARAMETER: "parameter", ExportKind.BUFFER: "buffer", ExportKind.CONSTANT_TENSOR: "constant"}


class _Loss(nn.Module):
    """The model's loss, or a weighted sum of squares of its output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = self.model(**dict(zip(self.names, inputs, strict=True)))
        loss = getattr(out, "loss", None)
        if loss is not None:
            return loss
        out = out.logits if hasattr(out, "logits") else out
        weight = 1.5 + torch.arange(out.shape[-1], dtype=out.dtype, device=out.device).cos()
        return (out * out * weight).sum() / out.shape[0]


def traced(model: nn.Module, inputs: dict[str, torch.Tensor], longest: int | None = None) -> Program:
    """The canonical forward graph of `model` on inputs like `inputs`, batch and sequence symbolic."""
    dims = {0: Dim("B"), 1: Dim("S", max=longest)}
    shapes = (tuple(dims for _ in inputs),)
    module, names = _Loss(model, tuple(inputs)), iter(inputs)
    exported = torch.export.export(
        module,
        tuple(inputs.values()),
        dynamic_shapes=shapes,
        strict=False,
        # torch 2.11 cannot prove min(8 * S, 16 * S) == 8 * S, which a reshape of expanded heads asks for
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    specs = []
    for spec in exported.graph_signature.input_specs:
        kind: Any = KINDS.get(spec.kind, "input")
        target = spec.target if spec.target is not None else next(names)
        if kind in ("parameter", "buffer"):
            target = target.removeprefix("model.")
        specs.append(InputSpec(kind, target, kind == "parameter"))
    constants = {n: c for n, c in exported.constants.items() if isinstance(c, torch.Tensor)}
    program = Program(exported.graph_module, specs, torch.device("cpu"), constants)
    program.notes["buffers"] = {n: b.detach() for n, b in model.named_buffers()}
    return Canonicalize()(program).program


def run(program: Program, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The graph's loss with the model's own parameters."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    sources: dict[str, dict[str, Any]] = {
        "parameter": own, "buffer": own, "constant": program.constants, "input": inputs,
    }  # fmt: skip
    whole = [sources[s.kind][s.target] for s in program.inputs]
    args = [x if s.rows is None else x[s.rows.start : s.rows.stop] for x, s in zip(whole, program.inputs, strict=True)]
    return program.forward(*args)[0]


def assert_same(
    program: Program,
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    loss_error: float = 1e-6,
    gradient_error: float = 1e-5,
) -> None:
    """Loss and every gradient (by norm) equal eager's."""
    model.zero_grad()
    expected = _Loss(model, tuple(inputs))(*inputs.values())
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = run(program, model, inputs)
    loss.backward()
    assert torch.allclose(loss, expected, rtol=loss_error, atol=1e-7), (loss.item(), expected.item())
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert parameter.grad is not None, name
            error = (parameter.grad - gradients[name]).norm() / gradients[name].norm().clamp_min(1e-12)
            assert error <= gradient_error, (name, error.item())


def ops_of(graph: fx.Graph) -> list[str]:
    """Names of the graph's ops, in order."""
    return [op_name(n) for n in graph.nodes if n.op == "call_function"]


def values_are_right(graph: fx.Graph) -> bool:
    """Whether every call has a value and lint finds nothing."""
    graph.lint()
    return all("val" in n.meta for n in graph.nodes if n.op == "call_function")

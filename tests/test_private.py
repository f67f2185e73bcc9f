"""Each private API of torch that is used exists, and does what it is used for; a new torch fails here first."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from oomc import private


def test_fake_mode_has_symbolic_sizes_only_if_asked() -> None:
    real = torch.empty(6, 4)
    mode = private.fake_mode()
    assert mode.shape_env is not None and private.fake_mode(symbolic=False).shape_env is None
    fake = mode.from_tensor(real)
    assert isinstance(fake, private.FakeTensor) and private.mode_of(fake) is mode
    with private.fake_mode(symbolic=False), torch.no_grad():
        huge = torch.empty(1 << 20, 1 << 20) @ torch.empty(1 << 20, 8)
    assert huge.shape == (1 << 20, 8)


def test_a_mode_is_seen_in_its_own_thread_alone() -> None:
    assert not private.in_a_mode()
    for mode in (private.fake_mode(symbolic=False), BaseTorchFunctionMode()):
        with mode:
            assert private.in_a_mode()
            elsewhere = ThreadPoolExecutor(1)
            assert not elsewhere.submit(private.in_a_mode).result()
            elsewhere.shutdown()
    assert not private.in_a_mode()


def test_nodes_compare_by_their_place_in_the_graph() -> None:
    graph = torch.fx.Graph()
    first = graph.placeholder("first")
    last = graph.call_function(torch.neg, (first,))
    for _ in range(100):
        with graph.inserting_before(last):
            between = graph.call_function(torch.neg, (first,))
        last.prepend(first)
        first, last = first, between
        nodes = list(graph.nodes)
        assert all(private.comes_before(a, b) and not private.comes_before(b, a) for a, b in pairwise(nodes))
    assert not private.comes_before(first, first)


def test_expression_is_sympys_or_the_number_itself() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0] * 2, -1)

    size = torch.export.Dim("B", min=2, max=64)
    exported = torch.export.export(Model(), (torch.ones(4, 6),), dynamic_shapes=({0: size},), strict=False)
    (output,) = exported.graph.find_nodes(op="output")
    rows, columns = output.args[0][0].meta["val"].shape
    expression = private.expression(rows)
    (symbol,) = expression.free_symbols
    assert int(expression.subs({symbol: 5})) == 10
    assert private.expression(columns) == 3 and private.expression(7) == 7


def test_trace_is_functional_and_below_autograd() -> None:
    def pure(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2 + 1]

    def writes(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        y[0] += 1
        return [y.mul_(2)]

    def with_gradient(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return list(torch.autograd.grad([leaf.tanh().sum()], [leaf]))

    for function in (pure, writes, with_gradient):
        mode = private.fake_mode(symbolic=False)
        with mode:
            fake = torch.empty(3, 4)
        module = private.trace(function, [fake], mode)
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert isinstance(node.target, torch._ops.OpOverload)
                assert not node.target._schema.is_mutable, f"{node.target} in {function.__name__}"
        x = torch.randn(3, 4)
        assert torch.allclose(module(x)[0], function(x.clone())[0])


def test_user_frame_is_outside_torch_and_oomc() -> None:
    try:
        nn.Linear(2, 2)(torch.ones(1, 3))  # this line
    except RuntimeError as error:
        frame = private.user_frame(error)
    assert frame.startswith(__file__) and frame.endswith("nn.Linear(2, 2)(torch.ones(1, 3))  # this line")
    assert private.user_frame(ValueError()) == ""


def test_module_stack_tells_calls_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    graph = torch.export.export(Model(), (torch.ones(1, 2),), strict=False).graph
    stacks = [tuple(n.meta["nn_module_stack"]) for n in graph.nodes if n.op == "call_function"]
    assert len(set(stacks)) == 2


def test_pytrees_have_paths() -> None:
    leaves, spec = pytree.tree_flatten_with_path({"a": 1, "b": [2, 3]})
    assert [[str(getattr(k, "key", getattr(k, "idx", k))) for k in path] for path, _ in leaves] == [
        ["a"], ["b", "0"], ["b", "1"],
    ]  # fmt: skip
    assert pytree.tree_unflatten([4, 5, 6], spec) == {"a": 4, "b": [5, 6]}


KERNELS = {
    "_scaled_dot_product_cudnn_attention": ("query", "compute_log_sumexp", "dropout_p", "is_causal", "scale"),
    "_scaled_dot_product_cudnn_attention_backward": ("grad_out", "philox_seed", "philox_offset", "attn_bias", "scale"),
    "_flash_attention_forward": ("query", "cum_seq_q", "max_q", "window_size_left", "window_size_right", "scale"),
    "_flash_attention_backward": ("grad_out", "logsumexp", "rng_state", "unused", "window_size_left", "scale"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_take_what_is_given(name: str) -> None:
    arguments = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]
    missing = set(KERNELS[name]) - set(arguments)
    assert not missing, f"{name} takes {arguments}"


def test_sizes_are_fixed_in_the_open_after_an_export() -> None:
    """`ShapeEnv.settings` is where torch keeps whether it defers."""
    mode = private.fake_mode()
    assert mode.shape_env is not None
    assert hasattr(mode.shape_env.settings, "prefer_deferred_runtime_asserts_over_guards")
    private.stop_deferring(mode)
    assert not mode.shape_env.prefer_deferred_runtime_asserts_over_guards


def test_schedulers_do_not_warn_about_a_marked_optimizer() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    private.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_replaced_optimizer_step_is_taken_for_the_schedulers_own() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    calls: list[object] = []
    private.replace_step(optimizer, lambda self: calls.append(self))
    after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    private.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before.step()
        after.step()
    assert calls == [optimizer]


def test_versions_count_writes_in_place_and_nothing_else() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    start, home = private.version(parameter), parameter.data
    parameter.data = torch.ones(2)
    parameter.data = home
    home.mul_(2)
    parameter.detach().numpy()[:] = 3.0
    assert private.version(parameter) == start, "writes that the step itself makes are not counted"
    with torch.no_grad():
        parameter.mul_(2)
    parameter.detach().zero_()
    assert private.version(parameter) == start + 2
    with torch.inference_mode():
        assert private.version(torch.zeros(2)) == 0


def test_non_persistent_buffers_are_those_that_no_state_dict_holds() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("computed", torch.zeros(1), persistent=False)
    assert private.non_persistent(module) == {"computed"} == dict(module.named_buffers()).keys() - module.state_dict()


def test_hooks_that_are_always_called_are_so_after_an_error() -> None:
    """attach.py gives weights back by them; an interrupt does not call them, for which it has `bring_home`."""
    called = []
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: called.append(1), always_call=True)
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert called == [1]


def test_a_lazy_module_makes_its_code_when_it_is_called() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    output = graph.output(x)
    module = private.lazy_module(graph, "Step")
    with graph.inserting_before(output):
        output.args = (graph.call_function(torch.neg, (x,)),)
    module.recompile()
    assert torch.equal(module(torch.ones(2)), -torch.ones(2))
    assert "neg" in module.code and type(module).__name__ == "Step"


def test_below_autograd_an_operator_made_of_others_is_one() -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x = torch.ones(3, 4, requires_grad=True)
    with Names(), torch.no_grad():
        torch.linalg.vecdot(x, x)
        assert seen == ["mul", "sum"]
        seen.clear()
        with private.below_autograd():
            y = torch.linalg.vecdot(x, x)
    assert seen == ["linalg_vecdot"]
    assert not y.requires_grad


def test_many_copies_are_one_call() -> None:
    sources = [torch.randn(3), torch.arange(5, dtype=torch.int16), torch.ones(2, dtype=torch.bfloat16)]
    targets = [torch.empty_like(s) for s in sources]
    private.copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))

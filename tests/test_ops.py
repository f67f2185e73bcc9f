"""The sets that passes ask, and that every operator is registered as promised."""

import torch

from oomc import ops


def test_sets() -> None:
    assert ops.attention in ops.FENCES and ops.gated_delta_rule in ops.FENCES and ops.route not in ops.FENCES
    assert {torch.ops.aten.topk.default, torch.ops.aten.sort.stable} <= ops.NEVER_RECOMPUTE
    assert ops.route not in ops.NEVER_RECOMPUTE  # a stable sort of integers: the choice that it sorts is saved


def test_is_oomc() -> None:
    assert ops.is_oomc(ops.route) and ops.is_oomc(torch.ops.oomc.combine.default)
    assert not ops.is_oomc(torch.ops.aten.mm.default) and not ops.is_oomc(len) and not ops.is_oomc("output")


def test_every_op_has_a_body_and_mutates_nothing_but_what_it_says() -> None:
    assert {op for op in vars(ops).values() if ops.is_oomc(op)} == set(ops.BODIES)
    for op in ops.BODIES:
        assert op._schema.is_mutable == (op is ops.attention_backward_in_place)
        assert all(result.alias_info is None for result in op._schema.returns)


def test_traceable_bodies_trace() -> None:
    """A traceable body becomes plain ATen, under fake tensors, at symbolic-free sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = torch.randn(1, 4, 8, 6), torch.randn(1, 2, 8, 6), torch.randn(1, 2, 8, 6)
    body = ops.BODIES[ops.attention]
    assert body.traceable
    graph = make_fx(lambda q, k, v: body(q, k, v, None, None, 0.5, True, None, 0.0), tracing_mode="fake")(q, k, v)
    assert not any(ops.is_oomc(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(q, k, v), ops.attention(q, k, v, None, None, 0.5, True, None, 0.0))

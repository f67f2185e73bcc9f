"""rewrite_attention on exported graphs: numbers, what leaves the graph, and what is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomc import meta
from oomc.match import op_name
from oomc.passes.rewrite_attention import RewriteAttention
from oomc.program import Program
from tests.traced import assert_same, run, traced, values_are_right

HEADS, KV, SIZE, WIDTH = 4, 2, 8, 16
Attend = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


class Layer(nn.Module):
    """Embedding, one attention written by `attend`, projection."""

    tril: Tensor

    def __init__(self, attend: Attend, kv: int = HEADS, heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.kv, self.heads = attend, kv, heads
        self.embed = nn.Embedding(16, WIDTH)
        self.qkv = nn.Linear(WIDTH, (heads + 2 * kv) * SIZE)
        self.out = nn.Linear(heads * SIZE, WIDTH)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)

    def forward(self, ids: Tensor, **more: Tensor) -> Tensor:
        x = self.embed(ids)
        b, s, _ = x.shape
        q, k, v = (
            y.view(b, s, -1, SIZE).transpose(1, 2)
            for y in self.qkv(x).split([self.heads * SIZE, self.kv * SIZE, self.kv * SIZE], -1)
        )
        y = self.attend(q, k, v, {"ids": ids, "tril": self.tril, **more})
        return self.out(y.transpose(1, 2).contiguous().view(b, s, -1))


def repeat(x: Tensor, n: int = HEADS // KV) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def positions(q: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.arange(q.shape[-2], device=q.device)
    return p[:, None], p[None, :]


def soft(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[Tensor], Tensor], scale: float | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * (SIZE**-0.5 if scale is None else scale)
    return mask(scores).softmax(-1) @ v


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_expanded(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), (j <= i)[None, None])


def sdpa_interleaved_early(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    k, v = (x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_window(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, k, v, (j <= i) & (j > i - 5), scale=0.3)


def sdpa_large_window(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, k, v, (j <= i) & (i - j < 4096))


def sdpa_full(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_padding(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    keep = m["attention_mask"].bool()[:, None, None, :]
    mask = torch.zeros(1, 1, *(j <= i).shape).masked_fill(~((j <= i) & keep), torch.finfo(torch.float32).min)
    return F.scaled_dot_product_attention(q, k, v, mask)


def additive_padding(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    pad = (1.0 - m["attention_mask"].float())[:, None, None, :] * -1e9
    tri = torch.triu(torch.full((q.shape[-2], q.shape[-2]), float("-inf")), 1)
    return soft(q, k, v, lambda s: s + tri + pad)


def documents(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    same = m["docs"][:, :, None] == m["docs"][:, None, :]
    return F.scaled_dot_product_attention(q, k, v, ((j <= i) & same)[:, None])


def pad_token(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, k, v, ((j <= i) & (m["ids"] != 11)[:, None, :])[:, None])


def restarts(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    doc = (m["position_ids"] == 0).cumsum(-1)
    return F.scaled_dot_product_attention(q, k, v, ((j <= i) & (doc[:, :, None] == doc[:, None, :]))[:, None])


def soft_fill(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    s = q.shape[-2]
    return soft(q, k, v, lambda x: x.masked_fill(m["tril"][:, :, :s, :s] == 0, float("-inf")))


def soft_triu(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    tri = torch.triu(torch.full((q.shape[-2], q.shape[-2]), float("-inf")), 1)
    return soft(q / math.sqrt(SIZE), repeat(k), repeat(v), lambda x: x + tri, 1.0)


def soft_where_cap(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return soft(q, k, v, lambda x: torch.where(j <= i, torch.tanh(x / 3.0) * 3.0, -1e30))


def einsum(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(SIZE)
    p = scores.masked_fill(j > i, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(p, 0.1, training=False), v)


def no_heads(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return soft(q, k, v, lambda x: x.masked_fill(j > i, float("-inf"))).unflatten(0, (-1, HEADS))


# --- what no option of oomc::attention says ---


def alibi(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    bias = (j - i) * torch.tensor([0.5, 0.25, 0.125, 0.1])[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(j > i, float("-inf")))


def sparse(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, k, v, (j <= i) & ((i - j) % 2 == 0))


def prefix(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, k, v, ((j <= i) | (m["docs"] == 0)[:, None, :])[:, None])


def global_tokens(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    doc = m["docs"]
    same = (doc[:, :, None] == doc[:, None, :]) | (doc == 0)[:, :, None]
    return F.scaled_dot_product_attention(q, k, v, ((j <= i) & same)[:, None])


def off_by_one(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, k, v, j <= i + 1)


def late_window(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
    """Causal up to 700 tokens, something else beyond."""
    i, j = positions(q)
    return F.scaled_dot_product_attention(q, k, v, (j <= i) & ((j < 4) | (i - j < 700)))


def inputs_for(name: str = "", b: int = 2, s: int = 12) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(b * s)
    inputs = {"ids": torch.randint(0, 11, (b, s), generator=g)}
    if name == "attention_mask":
        inputs[name] = torch.ones(b, s, dtype=torch.int64)
    elif name == "docs":
        inputs[name] = (torch.rand(b, s, generator=g) < 0.3).cumsum(-1)
    elif name == "position_ids":
        inputs[name] = torch.arange(s).expand(b, s) % torch.tensor([[s], *[[5]] * (b - 1)])
    return inputs


CASES: list[tuple[Attend, int, str, tuple[Any, ...]]] = [
    (sdpa_causal, HEADS, "", (True, None, 0.0)),
    (sdpa_gqa, KV, "", (True, None, 0.0)),
    (sdpa_expanded, KV, "", (True, None, 0.0)),
    (sdpa_interleaved_early, KV, "", (True, None, 0.0)),
    (sdpa_window, HEADS, "", (True, 5, 0.0)),
    (sdpa_large_window, HEADS, "", (True, 4096, 0.0)),
    (sdpa_full, HEADS, "", (False, None, 0.0)),
    (sdpa_padding, HEADS, "attention_mask", (True, None, 0.0)),
    (additive_padding, HEADS, "attention_mask", (True, None, 0.0)),
    (documents, HEADS, "docs", (True, None, 0.0)),
    (pad_token, HEADS, "", (True, None, 0.0)),
    (restarts, HEADS, "position_ids", (True, None, 0.0)),
    (soft_fill, HEADS, "", (True, None, 0.0)),
    (soft_triu, KV, "", (True, None, 0.0)),
    (soft_where_cap, HEADS, "", (True, None, 3.0)),
    (einsum, HEADS, "", (True, None, 0.0)),
    (no_heads, HEADS, "", (True, None, 0.0)),
]


def square_tensors(program: Program) -> list[str]:
    """Nodes whose values are of size S x S."""
    found = []
    for node in program.forward.graph.nodes:
        val = meta.tensor(node)
        last = [] if val is None else [str(n) for n in val.shape[-2:]]
        if len(last) == 2 and last[0] == last[1] and "s" in last[0]:
            found.append(node.name)
    return found


@pytest.mark.parametrize(("attend", "kv", "extra", "expected"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_forms_become_one(attend: Attend, kv: int, extra: str, expected: tuple[Any, ...]) -> None:
    model = Layer(attend, kv)
    program = traced(model, inputs_for(extra), longest=63 if attend is soft_fill else None)
    result = RewriteAttention()(program)
    assert result.modified
    assert "attention" not in program.notes
    graph = program.forward.graph
    (node,) = (n for n in graph.nodes if op_name(n) == "oomc.attention")
    assert tuple(node.args[6:]) == expected
    assert meta.value(node.args[1]).shape[1] == (1 if attend is no_heads else kv)
    assert (node.args[4] is not None) == (bool(extra) or attend is pad_token)
    assert not square_tensors(program)
    assert values_are_right(graph)
    assert meta.modules(node)
    assert meta.source(node)
    for b, s in ((2, 12), (3, 17)):
        assert_same(program, model, inputs_for(extra, b, s))
    assert not RewriteAttention()(program).modified


@pytest.mark.parametrize("attend", [alibi, sparse, off_by_one, late_window], ids=lambda x: x.__name__)
def test_sizes_only_masks_left_alone(attend: Attend) -> None:
    program = traced(Layer(attend), inputs_for())
    before = str(program.forward.graph)
    assert not RewriteAttention()(program).modified
    assert str(program.forward.graph) == before
    assert "its mask is not" in program.notes["attention"][0]


@pytest.mark.parametrize("attend", [prefix, global_tokens], ids=lambda x: x.__name__)
def test_input_masks_left_alone(attend: Attend) -> None:
    program = traced(Layer(attend), inputs_for("docs"))
    assert not RewriteAttention()(program).modified
    assert program.notes["attention"]


def test_padding_hides_padding() -> None:
    model = Layer(sdpa_padding)
    program = traced(model, inputs_for("attention_mask"))
    RewriteAttention()(program)
    full, padded = inputs_for("attention_mask", 2, 9), inputs_for("attention_mask", 2, 12)
    padded["ids"][:, :9] = full["ids"]
    padded["attention_mask"][:, 9:] = 0
    (node,) = (n for n in program.forward.graph.nodes if op_name(n) == "oomc.attention")
    with program.forward.graph.inserting_after(node):
        (out,) = node.users
    program.forward.graph.output_node().args = ((out,),)
    program.forward.recompile()
    a, b = run(program, model, full), run(program, model, padded)
    torch.testing.assert_close(a, b[:, :, :9])


def test_dense_weights_that_are_used_are_left_alone() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        return p @ v + p.sum()

    assert not RewriteAttention()(traced(Layer(attend), inputs_for())).modified


def test_two_attentions_share_segments() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: dict[str, Tensor]) -> Tensor:
        return documents(q, k, documents(q, k, v, m), m)

    program = traced(Layer(attend), inputs_for("docs"))
    assert RewriteAttention()(program).modified
    nodes = [n for n in program.forward.graph.nodes if op_name(n) == "oomc.attention"]
    assert len({n.args[4] for n in nodes}) == 1
    assert len(nodes) == 2


@pytest.mark.parametrize(
    ("family", "implementation", "padded"),
    [("qwen3_moe", "sdpa", False), ("qwen3_moe", "sdpa", True), ("gpt_oss", "eager", True), ("gemma2", "eager", False)],
)
def test_transformers_without_hooks(family: str, implementation: str, padded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "use_cache": False,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    if family == "gemma2":
        config: Any = transformers.Gemma2Config(**sizes, sliding_window=4, query_pre_attn_scalar=8)
        softcap = 50.0 if implementation == "eager" else 0.0
    elif family == "gpt_oss":
        config = transformers.GptOssConfig(**sizes, **experts, sliding_window=4)
        softcap = 0.0
    else:
        config = transformers.Qwen3MoeConfig(**sizes, **experts)
        softcap = 0.0
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if family != "gemma2":
        model.set_experts_implementation("grouped_mm")
    inputs = {"input_ids": torch.randint(1, 32, (2, 12)), "labels": torch.randint(1, 32, (2, 12))}
    if padded:
        inputs["attention_mask"] = torch.ones(2, 12, dtype=torch.int64)
    program = traced(model, inputs)
    assert RewriteAttention()(program).modified
    assert "attention" not in program.notes
    nodes = [n for n in program.forward.graph.nodes if op_name(n) == "oomc.attention"]
    assert len(nodes) == 2
    assert [n.args[7] for n in nodes] == ([None, None] if family == "qwen3_moe" else [4, None])
    assert [n.args[8] for n in nodes] == [softcap] * 2
    assert all((n.args[3] is not None) == (family == "gpt_oss") for n in nodes)
    assert all(meta.value(n.args[1]).shape[1] == 2 for n in nodes)
    assert all((n.args[4] is not None) == padded for n in nodes)
    assert not square_tensors(program)
    assert_same(program, model, inputs)

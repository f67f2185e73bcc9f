"""rewrite_experts on exported graphs: numbers, the canonical form, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomc import meta
from oomc.passes.rewrite_experts import RewriteExperts, explain
from oomc.program import Program
from tests.traced import assert_same, ops_of, traced, values_are_right

E, K, D, H = 4, 2, 16, 8
CANONICAL = ["oomc.route", "oomc.dispatch", "oomc.combine"]


class Model(nn.Module):
    """Embedding, then mixture-of-experts layers with a residual."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Base(nn.Module):
    """Router and stacked weights, [E, D, H] and [E, H, D]."""

    def __init__(self, k: int = K, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.k, self.options = k, options
        self.router = nn.Linear(D, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, D, H) * 0.3)
        self.w3 = nn.Parameter(torch.randn(E, D, H) * 0.3)
        self.w2 = nn.Parameter(torch.randn(E, H, D) * 0.3)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.router(x).softmax(-1).topk(self.k, -1)
        return weights / weights.sum(-1, keepdim=True) if self.k > 1 else weights, index

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x.view(-1, D)).view(x.shape)

    def tokens(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Permuted(Base):
    """As torchtitan does it: sort, grouped GEMMs, and several ways back.

    The grouped GEMM can be traced in bf16 only, but runs in fp32 as well.
    """

    dtype: torch.dtype = torch.bfloat16

    def gemm(self, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x.to(self.dtype), w.to(self.dtype), offs=ends).float()

    def tokens(self, x: Tensor) -> Tensor:
        before, back = self.options.get("before", False), self.options.get("back", "scatter_add")
        scores, index = self.route(x)
        counts = F.one_hot(index.view(-1), E).sum(0)
        order = torch.argsort(index.view(-1), stable=True)
        token = order // self.k
        rows = x[token] if back != "scatter_add" else torch.gather(x, 0, token[:, None].expand(-1, D))
        sorted_scores = scores.view(-1)[order]
        if before:
            rows = rows * sorted_scores[:, None]
        ends = counts.cumsum(0).to(torch.int32)
        h = F.silu(self.gemm(rows, self.w1, ends)) * self.gemm(rows, self.w3, ends)
        y = self.gemm(h, self.w2, ends)
        if self.options.get("sentinel"):
            y = y.masked_fill((index.view(-1)[order] >= E)[:, None], 0.0)
        if back == "gather":
            y = y[torch.argsort(order)].view(-1, self.k, D)
            return y.sum(1) if before else torch.bmm(scores[:, None], y).squeeze(1)
        if not before:
            y = y * sorted_scores[:, None]
        if back == "index_add":
            return torch.zeros_like(x).index_add(0, token, y)
        base = x * 0.5 if self.options.get("shared") else torch.zeros_like(x)
        return base.scatter_add(0, token[:, None].expand(-1, D), y)


class Loop(Base):
    """One matmul an expert, in a static loop."""

    def forward(self, x: Tensor) -> Tensor:
        if self.options.get("flat", True):
            return self.tokens(x.view(-1, D)).view(x.shape)
        return self.tokens(x)

    def expert(self, e: int, x: Tensor) -> Tensor:
        return (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]

    def tokens(self, x: Tensor) -> Tensor:
        form = self.options.get("form", "mask")
        scores, index = self.route(x)
        out = torch.zeros_like(x)
        dense = torch.zeros(*x.shape[:-1], E).scatter(-1, index, scores)
        hot = F.one_hot(index, E)
        for e in range(E):
            if form == "mask":
                weight = torch.where(index == e, scores, 0.0).sum(-1, keepdim=True)
                out = out + self.expert(e, x) * weight
            elif form == "scatter":
                out = out + dense[..., e : e + 1] * self.expert(e, x)
            elif form == "one_hot":
                weight = (hot[..., e] * scores).sum(-1)
                out = out + weight[..., None] * self.expert(e, x)
            elif form == "zeroed":
                chosen = (index == e).any(-1, keepdim=True)
                weight = (scores * (index == e)).sum(-1, keepdim=True)
                y = self.expert(e, torch.where(chosen, x, 0.0))
                out = out + torch.where(chosen, y * weight, 0.0)
            elif form == "before":
                weight = (scores * (index == e)).sum(-1, keepdim=True)
                out = out + self.expert(e, x * weight)
        if form == "stack":
            every = torch.stack([self.expert(e, x) for e in range(E)], dim=-2)
            picked = every.gather(-2, index[..., None].expand(*index.shape, D))
            out = (picked * scores[..., None]).sum(-2)
        return out


class Biased(Loop):
    """Linear layers as experts, with biases, a parameter each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.w1, self.w2, self.w3
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)) for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        y: Tensor = self.experts[e](x)
        return y


class Switch(Loop):
    """Top-1 without a dimension for it."""

    def tokens(self, x: Tensor) -> Tensor:
        score, index = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * torch.where(index == e, score, 0.0)[..., None]
        return out


class Mixing(Loop):
    """A gate that looks at other tokens: not one row at a time."""

    def expert(self, e: int, x: Tensor) -> Tensor:
        h = x @ self.w1[e]
        return (h - h.mean(0)) @ self.w2[e]


class Uneven(Loop):
    """Experts that are not alike."""

    def expert(self, e: int, x: Tensor) -> Tensor:
        h = x @ self.w1[e]
        return (h.relu() if e else h.tanh()) @ self.w2[e]


class Dense(Loop):
    """All experts for all tokens: no choice that the canonical form could make use of."""

    def tokens(self, x: Tensor) -> Tensor:
        weights, _ = self.router(x).softmax(-1).sort(-1)
        parts = [self.expert(e, x) * weights[..., e : e + 1] for e in range(E)]
        return torch.stack(parts).sum(0)


class Capacity(Permuted):
    """Slots past the first so many of all are dropped; few tokens do not show it."""

    def tokens(self, x: Tensor) -> Tensor:
        scores, index = self.route(x)
        order = torch.argsort(index.view(-1), stable=True)
        ends = F.one_hot(index.view(-1), E).sum(0).cumsum(0).to(torch.int32)
        y = self.gemm(x[order // self.k], self.w1 @ self.w2, ends)
        kept = (torch.arange(y.shape[0]) < self.options["limit"])[:, None]
        y = torch.where(kept, y, 0.0) * scores.view(-1)[order][:, None]
        return torch.zeros_like(x).index_add(0, order // self.k, y)


def batch(b: int = 2, s: int = 12) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 32, (b, s), generator=torch.Generator().manual_seed(b * s))}


def check_form(program: Program, gemms: int, layers: int = 1) -> None:
    found = ops_of(program.forward.graph)
    assert [found.count(op) for op in CANONICAL] == [layers] * 3
    assert found.count("oomc.grouped_mm") == gemms * layers
    for old in (
        "_grouped_mm",
        "transformers.grouped_mm_fallback",
        "bmm",
        "index_put",
        "scatter_add",
        "index_add",
        "histc",
    ):
        assert old not in found
    assert values_are_right(program.forward.graph)
    for node in program.forward.graph.nodes:
        if str(node.target).startswith("oomc."):
            assert any("layer" in m or "mlp" in m for m in meta.modules(node)), node
            assert meta.source(node)


def rewritten(model: nn.Module, inputs: dict[str, Tensor]) -> Program:
    program = traced(model, inputs)
    assert RewriteExperts()(program).modified
    assert not RewriteExperts()(program).modified
    return program


LOOPS = [
    *(Loop(form=f) for f in ("mask", "scatter", "one_hot", "zeroed", "stack")),
    *(Loop(form=f, flat=False) for f in ("mask", "zeroed", "stack")),
    Biased(), Biased(form="zeroed", flat=False), Switch(), Loop(k=1), Loop(k=3),
]  # fmt: skip


@pytest.mark.parametrize("layer", LOOPS, ids=lambda m: f"{type(m).__name__}-{m.options}-{m.k}")
def test_static_loops(layer: Base) -> None:
    model = Model(layer)
    program = rewritten(model, batch())
    check_form(program, 2 if isinstance(layer, Biased) else 3)
    if isinstance(layer, Biased):
        assert "stacked" in program.notes["experts"][0]
        assert "layers.0" in program.notes["experts"][0]
        assert ops_of(program.forward.graph).count("oomc.grouped_bias") == 2
    else:
        assert "experts" not in program.notes
    for b, s in ((2, 12), (3, 7)):
        assert_same(program, model, batch(b, s))


PERMUTED = [
    *(Permuted(back=b, before=before) for b in ("scatter_add", "index_add", "gather") for before in (False, True)),
    Permuted(shared=True), Permuted(k=1), Permuted(sentinel=True),
]  # fmt: skip


@pytest.mark.parametrize("layer", PERMUTED, ids=lambda m: f"{m.options}-{m.k}")
def test_permuted_layers(layer: Permuted) -> None:
    model = Model(layer)
    program = rewritten(model, batch())
    check_form(program, 3)
    layer.dtype = torch.float32
    for node in program.forward.graph.nodes:
        node.args = tuple(torch.float32 if a is torch.bfloat16 else a for a in node.args)
    program.forward.recompile()
    for b, s in ((2, 12), (3, 7)):
        assert_same(program, model, batch(b, s))


def test_two_layers() -> None:
    model = Model(Loop(), Loop(form="scatter"), Biased())
    program = rewritten(model, batch())
    found = ops_of(program.forward.graph)
    assert found.count("oomc.combine") == 3
    assert_same(program, model, batch())


@pytest.mark.parametrize(
    "layer",
    [Mixing(), Uneven(), Loop(form="before"), Capacity(limit=12), Capacity(limit=5000)],
    ids=lambda m: type(m).__name__,
)
def test_what_is_not_understood_is_left_alone(layer: Base) -> None:
    model = Model(layer)
    program = traced(model, batch())
    before = str(program.forward.graph)
    assert not RewriteExperts()(program).modified
    assert str(program.forward.graph) == before
    assert "layers.0: left as it is" in program.notes["experts"][0]
    assert_same(program, model, batch())


def test_a_sum_over_all_experts() -> None:
    assert not RewriteExperts()(traced(Model(Dense()), batch())).modified


def test_a_model_without_experts() -> None:
    model = Model(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)), nn.Linear(D, D), nn.Linear(D, D))
    program = traced(model, batch())
    assert not RewriteExperts()(program).modified
    assert "experts" not in program.notes


def transformer(family: str, implementation: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": D, "intermediate_size": H, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": E, "num_local_experts": E, "num_experts_per_tok": K,
        "moe_intermediate_size": H, "use_cache": False, "max_position_embeddings": 64, "pad_token_id": 0,
        "first_k_dense_replace": 0, "n_routed_experts": E, "n_group": 2, "topk_group": 1, "q_lora_rank": None,
        "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    config._attn_implementation = "eager"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    return model


def text(b: int = 2, s: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(1, 32, (b, s), generator=torch.Generator().manual_seed(b * s))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(f, i) for f in ("Qwen3Moe", "GptOss") for i in ("grouped_mm", "batched_mm")] + [("DeepseekV3", "grouped_mm")],
)
def test_transformers_without_hooks(family: str, implementation: str) -> None:
    model = transformer(family, implementation)
    program = rewritten(model, text())
    assert "experts" not in program.notes
    check_form(program, 2)
    assert ops_of(program.forward.graph).count("oomc.grouped_bias") == (2 if family == "GptOss" else 0)
    for b, s in ((2, 12), (3, 7)):
        assert_same(program, model, text(b, s))


def test_explains_a_loop_over_hits() -> None:
    model = transformer("Qwen3Moe", "eager")
    with pytest.raises(Exception) as caught:
        traced(model, text())
    found = explain(caught.value, model)
    assert found is not None
    where, fix = found
    assert "model.layers.0.mlp.experts" in where
    assert "grouped_mm" in fix


def test_explains_nothing_else() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model = Model(Fails())
    with pytest.raises(Exception) as caught:
        traced(model, batch())
    assert explain(caught.value, model) is None

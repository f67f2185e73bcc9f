"""What an attention mask is: decided by its values, not by how it is written.

The nodes that compute the mask are run at a few small batch and sequence sizes. A mask that depends on sizes only is
compared with full, causal and sliding-window masks. One that also depends on a [B, S] input (padding, document ids,
positions that start anew) is run on sample inputs, and is a mask of segments if some [B, S] integer value that the
graph computes for it explains it: query i sees key j if their values are equal (and the base mask lets it).

    %le = aten.le.Tensor(%key, %query)
    %keep = aten.index.Tensor(%attention_mask_bool, [%batch, %key])   =>   Mask(causal=True, window=None,
    %and_1 = aten.__and__.Tensor(%le, %keep)                                    segments=%attention_mask_bool)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from oomc import meta, private
from oomc.match import Concrete, Unknown, ancestors, int_literals, op_name, same_size, symbols
from oomc.program import Program

# An additive term this low takes a score out of the softmax; models write -inf, finfo.min, -1e9 or -1e4.
HIDES = -1e4
# Up to this length masks are run as they are; windows longer than it are scaled down together with their literal.
LONGEST = 1024
# Integers from here on mean "to the end", as in x[1:].
FOREVER = 1 << 40
BATCH = 4

Samples = Callable[[list[int], int], Iterator[Tensor]]


@dataclass(frozen=True)
class Term:
    """One mask of an attention: added to its scores, or a bool that says what is seen (or, inverted, hidden)."""

    node: fx.Node
    inverted: bool = False


@dataclass(frozen=True)
class Mask:
    """What a mask lets a query see; the fields are those of `oomc::attention`."""

    causal: bool
    window: int | None = None
    segments: fx.Node | None = None


def decide(terms: tuple[Term, ...], query: fx.Node, program: Program) -> Mask | None:
    """The mask that `terms` make together for self-attention of `query` [B, H, S, D], or None if it is none of ours."""
    if not terms:
        return Mask(causal=False)
    try:
        return _Decision(terms, query, program).mask()
    except Unknown:
        return None


class _Decision:
    """One call of `decide`."""

    def __init__(self, terms: tuple[Term, ...], query: fx.Node, program: Program) -> None:
        self.terms, self.program = terms, program
        self.slice = ancestors([t.node for t in terms], stop=lambda n: op_name(n) == "sym_size")
        self.symbols = symbols(self.slice | {query})
        val = meta.tensor(query)
        assert val is not None
        self.batch, self.length = val.shape[0], val.shape[-2]
        self.of_length = {s.name for s in getattr(private.expression(self.length), "free_symbols", ())}
        self.specs = dict(zip(program.forward.graph.find_nodes(op="placeholder"), program.inputs))
        self.data = [n for n in self.slice if n.op == "placeholder" and self._is_data(n)]
        self.literals = sorted(n for n in int_literals(self.slice) if 1 < n < FOREVER)

    def _is_data(self, node: fx.Node) -> bool:
        spec, val = self.specs[node], meta.tensor(node)
        if spec.kind in ("constant", "buffer"):
            return False
        if spec.kind != "input" or val is None or val.dim() != 2:
            raise Unknown(f"the mask depends on {spec.kind} {spec.target}")
        return True

    def _leaf(self, node: fx.Node) -> Tensor:
        """Constants and buffers by value; a buffer's value is known if capture left it with the program."""
        target = self.specs[node].target
        known = {**self.program.notes.get("buffers", {}), **self.program.constants}.get(target)
        if known is None or isinstance(known, private.FakeTensor) or known.is_meta:
            raise Unknown(f"the value of {target} is not known")
        return known.detach().cpu()

    def mask(self) -> Mask | None:
        """See `decide`."""
        found = self._with(everything)
        # An input named a mask holds zeros and ones by contract, others any integers.
        if found is None and self.data and all("mask" in self.specs[n].target for n in self.data):
            found = self._with(padding)
        return found

    def _with(self, samples: Samples) -> Mask | None:
        """The mask, if it is one of ours for all `samples` of its inputs."""
        # Past every literal that could be a window, and past all of them together.
        short = [n for n in self.literals if n <= LONGEST]
        lengths = {6, 13, *(n + 4 for n in short), min(sum(short), 2 * LONGEST) + 7}
        first = self._look(sorted(lengths) if self.of_length else [0], {}, 13, samples)
        if first is None:
            return None
        (causal, window), explaining = first
        for literal in (n for n in self.literals if n > LONGEST and self.of_length):
            # The mask's form as a function of a large literal: seen at two small stand-ins for it, then extrapolated.
            seen: set[tuple[bool, int | None]] = set()
            for small in (5, 8):
                look = self._look([4, 13, 17, max(lengths)], {literal: small}, small, samples)
                if look is None:
                    return None
                (also_causal, narrow), also = look
                seen.add((also_causal, None if narrow is None else narrow - small + literal))
                explaining = [n for n in explaining if n in also]
            wide = {w for _, w in seen if w is not None}
            if len(wide) > 1 or {c for c, _ in seen} != {causal} or (wide and len(seen) > 1):
                return None
            if wide and window is None:
                window = wide.pop()
        if not self.data:
            return Mask(causal, window)
        return Mask(causal, window, explaining[0]) if explaining else None

    def _look(
        self, lengths: list[int], literals: dict[int, int], needed: int, samples: Samples
    ) -> tuple[tuple[bool, int | None], list[fx.Node]] | None:
        """(causal, window) at these lengths, and the values that explain the rest as segments."""
        looks: list[tuple[int, bool, int | None]] = []
        outcomes: list[tuple[dict[fx.Node, Tensor], Tensor]] = []
        for length in lengths:
            union: Tensor | None = None
            try:
                for sample in samples(self.literals, length) if self.data else [None]:
                    given = {n: sample.to(meta.value(n).dtype) for n in self.data} if sample is not None else {}
                    sizes = {s: length if s in self.of_length else BATCH for s in self.symbols}
                    run = Concrete(sizes, dict(given), self._leaf, literals)
                    seen = self._seen(run)
                    union = seen.any(0) if union is None else union | seen.any(0)
                    outcomes.append((self._row_values(run), seen))
            except Unknown:
                # The model itself cannot go beyond a length that is written into it.
                if length <= needed:
                    return None
                continue
            assert union is not None
            shape = shape_of(union)
            if shape is None:
                return None
            looks.append((union.shape[0], *shape))
        base = agree(looks)
        if base is None:
            return None
        if not self.data:
            return (base, []) if all(bool((seen == seen[:1]).all()) for _, seen in outcomes) else None
        candidates = [n for n in outcomes[0][0] if all(n in values for values, _ in outcomes)]
        explaining = [n for n in candidates if all(explains(values[n], seen, *base) for values, seen in outcomes)]
        return (base, explaining) if explaining else None

    def _seen(self, run: Concrete) -> Tensor:
        """Bool [B, S, S]: what all terms together let be seen.

        Raises:
            Unknown: a term adds a bias, or differs between heads.
        """
        s, b = run.size(self.length), run.size(self.batch)
        seen = torch.ones(b, s, s, dtype=torch.bool)
        for term in self.terms:
            part = run(term.node)
            if part.dtype != torch.bool:
                hidden = part <= HIDES
                if not bool(((part == 0) | hidden).all()):
                    raise Unknown("the mask holds a bias")
                part = ~hidden
            part = part ^ term.inverted
            if part.dim() > 3:
                if not bool((part == part.narrow(-3, 0, 1)).all()):
                    raise Unknown("the mask differs between heads")
                part = part.narrow(-3, 0, 1).squeeze(-3)
            try:
                seen = seen & part.expand(b, s, s)
            except RuntimeError as error:
                raise Unknown("the mask is of another shape") from error
        return seen

    def _row_values(self, run: Concrete) -> dict[fx.Node, Tensor]:
        """Integers [B or 1, S], one a token, that the mask is computed from; those nearest to the inputs first."""
        found = {}
        for node in self.program.forward.graph.nodes if self.data else ():
            val = meta.tensor(node) if node in self.slice else None
            if val is None or val.dim() < 2 or not same_size(val.shape[-1], self.length):
                continue
            wide = [n for n in val.shape[:-1] if not same_size(n, 1)]
            if len(wide) > 1 or not all(same_size(n, self.batch) for n in wide):
                continue
            value = run(node).reshape(-1, run.size(self.length))
            if not value.is_floating_point() or bool((value == value.to(torch.int64)).all()):
                found[node] = value.to(torch.int64)
        return found


def shape_of(seen: Tensor) -> tuple[bool, int | None] | None:
    """(causal, window) of a bool [S, S] mask; a window that hides nothing is None. None if it is of another form."""
    s = seen.shape[0]
    if bool(seen.all()):
        return (False, None) if s > 1 else (True, None)
    window = int(seen[-1].sum())
    if window == 0 or not torch.equal(seen, band(s, window)):
        return None
    return True, None if window >= s else window


def band(s: int, window: int) -> Tensor:
    """Bool [S, S]: causal, each query sees `window` keys with its own."""
    distance = torch.arange(s)[:, None] - torch.arange(s)
    return (distance >= 0) & (distance < window)


def agree(looks: list[tuple[int, bool, int | None]]) -> tuple[bool, int | None] | None:
    """The one (causal, window) that looks at several lengths are looks of, or None."""
    windows = {w for _, _, w in looks if w is not None}
    if not looks or len({c for _, c, _ in looks}) != 1 or len(windows) > 1:
        return None
    window = windows.pop() if windows else None
    if window is not None and any(w is None and s > window for s, _, w in looks):
        return None
    return looks[0][1], window


def explains(value: Tensor, seen: Tensor, causal: bool, window: int | None) -> bool:
    """Whether `seen` [B, S, S] is the base mask within segments of equal `value` [B, S].

    Tokens of value 0 that no other token ever sees are padding. What padding itself sees then is of no account: nothing
    that counts is computed from it.
    """
    s = seen.shape[-1]
    base = band(s, window or s) if causal else torch.ones(s, s, dtype=torch.bool)
    value = value.expand(seen.shape[0], s)
    expected = base & (value[:, :, None] == value[:, None, :])
    if torch.equal(seen, expected):
        return True
    pads = value == 0
    others = ~torch.eye(s, dtype=torch.bool)
    if bool((seen & others & pads[:, None, :]).any()):
        return False
    return torch.equal(seen[~pads], expected[~pads])


def padding(literals: list[int], s: int) -> Iterator[Tensor]:
    """Sample [B, S] masks of zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(s)
    cut = torch.tensor([0, 1, s // 2, s - 1])[:, None]
    yield torch.ones(BATCH, s, dtype=torch.int64)
    yield (position >= cut).to(torch.int64)
    yield (position < s - cut).to(torch.int64)
    if s <= 64:
        yield torch.randint(0, 2, (BATCH, s), generator=generator)


def everything(literals: list[int], s: int) -> Iterator[Tensor]:
    """Sample [B, S] integers: positions, document ids, padding, and every literal of the graph as a padding id."""
    generator = torch.Generator().manual_seed(1)
    position = torch.arange(s).expand(BATCH, s)
    cut = torch.tensor([1, 2, max(1, s // 2), s])[:, None]
    yield position
    yield position % cut
    yield 1 + position // cut
    yield from padding(literals, s)
    if s <= 64:
        yield torch.randint(0, 4, (BATCH, s), generator=generator)
    for literal in literals:
        yield torch.where(position >= s - cut // 2, literal, 1)

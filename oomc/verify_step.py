"""The verifier of the step graph: what is computed from what (here), and how memory moves (verify_moves).

Every node is given an identity, which says what its value is: an input, a parameter, the value or the saved value of a
workset, a dropout state. What each run must be given then follows from its workset and its form alone. Gradients are
followed as sums of contributions: each backward run contributes to the gradient of each of its inputs, and every
contribution must arrive exactly once where it belongs.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from typing import Any

from torch import fx

from oomc import in_place, meta, private, steps
from oomc.faults import Faults
from oomc.program import Program
from oomc.simulate import Projection
from oomc.verify_moves import verify_moves
from oomc.verify_values import verify_values
from oomc.worksets import Workset

STAGES = (
    "assemble", "choose_residency", "insert_chunks", "insert_recompute", "insert_value_offload", "overwrite_values",
    "insert_offload", "insert_prefetch", "insert_updates", "schedule", "lower",
)  # fmt: skip
Identity = tuple[Any, ...]
Contribution = tuple[str, int]
Sum = Counter[Contribution]
LOSS: Contribution = ("loss", 0)


def verify_step(program: Program, after: str, faults: Faults) -> None:
    """Check the step graph as it is once the pass `after` has run."""
    stage = STAGES.index(after) if after in STAGES else len(STAGES)
    reached = frozenset(STAGES[: stage + 1])
    verify_words(program, reached, faults)
    if not faults.found:
        _Data(program, reached, faults).verify()
        verify_moves(program, reached, faults)
        verify_values(program, reached, faults)
        verify_overwritten(program, faults)


def verify_overwritten(program: Program, faults: Faults) -> None:
    """What a backward in place writes over is memory of its own that nothing reads afterwards."""
    for node in program.graph.nodes:
        if node.target in steps.COMPUTE and node.args[2] == steps.IN_PLACE:
            reason = in_place.why_not(program, node)
            if reason:
                faults.add(reason, node)


def verify_projection(program: Program, projection: Projection, allowed: int, faults: Faults) -> None:
    """The projected device bytes are within `allowed` at every node."""
    for node in program.graph.nodes:
        if projection.during.get(node.name, 0) > allowed:
            faults.add(f"projected {projection.during[node.name]:,} bytes, allowed {allowed:,}", node)


def verify_words(program: Program, reached: frozenset[str], faults: Faults) -> None:
    """Every node is a word of the step graph, called as it wants to be, of slabs and forms that there are."""
    slabs = {s.name for s in program.slabs}
    inputs = [s for s in program.inputs if s.kind == "input"]
    placeholders = program.graph.find_nodes(op="placeholder")
    if len(placeholders) != 1 + len(inputs):
        faults.add(f"{len(placeholders)} placeholders, not the runtime and {len(inputs)} inputs")
    gone = {steps.weights: "insert_prefetch", steps.gradients: "insert_offload"}
    tokens = {
        steps.wait: steps.fetch, steps.release: steps.fetch, steps.retire: steps.offload, steps.discard: steps.store,
        steps.restore: steps.store, steps.restored: steps.restore,
    }  # fmt: skip
    for node in program.graph.nodes:
        word: Any = node.target
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function" or (word not in steps.LANES and word is not operator.getitem) or node.kwargs:
            faults.add(f"{word} is no word of the step graph", node)
            continue
        if word is operator.getitem:
            continue
        try:
            bound = inspect.signature(word).bind(*node.args).arguments
        except TypeError as error:
            faults.add(f"{word.__name__}: {error}", node)
            continue
        if "rt" in bound and bound["rt"] is not placeholders[0]:
            faults.add("the first argument is not the runtime", node)
        if "slab" in bound and bound["slab"] not in slabs:
            faults.add(f"there is no slab {bound['slab']!r}", node)
        if word in steps.COMPUTE:
            _verify_form_words(program, node, bound, faults)
        if gone.get(word, "") in reached:
            faults.add(f"{word.__name__} is left in the graph", node)
        copies = bound.get("copies", (bound["copy"],) if "copy" in bound else ())
        for copy in copies:
            kind = tokens.get(word, steps.offload)
            if not isinstance(copy, fx.Node) or copy.target is not kind:
                faults.add(f"{word.__name__} is given {copy}, which is no {kind.__name__}", node)


def _verify_form_words(program: Program, node: fx.Node, bound: dict[str, Any], faults: Faults) -> None:
    form = program.forms.get(bound["form"])
    if form is None or bound["variant"] not in steps.VARIANTS:
        faults.add(f"there is no form {bound['form']!r} with variant {bound['variant']!r}", node)
        return
    if bool(form.chunk) != (node.target is steps.run_chunks):
        faults.add(f"{form.key} is {'' if form.chunk else 'not '}to run in chunks", node)
    graph = getattr(form, bound["variant"])
    wanted = 0 if graph is None else len(graph.graph.find_nodes(op="placeholder")) - len(form.carried(bound["variant"]))
    if graph is None or len(bound.get("args", ())) != wanted:
        faults.add(f"{len(bound.get('args', ()))} arguments, but {form.key} {bound['variant']} takes {wanted}", node)


class _Data:
    """What is computed from what."""

    def __init__(self, program: Program, reached: frozenset[str], faults: Faults) -> None:
        self.program, self.reached, self.faults = program, reached, faults
        self.plan = program.plan
        self.worksets = {w.name: w for b in program.blocks for w in b.worksets}
        self.params = {s.name: s.params for s in program.slabs}
        inputs = zip(program.forward.graph.find_nodes(op="placeholder"), program.inputs, strict=True)
        self.specs = dict(inputs)
        self.loss, self.count = program.loss, program.count
        self.counted = 0
        self.identities: dict[fx.Node, Identity] = {}
        self.sums: dict[Any, Sum] = {}
        self.arrived: dict[str, Sum] = {}
        self.rngs: dict[int, fx.Node] = {}
        self.regenerated: dict[Identity, fx.Node] = {}
        self.expected = self._expect_contributions()

    def _expect_contributions(self) -> dict[Any, set[Contribution]]:
        """For each parameter's name and each forward value: which backward runs contribute to its gradient."""
        expected: dict[Any, set[Contribution]] = {self.loss: {LOSS}}
        self.backward: set[str] = set()
        for workset in reversed(self.worksets.values()):
            form = self.program.forms[workset.form]
            if form.backward is None or not any(workset.outputs[i] in expected for i in form.tangents):
                continue
            self.backward.add(workset.name)
            (output,) = form.backward.graph.find_nodes(op="output")
            for position, i in enumerate(form.gradients):
                if isinstance(output.args[0][position], fx.Node):
                    source = workset.inputs[i]
                    key = self.specs[source].name if source in self.specs else source
                    expected.setdefault(key, set()).add((workset.name, position))
        return expected

    def verify(self) -> None:
        """Walk the graph once, then see that nothing is missing."""
        runs: Counter[tuple[str, str]] = Counter()
        for node in self.program.graph.nodes:
            self.identities[node] = self._identify(node)
            if node.target in steps.COMPUTE:
                runs[meta.note(node).workset, steps.phase_of(node.args[2])] += 1
                self._verify_run(node)
            elif node.target in (steps.offload, steps.gradients):
                self._verify_gradients(node)
            elif node.target is steps.count:
                self._verify_count(node)
            elif node.op == "output" and self._known(node.args[0]) != ("value", self.loss.name):
                self.faults.add("the step does not return the loss", node)
        if self.counted != int(self.count is not None):
            self.faults.add(f"the valid labels are counted {self.counted} times, not {int(self.count is not None)}")
        for name in self.worksets:
            for variant, wanted in (("forward", 1), ("backward", int(name in self.backward))):
                if runs[name, variant] != wanted:
                    self.faults.add(f"{name} runs {variant} {runs[name, variant]} times, not {wanted}")
        for spec in self.specs.values():
            if spec.kind != "parameter":
                continue
            wanted_from = self.expected.get(spec.name, set())
            missing = wanted_from - set(self.arrived.get(spec.name, ()))
            for workset, _ in sorted(missing):
                self.faults.add(f"the gradient of {spec.name} from {workset} is never offloaded")

    # --- identities

    def _identify(self, node: fx.Node) -> Identity:
        word, args = node.target, node.args
        if node.op == "placeholder":
            names = ["", *(s.target for s in self.specs.values() if s.kind == "input")]
            index = self.program.graph.find_nodes(op="placeholder").index(node)
            return ("input", names[index]) if index else ("runtime",)
        if word is steps.size:
            return ("size", self._size_letter(node))
        if word is steps.calc:
            given = [self._known(a)[1] for a in args[1:]]
            if any(g not in (letter, "1") for g, letter in zip(given, "BS", strict=True)):
                self.faults.add(f"the formula is computed from {given}, not from B and S", node)
            return ("size", args[0])
        if word is steps.resident:
            return ("resident", args[1])
        if word is steps.rng:
            block: Any = args[1]
            if self.rngs.setdefault(block, node) is not node:
                self.faults.add(f"the dropout state of block {block} is drawn a second time", node)
            return ("dropout state of block", block)
        if word is operator.getitem:
            return self._identify_part(node)
        if word is steps.restored:
            return self._known(args[1].args[1].args[2])  # type: ignore[union-attr]
        self._identify_sum(node)
        return (getattr(word, "__name__", str(word)),)

    def _known(self, arg: Any) -> Identity:
        return self.identities.get(arg, ("unknown", "")) if isinstance(arg, fx.Node) else ("size", str(arg))

    def _size_letter(self, node: fx.Node) -> str:
        source = self._known(node.args[0])
        val = next((meta.tensor(n) for n, s in self.specs.items() if ("input", s.target) == source), None)
        axes = self.program.notes["symbols"].axes(val) if val is not None else (None, None)
        letter = next((name for name, dim in zip("BS", axes, strict=True) if dim == node.args[1]), "")
        if not letter:
            self.faults.add("it is neither the batch nor the sequence size", node)
        return letter

    def _identify_part(self, node: fx.Node) -> Identity:
        holder, index = node.args
        word = holder.target if isinstance(holder, fx.Node) else None
        if word is steps.fetch:
            self.faults.add(f"it uses %{holder} before any wait for it", node)
        elif word in (steps.weights, steps.wait, steps.device_weights):
            token = holder.args[1] if word is steps.wait else holder  # type: ignore[union-attr]
            params = self.params[token.args[1]]  # type: ignore[union-attr, index]
            if isinstance(index, int) and 0 <= index < len(params):
                return ("parameter", params[index])
        elif word in steps.COMPUTE:
            workset = self.worksets.get(meta.note(holder).workset)  # type: ignore[arg-type]
            if workset is not None and isinstance(index, int) and index >= 0:
                return self._identify_result(node, str(holder.args[2]), workset, index)  # type: ignore[union-attr]
        self.faults.add(f"entry {index} of %{holder} is nothing that is known", node)
        return ("unknown", node.name)

    def _identify_result(self, node: fx.Node, variant: str, workset: Workset, index: int) -> Identity:
        form = self.program.forms[workset.form]
        if steps.phase_of(variant) == "backward":
            if index < len(form.gradients):
                self.sums[node] = Counter({(workset.name, index): 1})
                return ("gradient", workset.name, index)
        elif index < len(workset.outputs):
            return ("value", workset.outputs[index].name)
        elif variant == "forward" and index < len(workset.outputs) + form.saved:
            return ("saved value", index - len(workset.outputs), "of", workset.name)
        self.faults.add(f"{form.key} {variant} has no result {index}", node)
        return ("unknown", node.name)

    def _identify_sum(self, node: fx.Node) -> None:
        word = node.target
        if word is steps.ones_like:
            if self._known(node.args[0]) != ("value", self.loss.name):
                self.faults.add("it starts the backward from what is not the loss", node)
            self.sums[node] = Counter({LOSS: 1})
        elif word is steps.zeros_like:
            self.sums[node] = Counter()
        elif word is steps.add:
            if any(a not in self.sums for a in node.args):
                self.faults.add("it adds what is no gradient", node)
            self.sums[node] = sum((self.sums.get(a, Counter()) for a in node.args), Counter())

    def _verify_count(self, node: fx.Node) -> None:
        """The count comes from the forward, and before any gradient that is weighed by it."""
        self.counted += 1
        value = node.args[1]
        if self.count is None or self._known(value) != ("value", self.count.name):
            self.faults.add(f"%{value} is not the number of valid labels", node)
        elif meta.note(value).phase != "forward":  # type: ignore[arg-type]
            self.faults.add(f"%{value} is computed again: the count comes from the forward", node)
        if self.arrived:
            self.faults.add("the valid labels are counted after gradients have left", node)

    # --- what runs are given

    def _verify_run(self, node: fx.Node) -> None:
        note, variant = meta.note(node), str(node.args[2])
        chunked = node.target is steps.run_chunks
        args = node.args[4 if chunked else 3 :]
        workset = self.worksets.get(note.workset)
        phase = steps.phase_of(variant)
        if phase == "recompute" and workset is not None and workset.block != note.block:
            phase = "regenerate"
            self._verify_regenerated(node, workset)
        if workset is None or workset.form != node.args[1] or note.phase != phase:
            self.faults.add(f"it says that it is {note.workset} in its {note.phase}, and is not", node)
            return
        if chunked and "insert_chunks" in self.reached:
            wanted_chunk = self.plan.chunks.get(workset.name) if self.plan is not None else None
            if wanted_chunk is None or tuple(node.args[3]) != wanted_chunk:  # type: ignore[arg-type]
                self.faults.add(f"it runs in chunks of {node.args[3]}, planned is {wanted_chunk}", node)
        form = self.program.forms[workset.form]
        sources = [self._of_input(s, workset) for s in workset.inputs]
        saved = [("saved value", i, "of", workset.name) for i in range(form.saved)]
        if steps.phase_of(variant) == "backward":
            outputs = [("value", n.name) for n in workset.outputs]
            pools: dict[str, list[Any]] = {"input": sources, "output": outputs, "saved": saved}
            wanted = [pools[kind][i] for kind, i in form.backward_takes]
            for i, tangent in zip(form.tangents, args[len(wanted) :], strict=True):
                self._verify_tangent(node, workset.outputs[i], tangent)
        else:
            wanted = sources + (saved if variant == "recompute" else [])
        takes = getattr(form, variant).graph.find_nodes(op="placeholder")
        for arg, want, take in zip(args, wanted, takes, strict=False):
            self._verify_argument(node, arg, want, take)

    def _of_input(self, source: Any, workset: Workset) -> Identity:
        if not isinstance(source, fx.Node):
            return ("size", self.program.notes["symbols"].formula(source))
        if source not in self.specs:
            return ("value", source.name)
        spec = self.specs[source]
        if spec.kind == "rng":
            return ("dropout state of block", self.program.blocks[workset.block].layer)
        return ("resident" if spec.kind in ("buffer", "constant") else spec.kind, spec.name)

    def _verify_argument(self, node: fx.Node, arg: Any, want: Identity, take: fx.Node) -> None:
        got = self._known(arg)
        if got != want:
            says = "; what is never recomputed comes from the first forward" if want[0] == "saved value" else ""
            self.faults.add(f"it must be given {_text(want)}, and is given {_text(got)} (%{arg}){says}", node)
        elif isinstance(arg, fx.Node) and _shape(arg) != _shape(take):
            self.faults.add(f"%{arg} is {_shape(arg)}, and the form takes {_shape(take)}", node)
        if not isinstance(arg, fx.Node) or meta.note(node).phase == "forward" or "insert_recompute" not in self.reached:
            return
        if self.plan is None or got[0] not in ("value", "saved value") or arg.target is steps.restored:
            return
        planned = self.plan.residency.get(meta.note(arg).source)
        if meta.note(arg).phase != "forward":
            if planned in ("keep", "offload"):
                self.faults.add(f"it uses %{arg}, which is computed again and is planned to {planned}", node)
            return
        if planned == "recompute" and got[0] == "value":
            self.faults.add(f"it uses %{arg} of the forward, which is planned to be recomputed", node)
        if planned == "offload" and "insert_value_offload" in self.reached:
            self.faults.add(f"it uses %{arg} of the forward, which is planned to be on the host", node)

    def _verify_regenerated(self, node: fx.Node, workset: Workset) -> None:
        """What an earlier block made is regenerated right before the backward of the block that needs it, and once."""
        note = meta.note(node)
        after = node
        while after.op != "output" and not (after.target in steps.COMPUTE and meta.note(after).phase == "backward"):
            after = after.next
        if meta.note(after).block != note.block or workset.block > note.block:
            self.faults.add(f"it regenerates {workset.name} for block {note.block}, and stands before %{after}", node)
        users = [user for part in node.users for user in part.users]
        if not any(meta.note(user).block == note.block and user.target in steps.COMPUTE for user in users):
            self.faults.add(f"nothing in block {note.block} uses what it regenerates: it can be made later", node)
        for part in node.users:
            value = self._identify(part)
            if any(meta.note(user).workset in self._others(value, workset) for user in part.users):
                if value in self.regenerated:
                    self.faults.add(
                        f"{_text(value)} is regenerated a second time, after %{self.regenerated[value]}", node
                    )
                self.regenerated[value] = part

    def _others(self, value: Identity, own: Workset) -> set[str]:
        """Worksets of other blocks that are made from a value."""
        return {
            w.name for w in self.worksets.values()
            if w.block != own.block and any(isinstance(s, fx.Node) and s.name == value[1] for s in w.inputs)
        }  # fmt: skip

    # --- gradients

    def _verify_tangent(self, node: fx.Node, output: fx.Node, tangent: Any) -> None:
        what = f"the gradient of {output.name}"
        self._compare(node, what, self.sums.get(tangent), Counter(self.expected.get(output, ())))
        if isinstance(tangent, fx.Node) and _shape(tangent) != _shape(output):
            self.faults.add(f"{what} is {_shape(tangent)}, not {_shape(output)}", node)

    def _verify_gradients(self, node: fx.Node) -> None:
        _, slab, names, grads, *_ = node.args
        if len(names) != len(grads) or len(set(names)) != len(names):  # type: ignore[arg-type]
            self.faults.add(f"{len(grads)} gradients for {len(set(names))} parameters", node)  # type: ignore[arg-type]
            return
        for name, grad in zip(names, grads, strict=True):  # type: ignore[arg-type]
            total = self.sums.get(grad)
            before = self.arrived.setdefault(name, Counter())
            if name not in self.params[slab]:  # type: ignore[index]
                self.faults.add(f"slab {slab} has no parameter {name}", node)
            if total is not None:
                self._compare(node, f"the gradient of {name}", total, Counter(self.expected.get(name, ())), part=True)
                before.update(total)
                if any(count > 1 for count in before.values()) and all(count == 1 for count in total.values()):
                    self.faults.add(f"the gradient of {name} is offloaded a second time", node)
            else:
                self.faults.add(f"%{grad} is no gradient", node)

    def _compare(self, node: fx.Node, what: str, got: Sum | None, want: Sum, part: bool = False) -> None:
        if got is None:
            self.faults.add(f"{what} is given as what is no gradient", node)
            return
        for workset, _ in sorted((want - got) if not part else ()):
            self.faults.add(f"{what} lacks the contribution of {workset}", node)
        for workset, position in sorted(got - want):
            says = "twice" if (workset, position) in want else "by mistake"
            self.faults.add(f"{what} has the contribution of {workset} {says}", node)


def _shape(node: fx.Node) -> str:
    val = meta.tensor(node)
    if val is None:
        return ""
    return f"{val.dtype}{[private.expression(s) for s in val.shape]}".replace("torch.", "")


def _text(identity: Identity) -> str:
    return " ".join(str(part) for part in identity)

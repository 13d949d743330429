"""Symbolic shape propagation: the worklist of TSCompiler 4.1 (Algorithm 1), with facts that hold everywhere.

Three things differ from the printed algorithm, where ``is_processed`` makes every result final. First, dims are read
through the ShapeContext, so an equality learned late (for example from a sibling's consumer) also holds for earlier
results. Second, a node whose inputs change under new facts is processed again. Third, a node that would have to guess
(broadcasting two unrelated symbols) is parked until no other work is left. The printed ``InferSibSymShape`` is the
``unify`` of a consumer's rule: it passes the consumer's requirement to the sibling's dims.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from onnx import TensorProto

from polydyn.errors import ModelError, PolydynError, ShapeError, UnsupportedError
from polydyn.graph.bodies import body_of, has_body
from polydyn.graph.branches import BRANCHES, readers_of, with_moved
from polydyn.graph.check import check_node, check_types, with_node
from polydyn.graph.dtypes import onnx_dtype
from polydyn.graph.fallback import FALLBACK, fallback_note
from polydyn.graph.importer import ImportedGraph, ModelInput, renamed
from polydyn.graph.inner import Inner, Types, captured_by, enter
from polydyn.graph.ir import SymbolSource
from polydyn.graph.older import modern
from polydyn.graph.operators import registry
from polydyn.graph.operators.registry import Inferred, OnnxNode, RanksDiffer, Rewritten
from polydyn.graph.regions import CannotCross, FallbackNodes, RepropagationNeeded, members, reads, region, with_regions
from polydyn.graph.sequences import without_sequences
from polydyn.graph.shape_values import in_range, infer_value
from polydyn.graph.typed import Asking, HostStepRequests, Typed
from polydyn.schedules.index import Index
from polydyn.schedules.names import given_back, internal_name
from polydyn.shapes.context import ShapeContext, Undecided
from polydyn.shapes.sizes import Dims


@cache
def load_operators() -> Mapping[str, registry.Operator]:
    """Import every module of ``graph/operators`` and ``graph/functions``, so that all operators are registered."""
    for folder in ("operators", "functions"):
        package = importlib.import_module(f"polydyn.graph.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return registry.OPERATORS


def propagate(
    graph: ImportedGraph, dims: Dims | None = None, values: Mapping[str, Inferred] | None = None, general: bool = False,
    left: FallbackNodes | None = None,
) -> Typed:  # fmt: skip
    """Infer the shape of every tensor. Raises UnsupportedError that lists all unsupported operators.

    ``values``: shape arithmetic that a body gets from outside, over the names of its inputs' dims. ``general``: two
    sizes that may be equal or 1 are not assumed equal. ``left``: collects unsupported or rejected nodes, which another
    runtime computes. Raises RepropagationNeeded if it has grown, because this changes the regions.
    """
    graph = without_sequences(graph)
    if left is not None:
        graph = with_regions(graph, left, is_built)
    check_supported(graph)
    facts = ShapeContext(dims, general)
    inferred: dict[str, Inferred] = {}
    sources = _init_inputs(graph.inputs, facts, inferred)
    facts.check_dims()
    inferred.update(values or {})
    worker = _Worklist(graph, facts, inferred, left, values is not None)
    worker.run()
    facts.notes += [fallback_note(m) for n in worker.nodes if n.fallback for m in members(n)]
    return replace(worker.view, nodes=tuple(worker.nodes), sources=sources)


SEQUENCES = "a sequence has a known number of elements, is a split into single rows, or grows by a tensor per iteration"
"""What sequences may be. The names of their operators alone would not say it, because most uses are built."""


NCHWC_DOMAIN = "com.microsoft.nchwc::"
"""Domain of convolutions whose layout ONNX Runtime chooses for one processor, after level ORT_ENABLE_EXTENDED."""


def check_supported(graph: ImportedGraph) -> None:
    """Reject a graph with unknown operators, naming each of them and the first node that uses it, or with strings.

    Raises ModelError if a node of a known operator violates ONNX's definition.
    """
    missing: dict[str, str] = {}
    for n in graph.nodes:
        if not is_built(n) and not n.fallback:
            missing.setdefault(n.op, n.name)
    if missing:
        some = any("Sequence" in op for op in missing)
        more = "use tensors (Reshape in place of a split, a scan output of a Loop), " if some else ""
        blocked = any(op.startswith(NCHWC_DOMAIN) for op in missing)
        more += "save the optimized model at level ORT_ENABLE_EXTENDED, " if blocked else ""
        names = ", ".join(f"{op} (node {node})" for op, node in sorted(missing.items()))
        raise UnsupportedError(
            f"{len(missing)} operator(s) of this model are not supported: {names}",
            node=next(iter(missing.values())), rule=SEQUENCES if some else None,
            remedy=f"{more}compile with Options(fallback='onnxruntime'), or write them as in docs/extending.md",
        )  # fmt: skip
    ours = [n for n in graph.nodes if not n.fallback]
    for n in ours:
        check_node(n)
    for x in (*graph.outputs, *(x for n in ours for x in n.inputs)):
        if x in graph.constants and graph.constants[x].dtype == object:
            onnx_dtype(TensorProto.STRING, tensor=x)


def is_built(node: OnnxNode) -> bool:
    """Check whether a node's operator has rules or a body."""
    return node.op in load_operators() or has_body(node)


def rules(node: OnnxNode) -> registry.Operator:
    """Return the shape rule and the expansion of a node."""
    return FALLBACK if node.fallback else registry.OPERATORS[node.op]


MAX_FORMULA = 50_000
"""Most characters of a size's formula. Where each node's size has the one before several times, formulas double."""


def _check_length(node: OnnxNode, name: str, axis: int, size: Index) -> None:
    """Raise UnsupportedError for a size whose formula is so long that planning would take hours and all memory."""
    length = len(str(size))  # the text is there: terms are sorted by it
    if length > MAX_FORMULA:
        symbols = sorted(size.symbols())
        raise UnsupportedError(
            f"the formula of the size of {name} along axis {axis} has {length} characters", node=node.name, tensor=name,
            dim=", ".join(map(given_back, symbols)), rule=f"a size is a formula of at most {MAX_FORMULA} characters",
            remedy=f"fix the size: dims={{{given_back(symbols[0])!r}: (n, n)}}" if symbols else "export the model anew",
        )  # fmt: skip


def _init_inputs(
    inputs: tuple[ModelInput, ...], facts: ShapeContext, inferred: dict[str, Inferred]
) -> tuple[SymbolSource, ...]:
    """Create symbols for the inputs' dynamic dims. A name used twice is one symbol; the second use is guarded."""
    sources: dict[str, SymbolSource] = {}
    taken = {internal_name(d) for x in inputs for d in x.dims or () if isinstance(d, str)}
    for x in inputs:
        if x.dims is None:
            raise UnsupportedError(
                f"the rank of input {x.name} is unknown", tensor=x.name,
                remedy=f'export with shapes, or name its axes: symbols={{"{x.name}": ("A", "B")}} for two',
            )  # fmt: skip
        shape: list[Index] = []
        for axis, d in enumerate(x.dims):
            if isinstance(d, int):
                shape.append(Index.of(d))
                continue
            name = internal_name(d) if d else d
            own = name if name and name not in sources else internal_name(f"{x.name}_{axis}")
            while own in sources or (own in taken and own != name):
                own += "_"
            sources[own] = SymbolSource(own, x.name, axis)
            size = facts.declare(own, f"{x.name} axis {axis}")
            if name and own != name:  # a separate symbol, so that every call is checked
                first = sources[name]
                why = f"{x.name} axis {axis} and {first.input} axis {first.axis} are both called {name}"
                size = facts.unify(own, name, why)
            shape.append(size)
        inferred[x.name] = Inferred(x.dtype, tuple(shape))
    return tuple(sources.values())


class _Worklist:
    """Algorithm 1: nodes whose inputs are known wait in a queue; results make successors eligible."""

    def __init__(
        self, graph: ImportedGraph, facts: ShapeContext, inferred: dict[str, Inferred],
        left: FallbackNodes | None = None, is_body: bool = False,
    ) -> None:  # fmt: skip
        self.facts, self.inferred, self.left, self.is_body = facts, inferred, left, is_body
        self.again = False
        self.nodes = list(graph.nodes)
        self.constants = dict(graph.constants)
        for name, array in self.constants.items():
            inferred[name] = Inferred(str(array.dtype), tuple(map(Index.of, array.shape)))
        self.view = Typed(graph, (), facts, inferred, self.constants, (), HostStepRequests(enter=self.enter))
        self.consumers: dict[str, list[OnnxNode]] = {}
        self.processed: dict[str, tuple[int, object]] = {}
        self.queue: deque[OnnxNode] = deque()
        self.parked: dict[str, tuple[OnnxNode, int]] = {}
        self.depth: dict[str, int] = {}
        """Maps an If to the number of readers in a row that moved into its branches last."""

    def run(self) -> None:
        """Process nodes until nothing changes. Guesses come last, one at a time."""
        self.add(self.nodes)
        while True:
            while self.queue:
                self.visit(self.queue.popleft(), assume=False)
            if self.requeue():
                continue
            if not self.parked:
                break
            node, _ = self.parked.pop(next(iter(self.parked)))
            self.visit(node, assume=True)
        if self.again:
            raise RepropagationNeeded
        self.demand_sizes()

    def enter(self, body: ImportedGraph, types: Types) -> Inner:
        """Infer the shapes inside a body of a node. A guess about sizes of the model's inputs is one of the model.

        A carried tensor that begins as [1] and grows by a broadcast has both sizes, so that none may be assumed.
        """
        general = self.facts.general or any(d is None for _, shape in types for d in shape)
        inner = enter(body, types, self.view, lambda graph, dims, values: propagate(graph, dims, values, general))
        own = {s for x in self.view.graph.inputs for d in self.view.tensor(x.name).shape for s in d.symbols()}
        pairs = [p for p in inner.typed.facts.guessed if all(d.symbols() <= own for d in p)]
        self.facts.guessed += [p for p in pairs if p not in self.facts.guessed]
        return inner

    def demand_sizes(self) -> None:
        """Require that no size is negative: add a guard if this is not proven, also for tensors that fusion removes."""
        seen = set[Index]()
        for node in self.nodes:
            for name in filter(None, node.outputs):
                for axis, d in enumerate(self.view.tensor(name).shape):
                    if d in seen:
                        continue
                    seen.add(d)
                    why = f"{node.name} ({node.op}): axis {axis} of {name} has {d} elements"
                    self.facts.at_most(0, d, why)

    def add(self, nodes: list[OnnxNode]) -> None:
        """Register nodes and queue the eligible ones."""
        for n in nodes:
            for x in dict.fromkeys((*n.inputs, *captured_by(n))):
                self.consumers.setdefault(x, []).append(n)
        self.queue.extend(n for n in nodes if self.eligible(n))

    def eligible(self, node: OnnxNode) -> bool:
        """Check whether every input has a type (CheckNodeStatus)."""
        return all(x in self.inferred for x in (*node.inputs, *captured_by(node)) if x)

    def requeue(self) -> bool:
        """Queue the nodes that new facts may change: parked nodes, and nodes whose inputs have changed."""
        version = self.facts.version
        for name, (node, seen) in list(self.parked.items()):
            if seen != version:
                del self.parked[name]
                self.queue.append(node)
        for node in self.nodes:
            if node.name in self.processed:
                seen, looks = self.processed[node.name]
                if seen != version:
                    now = self.looks(node)
                    self.processed[node.name] = (version, now)
                    if now != looks:
                        self.queue.append(node)
        return bool(self.queue)

    def looks(self, node: OnnxNode) -> object:
        """Return the node's inputs as its rule sees them."""
        out: list[object] = []
        for x in (*node.inputs, *captured_by(node)):
            if x and x not in self.constants:
                value = self.view.known_elements(x)
                out.append((self.view.tensor(x), None if value is None else tuple(value.flat)))
        return tuple(out)

    def visit(self, node: OnnxNode, assume: bool) -> None:
        """Infer the shapes of one node (ComputeSymShape), then queue its successors."""
        if node.op == "If" and self.decide(node, assume):
            return
        looks = self.looks(node)
        ask = Asking(node, self.view, assume)
        if not node.fallback:
            check_types(node, {x: self.inferred[x].dtype for x in node.inputs if x})
        try:
            results = self.infer(node, ask)
        except Undecided:
            self.parked[node.name] = (node, self.facts.version)
            return
        except CannotCross as e:
            assert self.left is not None  # otherwise there are no regions
            self.left.keep(node, e)
            raise RepropagationNeeded from e
        except (MemoryError, RanksDiffer):
            raise
        except Exception as e:
            if self.left is not None and not (node.fallback or isinstance(e, ModelError)):
                self.leave_to_others(self.left, node, with_node(e, node))
                return
            if self.again:  # larger regions may work
                raise RepropagationNeeded from e
            raise with_node(e, node) from e
        if results is None:
            return
        self.processed[node.name] = (self.facts.version, looks)
        if len(results) < len([o for o in node.outputs if o]):
            raise UnsupportedError(f"{node.op} gives only {len(results)} of its outputs", node=node.name)
        for position, (name, result) in enumerate(zip(node.outputs, results, strict=False)):
            if name:
                self.record(node, name, self.with_value(node, result) if position == 0 else result)

    def infer(self, node: OnnxNode, ask: Asking) -> tuple[Inferred, ...] | None:
        """Return the results of a node's rule, or None if other nodes replace it."""
        try:
            now = None if node.fallback else modern(node, ask)
            if now is None and (node.op in registry.OPERATORS or node.fallback):
                return rules(node).infer(node, ask)
            self.splice(node, body_of(node, ask) if now is None else now)
        except Rewritten as e:
            self.splice(node, e.graph)
        except RanksDiffer as e:
            self.extend_branches(node, e)
        return None

    def leave_to_others(self, left: FallbackNodes, node: OnnxNode, reason: PolydynError) -> None:
        """Turn a node that its rule rejects into a region for now, so that the same run finds other such nodes."""
        left.leave(reason, node.name)
        if node.name in left.callers:
            raise RepropagationNeeded
        self.again = True
        read = (*(x for n in self.nodes for x in reads(n)), *self.view.graph.outputs)
        other = region([replace(node, fallback=left.nodes[node.name])], read, self.view.graph)
        self.nodes[self.nodes.index(node)] = other
        for readers in self.consumers.values():
            readers[:] = [other if n is node else n for n in readers]
        self.queue.append(other)

    def with_value(self, node: OnnxNode, result: Inferred) -> Inferred:
        """Add shape arithmetic that the operator's own rule does not provide."""
        if result.value is not None:
            return replace(result, value=in_range(result.value, result.dtype))
        inputs = [self.view.known_elements(x) for x in node.inputs if x]
        known = [x for x in inputs if x is not None]
        if len(known) != len(inputs):
            return result
        value = infer_value(node, known, result.dtype, self.facts)
        return result if value is None else replace(result, value=value)

    def record(self, node: OnnxNode, name: str, result: Inferred) -> None:
        """Store a result and queue consumers that became eligible."""
        shape = tuple(map(self.facts.canonical, result.shape))
        asked = self.view.asked
        asked.levels[name] = max(asked.level((*node.inputs, *captured_by(node), name)), self.facts.level(*result.shape))
        for axis, d in enumerate(shape):
            if self.facts.nonnegative(-d - 1):
                raise ShapeError(f"{name} has the size {d} along axis {axis}", node=node.name, tensor=name, dim=str(d))
            _check_length(node, name, axis, d)
        self.inferred[name] = replace(result, shape=shape)
        for c in self.consumers.get(name, []):
            if c.name not in self.processed and c not in self.queue and self.eligible(c):
                self.queue.append(c)

    def decide(self, node: OnnxNode, assume: bool) -> bool:
        """Replace an If by one branch once its condition is known. Returns False if every call decides it."""
        condition = self.view.constant(node.inputs[0])
        if condition is not None:
            self.splice(node, node.attribute("then_branch" if condition.reshape(-1)[0] else "else_branch"))
        elif not assume:
            self.parked[node.name] = (node, self.facts.version)
        return condition is not None or not assume

    def extend_branches(self, node: OnnxNode, difference: RanksDiffer) -> None:
        """Move the readers of a result of two ranks into both branches of an If.

        Raises RanksDiffer if it is a result of a body, and UnsupportedError if it is a result of the model, or if
        another runtime computes a reader.
        """
        sizes = tuple(dict.fromkeys((*self.deciding(node), *difference.sizes)))
        if difference.tensor in self.view.graph.outputs and self.is_body:
            raise RanksDiffer(difference.tensor, difference.ranks, sizes)
        if difference.tensor in self.view.graph.outputs and self.take_declared_rank(node, difference):
            return
        self.depth[node.name] = 2 * self.depth.get(node.name, 0) or 1
        depth, results = self.depth[node.name], self.view.graph.outputs
        moved = [] if difference.tensor in results else readers_of(self.nodes, node, (difference.tensor,), depth)
        if not moved or any(n.fallback for n in moved):
            raise RanksDiffer(difference.tensor, difference.ranks, sizes).error(node)
        self.nodes, new = with_moved(self.nodes, node, moved, results)
        for readers in self.consumers.values():
            readers[:] = [n for n in readers if n not in moved and n is not node]
        self.add([new])

    def take_declared_rank(self, node: OnnxNode, difference: RanksDiffer) -> bool:
        """Check whether the model declares the rank of its result. If so, the other branch is removed, under a
        guard.
        """
        declared, condition = self.view.graph.declared.get(difference.tensor), self.view.value(node.inputs[0])
        rank = None if declared is None or declared.dims is None else len(declared.dims)
        if rank not in difference.ranks or difference.is_nested or condition is None:
            return False
        role = BRANCHES[difference.ranks.index(rank)]
        why = f"{node.name} ({node.op}): the model says that its result {difference.tensor} has rank {rank}"
        self.facts.decide(condition.reshape(-1)[0], role == BRANCHES[0], why)
        self.facts.notes.append(f"{why}; calls in which it has another rank are refused")
        self.splice(node, node.attribute(role))
        return True

    def deciding(self, node: OnnxNode) -> list[str]:
        """Return the input sizes that decide the condition of an If, under the names for which users may give a
        range.
        """
        value = self.view.value(node.inputs[0])
        used = {s for d in (() if value is None else value.flat) for s in d.symbols()} - self.facts.invented()
        named = {d for x in self.view.graph.inputs for d in x.dims or ()}
        return sorted(map(given_back, used & named if self.is_body else used))

    def splice(self, node: OnnxNode, branch: object) -> None:
        """Replace a node by the nodes of a graph: an If by one branch, other nodes by their body."""
        if not isinstance(branch, ImportedGraph) or len(branch.outputs) != len(node.outputs):
            raise ModelError("a branch of If is not a graph with the outputs of If", node=node.name, rule="If of ONNX")
        computed = {o for n in branch.nodes for o in n.outputs if o}
        results: dict[str, str] = {}
        for inside, outside in zip(branch.outputs, node.outputs, strict=True):
            if outside and inside in computed:  # results get the outer name; the others are copied
                results.setdefault(inside, outside)
        names = {x: f"{node.name}/{x}" for x in computed | branch.constants.keys()}
        branch = renamed(branch, names | results)
        self.constants |= branch.constants
        for name, array in branch.constants.items():
            self.inferred[name] = Inferred(str(array.dtype), tuple(map(Index.of, array.shape)))
        nodes = [replace(n, name=f"{node.name}/{n.name}") for n in branch.nodes]
        nodes += [
            OnnxNode(f"{node.name}/out{i}", "Identity", (inside,), (outside,), {}, node.opset)
            for i, (inside, outside) in enumerate(zip(branch.outputs, node.outputs, strict=True))
            if outside and inside != outside
        ]
        branch = replace(branch, nodes=tuple(nodes), outputs=node.outputs)
        if self.left is not None:
            branch = self.left.replacement(node, branch, is_built)
        check_supported(branch)
        self.processed[node.name] = (self.facts.version, None)  # never queued again
        at = self.nodes.index(node)
        self.nodes[at : at + 1] = branch.nodes
        self.add(list(branch.nodes))

"""Eliminate sequences and optionals whose elements are known when the model is read.

A sequence is a tuple of tensor names, or a stack (``sequence_stacks.py``) if a size is the number of its elements. A
Loop over sequences is unrolled if its number of iterations is known; otherwise it may append to them, and read stacks.
A SequenceMap over known elements is written once for each of them.
Other uses stay, together with the nodes that compute what they read. They are then rejected by name like all other
unsupported operators.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from polydyn.graph.importer import ImportedGraph, renamed
from polydyn.graph.inner import captured_by
from polydyn.graph.operators.registry import OnnxNode
from polydyn.graph.sequence_stacks import (
    READERS,
    Stack,
    appended,
    concatenate,
    is_only_read,
    read_element,
    read_length,
    with_stacks,
)
from polydyn.schedules.expr import Array

OPSET = 21
MAX_ITERATIONS = 64
"""Maximum iterations of a Loop that is unrolled."""


@dataclass
class _Writer:
    """The new graph so far: old and new nodes, constants, and the tensors of every sequence and optional."""

    constants: dict[str, Array]
    nodes: list[OnnxNode] = field(default_factory=list)
    elements: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: dict[str, OnnxNode] = field(default_factory=dict)
    """Maps a result of an eliminated node to the node."""
    stacks: dict[str, Stack] = field(default_factory=dict)
    """Sequences whose number of elements is the size of an axis."""

    def keep(self, names: Iterable[str]) -> None:
        """Restore the nodes whose sequences are read after all."""
        sequences = self.elements.keys() | self.stacks.keys()
        for n in [self.dropped.pop(x) for x in names if x in self.dropped and x in sequences]:
            self.keep(n.inputs)
            self.nodes.append(n)

    def node(
        self, source: OnnxNode, op: str, inputs: tuple[str, ...], outputs: tuple[str, ...], **attributes: object
    ) -> None:
        """Add a node."""
        name = f"{source.name}/{op}_{len(self.nodes)}"
        self.nodes.append(OnnxNode(name, op, inputs, outputs, attributes, OPSET))

    def position(self, n: OnnxNode, k: int, count: int, default: int) -> int | None:
        """Return an optional constant position counted from the front, or None if it is data or out of range."""
        if len(n.inputs) <= k or not n.inputs[k]:
            return default
        constant = self.constants.get(n.inputs[k])
        at = None if constant is None else int(constant.reshape(-1)[0])
        if at is None or not -count <= at <= count:
            return None
        return at if at >= 0 else at + count


Rule = Callable[[_Writer, OnnxNode], bool]


def _construct(w: _Writer, n: OnnxNode) -> bool:
    w.elements[n.outputs[0]] = n.inputs
    return True


def _empty(w: _Writer, n: OnnxNode) -> bool:
    w.elements[n.outputs[0]] = ()
    return True


def _insert(w: _Writer, n: OnnxNode) -> bool:
    known = w.elements.get(n.inputs[0])
    at = None if known is None else w.position(n, 2, len(known), len(known))
    if known is None or at is None:
        return False
    w.elements[n.outputs[0]] = (*known[:at], n.inputs[1], *known[at:])
    return True


def _erase(w: _Writer, n: OnnxNode) -> bool:
    known = w.elements.get(n.inputs[0])
    at = None if known is None else w.position(n, 1, len(known), len(known) - 1)
    if known is None or at is None or at >= len(known):
        return False
    w.elements[n.outputs[0]] = known[:at] + known[at + 1 :]
    return True


def _at(w: _Writer, n: OnnxNode) -> bool:
    if n.inputs[0] in w.stacks:
        read_element(w, n, w.stacks[n.inputs[0]])
        return True
    known = w.elements.get(n.inputs[0])
    at = None if known is None else w.position(n, 1, len(known), 0)
    if known is None or at is None or at >= len(known):
        return False
    w.node(n, "Identity", (known[at],), n.outputs)
    return True


def _length(w: _Writer, n: OnnxNode) -> bool:
    if n.inputs[0] in w.stacks:
        read_length(w, n, w.stacks[n.inputs[0]])
        return True
    known = w.elements.get(n.inputs[0])
    if known is not None:
        w.constants[n.outputs[0]] = np.array(len(known), np.int64)
    return known is not None


def _split(w: _Writer, n: OnnxNode) -> bool:
    """Split into parts of given sizes. The number of parts of equal size would depend on the shape."""
    sizes = w.constants.get(n.inputs[1]) if len(n.inputs) > 1 else np.array(1)
    if sizes is not None and sizes.ndim == 0 and sizes == 1:
        w.stacks[n.outputs[0]] = Stack(n.inputs[0], n.attribute("axis", 0), bool(n.attribute("keepdims", 1)))
        return True
    if sizes is None or sizes.ndim != 1:
        return False
    parts = tuple(f"{n.outputs[0]}.{k}" for k in range(len(sizes)))
    w.node(n, "Split", (n.inputs[0], n.inputs[1]), parts, axis=n.attribute("axis", 0))
    w.elements[n.outputs[0]] = parts
    return True


def _concat(w: _Writer, n: OnnxNode) -> bool:
    if n.inputs[0] in w.stacks:
        concatenate(w, n, w.stacks[n.inputs[0]])
        return True
    known, axis = w.elements.get(n.inputs[0]), n.attribute("axis", 0)
    if not known:
        return False
    if n.attribute("new_axis", 0):
        w.constants[f"{n.outputs[0]}.axis"] = np.array([axis], np.int64)
        new = tuple(f"{n.outputs[0]}.{k}" for k in range(len(known)))
        for x, y in zip(known, new, strict=True):
            w.node(n, "Unsqueeze", (x, f"{n.outputs[0]}.axis"), (y,))
        known = new
    w.node(n, "Concat", known, n.outputs, axis=axis)
    return True


def _optional(w: _Writer, n: OnnxNode) -> bool:
    given = n.inputs[0] if n.inputs else ""
    w.elements[n.outputs[0]] = w.elements.get(given, (given,)) if given else ()
    return True


def _has_element(w: _Writer, n: OnnxNode) -> bool:
    given = n.inputs[0] if n.inputs else ""
    w.constants[n.outputs[0]] = np.array(bool(given) and w.elements.get(given, (given,)) != ())
    return True


def _element(w: _Writer, n: OnnxNode) -> bool:
    known = w.elements.get(n.inputs[0], (n.inputs[0],))
    if len(known) != 1:
        return False
    w.node(n, "Identity", known, n.outputs)
    return True


def _same(w: _Writer, n: OnnxNode) -> bool:
    name, copy = n.inputs[0], n.outputs[0]
    w.elements |= {copy: w.elements[name]} if name in w.elements else {}
    w.stacks |= {copy: w.stacks[name]} if name in w.stacks else {}
    return name in w.elements or name in w.stacks


RULES: dict[str, Rule] = {
    "SequenceConstruct": _construct, "SequenceEmpty": _empty, "SequenceInsert": _insert, "SequenceErase": _erase,
    "SequenceAt": _at, "SequenceLength": _length, "SplitToSequence": _split, "ConcatFromSequence": _concat,
    "Optional": _optional, "OptionalHasElement": _has_element, "OptionalGetElement": _element, "Identity": _same,
}  # fmt: skip


def _iterations(w: _Writer, n: OnnxNode) -> int | None:
    """Return the iterations of a Loop, or None if data decide them, there are too many, or it has scan outputs."""
    body, carried = n.attribute("body"), len(n.inputs) - 2
    if not isinstance(body, ImportedGraph) or (len(body.inputs), len(body.outputs)) != (carried + 2, carried + 1):
        return None
    again, makers = body.outputs[0], {o: m for m in body.nodes for o in m.outputs}
    while again in makers and makers[again].op == "Identity":
        again = makers[again].inputs[0]
    count, first, stays = (w.constants.get(x, body.constants.get(x)) for x in (*n.inputs[:2], again))
    always = again == body.inputs[1].name or (stays is not None and stays.all())
    if count is None or not always or not (first.all() if first is not None else not n.inputs[1]):
        return None
    return iterations if (iterations := max(0, int(count.reshape(-1)[0]))) <= MAX_ITERATIONS else None


def _unrolled(w: _Writer, n: OnnxNode) -> list[OnnxNode] | None:
    """Unroll a Loop that carries or reads sequences. Returns None if it stays."""
    read = (*n.inputs, *captured_by(n))
    iterations = _iterations(w, n) if n.op == "Loop" and any(x in w.elements for x in read) else None
    if iterations is None:
        return None
    body, carried, nodes = n.attributes["body"], n.inputs[2:], list[OnnxNode]()
    turn, again = (i.name for i in body.inputs[:2])
    for k in range(iterations):
        turns = (f"{n.name}.{k}.{turn}", f"{n.name}.{k}.{again}")
        w.constants |= {turns[0]: np.array(k, np.int64), turns[1]: np.array(True)}
        written = _copy_of_body(w, n, k, (*turns, *carried))
        nodes += written.nodes
        carried = written.outputs[1:]
    named_results = [(x, o) for x, o in zip(carried, n.outputs, strict=False) if o]
    return nodes + [OnnxNode(f"{n.name}/{o}", "Identity", (x,), (o,), {}, OPSET) for x, o in named_results]


def _copy_of_body(w: _Writer, n: OnnxNode, k: int, arguments: Iterable[str]) -> ImportedGraph:
    """Return copy ``k`` of a body: its inputs are ``arguments``, and the names of its results are its own."""
    body = n.attributes["body"]
    inside = {*body.constants, *(o for m in body.nodes for o in m.outputs if o)}
    formals = dict(zip((i.name for i in body.inputs), arguments, strict=True))
    written = renamed(body, {x: f"{n.name}.{k}.{x}" for x in inside} | formals)
    w.constants |= written.constants
    return replace(written, nodes=tuple(replace(m, name=f"{m.name}.{k}") for m in written.nodes))


def _mapped(w: _Writer, n: OnnxNode) -> list[OnnxNode] | None:
    """Write the body of a SequenceMap once for each element. Returns None if it stays."""
    known, body = w.elements.get(n.inputs[0]), n.attributes.get("body")
    if known is None or not isinstance(body, ImportedGraph) or len(body.inputs) != len(n.inputs):
        return None
    if any(x in w.stacks or len(w.elements.get(x, known)) != len(known) for x in n.inputs):
        return None
    copies = [
        _copy_of_body(w, n, k, [w.elements[x][k] if x in w.elements else x for x in n.inputs])
        for k in range(len(known))
    ]
    for place, name in enumerate(n.outputs):
        w.elements[name] = tuple(c.outputs[place] for c in copies)
        w.dropped[name] = n
    return [m for c in copies for m in c.nodes]


def _appending(w: _Writer, n: OnnxNode, graph: ImportedGraph) -> OnnxNode:
    """Return a Loop that appends to known sequences with scan outputs, if nodes only read the results."""
    body, states = n.attributes.get("body"), dict[int, str]()
    if n.op != "Loop" or not isinstance(body, ImportedGraph):
        return n
    for k, (name, first) in enumerate(zip(n.outputs, n.inputs[2:], strict=False)):
        known = w.elements.get(first)
        element = None if known is None or not name or name in graph.outputs else appended(n, body, k)
        if element and is_only_read(name, graph.nodes, ("ConcatFromSequence",) if known else READERS):
            states[k] = element
    if not states:
        return n
    loop, stacks = with_stacks(n, states)
    w.stacks |= {x: replace(s, first=w.elements[n.inputs[n.outputs.index(x) + 2]]) for x, s in stacks.items()}
    return loop


def _with_bodies(w: _Writer, n: OnnxNode) -> OnnxNode:
    """Eliminate the stacks that the bodies of a node read."""
    read = {x: w.stacks[x] for x in captured_by(n) if x in w.stacks}
    bodies = {k: without_sequences(v, read) for k, v in n.attributes.items() if isinstance(v, ImportedGraph) and read}
    return replace(n, attributes={**n.attributes, **bodies}) if bodies else n


def without_sequences(graph: ImportedGraph, stacks: Mapping[str, Stack] | None = None) -> ImportedGraph:
    """Eliminate the sequences and optionals of a graph whose elements are known. ``stacks``: those outside of it."""
    if not any(n.op in RULES and n.op != "Identity" for n in graph.nodes) and not stacks:
        return graph
    w, todo = _Writer(dict(graph.constants), stacks=dict(stacks or {})), deque(graph.nodes)
    while todo:
        n = todo.popleft()
        copies = _mapped(w, n) if n.op == "SequenceMap" else _unrolled(w, n)
        if copies is not None:
            todo.extendleft(reversed(copies))
            continue
        n = _with_bodies(w, _appending(w, n, graph))
        rule = RULES.get(n.op)
        if rule is not None and rule(w, n):
            w.dropped[n.outputs[0]] = n
            continue
        w.keep((*n.inputs, *captured_by(n)))
        w.nodes.append(n)
    w.keep(graph.outputs)
    return replace(graph, nodes=tuple(w.nodes), constants=w.constants)

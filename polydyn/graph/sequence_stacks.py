"""Sequences of equal tensors whose number is a size: slices of a tensor, or one tensor of each iteration of a Loop.

Such a sequence is a tensor with one axis more, its stack. ``for row in x`` reads slices, and ``rows.append(y)`` in a
Loop, followed by a concatenation, is a scan output of the Loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from polydyn.graph.importer import ImportedGraph
from polydyn.graph.inner import captured_by
from polydyn.graph.operators.registry import OnnxNode
from polydyn.schedules.expr import Array

LETTERS = "abcdefghijklm"
READERS = ("SequenceAt", "SequenceLength", "ConcatFromSequence")
"""Operators that read a stack in place of a sequence."""


@dataclass(frozen=True)
class Stack:
    """A sequence of the slices of ``tensor`` along ``axis``.

    ``is_kept``: each slice keeps the axis, with size 1. ``first``: further elements before the slices.
    """

    tensor: str
    axis: int
    is_kept: bool
    first: tuple[str, ...] = ()


class Writer(Protocol):
    """The new graph so far."""

    constants: dict[str, Array]

    @property
    def node(self) -> Callable[..., None]:
        """Add a node: the node that it replaces, operator, inputs, outputs, attributes."""


@dataclass
class _Steps:
    """Adds the nodes that replace a node. Intermediate tensors are named after its output."""

    w: Writer
    source: OnnxNode
    count: int = 0

    @property
    def result(self) -> str:
        return self.source.outputs[0]

    def constant(self, value: int | list[int]) -> str:
        self.count += 1
        name = f"{self.result}.{self.count}"
        self.w.constants[name] = np.array(value, np.int64)
        return name

    def op(self, op: str, *inputs: str, is_last: bool = False, **attributes: object) -> str:
        self.count += 1
        output = self.result if is_last else f"{self.result}.{self.count}"
        self.w.node(self.source, op, inputs, (output,), **attributes)
        return output

    def moved(self, x: str, source: int, target: int) -> str:
        """Move the stack's axis from its place among the axes of an element to another one, by way of the front."""
        for place, to_front in ((source, True), (target, False)) if source != target else ():
            if place:
                there, front = _subscripts(place)
                x = self.op("Einsum", x, equation=f"{there}->{front}" if to_front else f"{front}->{there}")
        return x

    def finish(self, x: str, first: Sequence[str], axis: int) -> None:
        """Make the concatenation of ``first`` and a tensor the node's result."""
        if first:
            self.op("Concat", *first, x, is_last=True, axis=axis)
        else:
            self.op("Identity", x, is_last=True)


def _subscripts(place: int) -> tuple[str, str]:
    """Return the subscripts of a stack whose axis n is before axis ``place`` of an element, and with n in front.

    ``place``: -1 is the end. The rank of an element is not known.
    """
    if place >= 0:
        return f"{LETTERS[:place]}n...", f"n{LETTERS[:place]}..."
    after = LETTERS[: -place - 1]
    return f"...n{after}", f"n...{after}"


def read_element(w: Writer, n: OnnxNode, stack: Stack) -> None:
    """Turn an element into a Gather. Like every gather it is checked against the axis."""
    s, shape, known = _Steps(w, n), [1] if stack.is_kept else [], w.constants.get(n.inputs[1])
    at = s.op("Reshape", n.inputs[1], s.constant(shape)) if known is None else s.constant(known.reshape(shape).tolist())
    s.op("Gather", stack.tensor, at, is_last=True, axis=stack.axis)


def read_length(w: Writer, n: OnnxNode, stack: Stack) -> None:
    """Turn the number of elements into the size of the axis."""
    s = _Steps(w, n)
    s.op("Gather", s.op("Shape", stack.tensor), s.constant(stack.axis), is_last=True, axis=0)


def concatenate(w: Writer, n: OnnxNode, stack: Stack) -> None:
    """Turn a concatenation along a new axis into a move of the stack's axis; along an old one, merge both axes."""
    s, axis = _Steps(w, n), n.attribute("axis", 0)
    x, source = stack.tensor, stack.axis
    if stack.is_kept:
        size = s.constant([source + 1 if source >= 0 else source])
        x, source = s.op("Unsqueeze", s.moved(x, source, 0), size), 0
    if n.attribute("new_axis", 0):
        place = s.constant([axis])
        s.finish(s.moved(x, source, axis), [s.op("Unsqueeze", y, place) for y in stack.first], axis)
        return
    place = axis if axis >= 0 else axis - 1
    x = s.moved(x, source, place)
    shape = s.op("Shape", x)

    def cut(low: int, high: int | None) -> str:
        return s.op("Slice", shape, s.constant([low]), s.constant([2**31 - 1 if high is None else high]))

    merged = s.op("Mul", cut(place, place + 1), cut(place + 1, place + 2 if place != -2 else None))
    parts = [cut(0, place), merged, *([cut(place + 2, None)] if place != -2 else [])]
    s.finish(s.op("Reshape", x, s.op("Concat", *parts, axis=0), allowzero=1), stack.first, axis)


def is_only_read(name: str, nodes: Iterable[OnnxNode], readers: Sequence[str]) -> bool:
    """Check whether these operators alone read a sequence, also inside bodies."""
    for n in nodes:
        bodies = [b for b in n.attributes.values() if isinstance(b, ImportedGraph)]
        if name in n.inputs and n.op not in readers:
            return False
        if name in captured_by(n) and not all(
            name not in b.outputs and is_only_read(name, b.nodes, readers) for b in bodies
        ):
            return False
    return True


# -- loops -----------------------------------------------------------------------------------------------------------


def appended(n: OnnxNode, body: ImportedGraph, place: int) -> str | None:
    """Return the tensor that each iteration appends to state ``place``. None if the body does anything else with it."""
    formal, result = body.inputs[place + 2].name, body.outputs[place + 1]
    readers = [m for m in body.nodes if formal in (*m.inputs, *captured_by(m))]
    makers = [m for m in body.nodes if result in m.outputs]
    if len(readers) != 1 or readers != makers or formal in body.outputs or body.outputs.count(result) != 1:
        return None
    (insert,) = makers
    others = [m for m in body.nodes if result in (*m.inputs, *captured_by(m))]
    is_append = insert.op == "SequenceInsert" and len(insert.inputs) == 2 and insert.inputs[0] == formal
    return insert.inputs[1] if is_append and insert.inputs[1] != formal and not others else None


def with_stacks(n: OnnxNode, states: dict[int, str]) -> tuple[OnnxNode, dict[str, Stack]]:
    """Return a Loop with scan outputs in place of sequences, and the stack of each of its sequences.

    ``states``: maps the position of a state to the tensor that each iteration appends.
    """
    body: ImportedGraph = n.attributes["body"]
    count, results = len(n.inputs) - 2, [f"{n.outputs[k]}.stack" for k in states]
    kept = [k for k in range(count) if k not in states]
    made = {body.outputs[k + 1] for k in states}
    inner = replace(
        body, inputs=(*body.inputs[:2], *(body.inputs[k + 2] for k in kept)),
        outputs=(body.outputs[0], *(body.outputs[k + 1] for k in kept), *body.outputs[count + 1 :], *states.values()),
        nodes=tuple(m for m in body.nodes if not made & set(m.outputs)),
    )  # fmt: skip
    outputs = (*n.outputs, *[""] * (len(body.outputs) - 1 - len(n.outputs)))
    loop = replace(
        n, inputs=(*n.inputs[:2], *(n.inputs[k + 2] for k in kept)),
        outputs=(*(outputs[k] for k in kept), *outputs[count:], *results), attributes={**n.attributes, "body": inner},
    )  # fmt: skip
    return loop, {n.outputs[k]: Stack(r, 0, False) for k, r in zip(states, results, strict=True)}

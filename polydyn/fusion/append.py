"""Appendable pairs: an output that is an input followed by more elements, such as a decoder's key/value cache.

When ``output = concat(input, ..., axis)``, the caller may keep both in one large buffer and pass views of it. A view
that is cut along ``axis`` has other strides on the axes before ``axis``, so the strides of these axes are symbols.
``axis`` and the axes after it stay dense, so that vector code keeps its unit stride.
"""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.graph.ir import Concat, Graph


@dataclass(frozen=True)
class Append:
    """``output`` is ``input`` followed by other parts along ``axis``; ``copy`` is the node that copies the input."""

    output: str
    input: str
    axis: int
    copy: str


def part_name(graph: Graph, concat: str, part: int) -> str:
    """Return a name for the copy of one part inside the window of a concatenation. No tensor of the model has this
    name.
    """
    name = f"{concat}/{part}"
    while name in graph.tensors:
        name += "'"
    return name


def find_appends(graph: Graph) -> tuple[Append, ...]:
    """Return the appendable pairs of a graph.

    An input that is appended to along two axes is a view along the first of them only.
    """
    pairs = [
        Append(n.output, n.parts[0], n.axis, part_name(graph, n.output, 0))
        for n in graph.nodes
        if isinstance(n, Concat) and n.output in graph.outputs
        if n.parts[0] in graph.inputs and n.parts[0] not in graph.outputs
    ]
    first = {a.input: min(b.axis for b in pairs if b.input == a.input) for a in pairs}
    return tuple(a for a in pairs if a.axis == first[a.input])


def stride_symbol(tensor: str, axis: int) -> str:
    """Return the symbol of a tensor's stride along an axis, in elements."""
    return f"{tensor}@{axis}"


def free_strides(appends: tuple[Append, ...]) -> dict[str, tuple[str, ...]]:
    """Map each tensor whose leading strides the caller chooses to the symbols of these strides."""
    axes: dict[str, int] = {}
    for a in appends:
        for t in (a.output, a.input):
            axes[t] = min(a.axis, axes.get(t, a.axis))
    return {t: tuple(stride_symbol(t, k) for k in range(axis)) for t, axis in axes.items()}

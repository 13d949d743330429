"""Sliding windows: the geometry shared by Conv and the poolings, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polydyn.errors import ModelError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import in_range, refuse
from polydyn.graph.operators.registry import InferContext, OnnxNode
from polydyn.schedules.expr import Value
from polydyn.schedules.index import ONE, ZERO, Atom, Index, IndexLike, maximum, minimum


@dataclass(frozen=True)
class Window:
    """One spatial axis: ``size`` elements, ``kernel`` taps ``dilation`` apart, moved by ``stride``.

    ``before``/``after``: padding. ``ceil``: the last window may reach past the padding, if it starts before its end.
    """

    size: Dim
    kernel: Dim
    stride: int
    dilation: int
    before: Dim
    after: Dim
    ceil: bool = False

    @property
    def padded(self) -> Dim:
        """The size with padding."""
        return self.size + self.before + self.after

    @property
    def output(self) -> Dim:
        """Number of windows."""
        room = self.padded - self.reach
        if not self.ceil:
            return room // self.stride + 1
        return minimum(room.ceildiv(self.stride) + 1, (self.size + self.before - 1) // self.stride + 1)

    @property
    def reach(self) -> Dim:
        """Number of elements that one window spans."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def has_padding(self) -> bool:
        """False if padding is zero for every size."""
        return not (self.before == 0 and self.after == 0)

    @property
    def may_leave(self) -> bool:
        """Whether some tap may be outside the tensor."""
        return self.has_padding or (self.ceil and self.stride != 1)

    def source(self, position: IndexLike, tap: IndexLike) -> Index:
        """Return the subscript of the unpadded tensor."""
        return Index.of(position) * self.stride + Index.of(tap) * self.dilation - self.before

    def inside(self, position: IndexLike, tap: IndexLike) -> Value:
        """Return the condition that a tap is inside the tensor."""
        return in_range(self.source(position, tap), self.size)

    def taps_inside(self, position: IndexLike, count_padding: bool) -> Dim:
        """Return the number of taps inside the tensor, or, with ``count_padding``, inside the padded tensor."""
        start = Index.of(position) * self.stride - (ZERO if count_padding else self.before)
        end = self.padded if count_padding else self.size
        last = minimum(self.kernel, (end - start).ceildiv(self.dilation))
        first = maximum(0, (-start).ceildiv(self.dilation))
        return maximum(0, last - first)


def windows(node: OnnxNode, sizes: tuple[Dim, ...], kernel: tuple[Dim, ...]) -> tuple[Window, ...]:
    """Return the windows of a Conv or pooling node. Raises ModelError if its attributes have another rank."""
    rank = len(sizes)
    if len(kernel) != rank:
        raise ModelError(f"a kernel of {len(kernel)} axes for {rank} spatial axes", node=node.name)
    strides, dilations, pads = moves(node, rank)
    ceil = bool(node.attribute("ceil_mode", 0))
    out = []
    for i, size in enumerate(sizes):
        before, after = _padding(node, size, kernel[i], strides[i], dilations[i], pads[i], pads[rank + i])
        out.append(Window(size, kernel[i], int(strides[i]), int(dilations[i]), before, after, ceil))
    return tuple(out)


def moves(node: OnnxNode, rank: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return (strides, dilations, pads) of a node over windows. Raises ModelError if they have another rank."""
    strides, dilations = (node.attribute(name) or [1] * rank for name in ("strides", "dilations"))
    pads = node.attribute("pads") or [0] * (2 * rank)
    if not len(strides) == len(dilations) == len(pads) // 2 == rank:
        raise ModelError("strides, dilations and pads do not fit the rank", node=node.name)
    return strides, dilations, pads


def fit(node: OnnxNode, ctx: InferContext, axes: Sequence[Window]) -> None:
    """Guard that a window fits into every padded axis. Otherwise there is no output, or one of negative size.

    ``SAME_*`` padding always provides space. A window of one element also fits into an empty axis, zero times.
    """
    if node.attribute("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER"):
        return
    for axis, a in enumerate(axes, 2):
        if a.reach == 1:
            continue
        room = a.padded - a.reach + (a.stride - 1 if a.ceil else 0)
        why = f"axis {axis} of {node.inputs[0]} is {a.size}: a window of {a.reach} must fit into it"
        ctx.at_most(*_sides(_without_division(room)), why)


def _without_division(p: Dim) -> Dim:
    """Return ``q`` with ``q >= 0`` if and only if ``p >= 0``: ``x // n + c >= 0`` is ``x + c * n >= 0``."""
    offset = p.terms.get((), 0)
    rest = p - offset
    if len(rest.terms) != 1:
        return p
    ((monomial, coefficient),) = rest.terms.items()
    atom = monomial[0]
    if len(monomial) > 1 or coefficient != 1 or not isinstance(atom, Atom) or atom.kind != "floordiv":
        return p
    x, n = atom.args
    return p if n.constant is None else _without_division(x + n * offset)


def _sides(p: Dim) -> tuple[Dim, Dim]:
    """Rewrite ``p >= 0`` as ``left <= right`` without minus signs."""
    return Index({m: -v for m, v in p.terms.items() if v < 0}), Index({m: v for m, v in p.terms.items() if v > 0})


def _padding(
    node: OnnxNode, size: Dim, kernel: Dim, stride: int, dilation: int, before: int, after: int
) -> tuple[Dim, Dim]:
    """Return the padding of one axis. ``SAME_*`` makes the output ``ceil(size / stride)``."""
    mode = node.attribute("auto_pad", "NOTSET")
    if mode == "NOTSET":
        if before < 0 or after < 0:
            raise refuse(node, "negative padding")
        return Index.of(before), Index.of(after)
    if mode == "VALID":
        return ZERO, ZERO
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise ModelError(f"auto_pad {mode}", node=node.name)
    reach = (kernel - ONE) * dilation + 1
    total = maximum(0, (size.ceildiv(stride) - 1) * stride + reach - size)
    half = total // 2
    return (half, total - half) if mode == "SAME_UPPER" else (total - half, half)

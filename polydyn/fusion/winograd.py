"""Winograd convolution: 3x3 taps with 4 or 2.25 multiplications per pixel instead of 9.

F(m, 3) computes m neighbouring sums of three products from ``a = m + 2`` products (``polydyn/fusion/toom_cook.py``):

    u = G g        v = B d        y = A (v * u)

Along two axes there are ``a * a`` products for a tile of m x m pixels. With dilation d, the pixels and elements of a
tile are d apart, and d tiles interleave along each axis. A convolution becomes four primitives: B along one axis of
pixels of the image, with zeros around it (a map); ``v``, which is B along the other axis (a map, which joins the
product's promotion); ``a * a`` products over channels; and ``y`` (a map, which later nodes join). The weights ``u`` are
constants. The sums of a tile are contiguous in memory and ``a * a / (m * m)`` times as large as the result: 4 times for
m = 2, 2.25 for m = 4.

The points are 0, pairs of p and -p, and infinity. Therefore half of the numbers of the first and the last row of B are
0, and so are the first and the last number of every other row. In A, the first and the last column are 0 except for one
number each. The positions of the remaining numbers of a row are affine except for one division (``_element_places``,
``_sum_places``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial, reduce

import numpy as np

from polydyn.fusion.places import is_guarded_view
from polydyn.fusion.products import is_axis, is_contraction, is_reduction
from polydyn.fusion.toom_cook import matrices
from polydyn.graph.ir import Compute, Dim, Graph, Node, dim_name, reduction_name
from polydyn.graph.rewriting import Rewriting, compose
from polydyn.schedules.expr import (
    Array,
    FromIndex,
    Load,
    Op,
    Value,
    const,
    indices,
    load,
    loads,
    op,
    substitute,
    transform,
)
from polydyn.schedules.index import ZERO, Index

SUFFIX = "@tiles"
TAPS = 3
MAX_TILE_EXTENT = 8
"""Maximum pixels that a tile covers along an axis, including dilation. Larger tiles would waste too much of small
images.
"""
BALANCE = 6
"""Multiply-adds that a core executes while it moves one byte to or from memory."""
MAX_WEIGHT_BYTES = 8 << 20
"""Maximum bytes of transformed weights. Layers with more have few pixels, so reading the weights takes the time that
larger tiles save.
"""
V = Index.of
POINTS = {2: (0, 1), 4: (0, Fraction(2, 3), Fraction(3, 2))}
"""Maps the pixels along a side of a tile to the points that are not negative. With 0, 1 and 2 errors are four times as
large.
"""
SIDE = 2
"""Pixels along a side of the tiles that are as exact as a direct sum."""


@dataclass(frozen=True, eq=False)
class Form:
    """F(side, 3) as float32 arrays.

    ``elements`` is [a, a - 2]: the numbers of each row of B at ``_element_places``. ``sums`` is [side, a - 1]: the
    numbers of each row of A at ``_sum_places``. ``taps`` is G, float64 [a, 3].
    """

    side: int
    elements: Array
    sums: Array
    taps: Array

    @property
    def size(self) -> int:
        """Elements of a tile along an axis."""
        return self.side + TAPS - 1


def form(side: int) -> Form:
    """Build the form with tiles of ``side`` x ``side`` pixels."""
    zero, *rest = map(Fraction, POINTS[side])
    exact = matrices(side, TAPS, (zero, *(x for p in rest for x in (p, -p))))
    size = len(exact.elements)
    elements = _at_places(exact.elements, [_element_places(V(x), size) for x in range(size)])
    sums = _at_places(exact.sums, [_sum_places(V(r), size) for r in range(side)])
    return Form(side, elements, sums, np.array(exact.taps, np.float64))


def _at_places(rows: Sequence[Sequence[Fraction]], places: Sequence[Sequence[Index]]) -> Array:
    """Select the numbers of each row at its positions. All others are 0."""
    out = []
    for row, at in zip(rows, places, strict=True):
        where = [i.constant for i in at]
        out.append([row[k] for k in where if k is not None])
        assert len(set(where)) == len(where) and not any(x for k, x in enumerate(row) if k not in where)
    return np.array(out, np.float32)


def _element_places(x: Index, size: int) -> list[Index]:
    """Return the positions of the nonzero numbers of row ``x`` of B.

    They are (0, 2, 3, 4..) in the first row, (1, 3, 2, 5..) in the last, (1, 2, 3, 4..) between them. The third of
    these is a 0 in the first and the last row.
    """
    last = x // (size - 1)
    return [(x + (size - 2)) // (size - 1), *(j + last * (1 - j % 2 * 2) for j in range(2, size - 1))]


def _sum_places(r: Index, size: int) -> list[Index]:
    """Return the positions of the nonzero numbers of row ``r`` of A. The last row has the last position instead of the
    first.
    """
    return [r // (size - TAPS) * (size - 1), *(V(j) for j in range(1, size - 1))]


@dataclass(frozen=True)
class _Convolution:
    """A convolution node. It multiplies ``image`` by ``weights``.

    ``column``: the axis of its output channels. ``channel``: the reduction over input channels. ``windows``: (axis of
    the image, axis of the output, reduction over taps, dilation) of both axes of pixels. ``form``: its tiles.
    """

    node: Compute
    image: Load
    weights: Load
    column: int
    channel: str
    windows: tuple[tuple[int, int, str, int], ...]
    form: Form


def winograd(graph: Graph, side: int = SIDE) -> Graph:
    """Replace convolutions that gain from it by products of tiles with ``side`` pixels on each side, or 2."""
    return _Winograd(graph, side).run()


def pays(channels: int, outputs: int, side: int) -> bool:
    """Check whether the multiplications that a pixel saves outweigh the bytes that it moves.

    The bytes are the elements of tiles for each input channel and the sums for each output channel, written and read.
    Tiles larger than the smallest have at most ``MAX_WEIGHT_BYTES`` of weights.
    """
    tile, pixels = (side + TAPS - 1) ** 2, side**2
    if side > SIDE and 4 * tile * channels * outputs > MAX_WEIGHT_BYTES:
        return False
    return (TAPS**2 * pixels - tile) * channels * outputs > BALANCE * 4 * tile * (channels + 2 * outputs)


class _Winograd(Rewriting):
    def __init__(self, graph: Graph, side: int) -> None:
        super().__init__(graph)
        self.producer, self.readers = graph.producer(), graph.consumers()
        self.forms = {x: form(x) for x in sorted({side, SIDE}, reverse=True)}
        self.tables: dict[str, str] = {}

    def run(self) -> Graph:
        """Return the rewritten graph."""
        for n in self.graph.nodes:
            convolution = self._convolution(n)
            if convolution is None:
                self.nodes.append(n)
            else:
                self._rewrite(convolution)
        read = {*self.graph.outputs, *(t for n in self.nodes for t in n.inputs)}
        self.nodes = [n for n in self.nodes if n.output in read or not _is_padding(n)]
        return self.result()

    def _convolution(self, n: Node) -> _Convolution | None:
        """Match a 3x3 convolution without strides and groups that gains from Winograd's form, or return None."""
        if not isinstance(n, Compute) or not is_contraction(n) or n.body.dtype != "float32":
            return None
        assert isinstance(n.body, Op)
        pair = [v for v in n.body.args if isinstance(v, Load)]
        weights = [v for v in pair if v.buffer in self.constants]
        extents = {reduction_name(k): e.constant for k, e in enumerate(n.reduction)}
        if len(pair) != 2 or len(weights) != 1 or len(extents) != 3:
            return None
        image, shape = pair[1 - pair.index(weights[0])], self.tensors[n.output].shape
        windows = tuple((a, *w) for a, i in enumerate(image.index) if (w := _window(i)))
        taps, axes = [t for *_, t, _ in windows], {dim_name(a) for a in range(len(shape))}
        column = [x for x in map(str, weights[0].index) if x in axes]
        channel = [x for x in extents if x not in taps]
        if len(windows) != 2 or len(column) != 1 or len(channel) != 1:
            return None
        others = axes - {column[0], *(dim_name(a) for _, a, *_ in windows)}
        plain = sorted(str(i) for i in image.index if _window(i) is None)
        of_weights = sorted(map(str, weights[0].index))
        if plain != sorted((*others, *channel)) or of_weights != sorted((*column, *channel, *taps)):
            return None
        inputs, outputs = extents[channel[0]], shape[_axis(column[0])].constant
        if any(extents[t] != TAPS for t in taps) or inputs is None or outputs is None:
            return None
        farthest = max(d for *_, d in windows)
        fit = [f for f in self.forms.values() if f.side * farthest <= MAX_TILE_EXTENT and pays(inputs, outputs, f.side)]
        return _Convolution(n, image, weights[0], _axis(column[0]), channel[0], windows, fit[0]) if fit else None

    def _rewrite(self, c: _Convolution) -> None:
        """Add the primitives of a convolution. A planar result is copied from a channels-last one."""
        shape, size = self.tensors[c.node.output].shape, V(c.form.size)
        pixels = tuple((a, d) for _, a, _, d in c.windows)
        batch = [a for a in range(len(shape)) if a not in (*(a for a, _ in pixels), c.column)]
        u = self._weights(c)
        image = self._image(c, batch)
        lines = self._along(c, "lines", image.output, 0, len(batch), pixels[0])
        self.nodes.append(compose(self._pop_node(), (image,)))
        v = self._along(c, "v", lines, 1, len(self.tensors[lines].shape) - 2, pixels[1])
        *tiles, channels = self.tensors[v].shape[2:]
        *place, i, j, column = (V(dim_name(a)) for a in range(len(tiles) + 3))
        k = V(reduction_name(0))
        factors = load(v, (i, j, *place, k), "float32"), load(u, (i, j, k, column), "float32")
        sums = self._add(c, "sums", (*tiles, size, size, shape[c.column]), op("mul", *factors), (channels,))
        body = self._pixels(c, sums, [(V(dim_name(a)), d) for a, d in pixels], batch, V(dim_name(c.column)))
        order = [*(a for a in range(len(shape)) if a != c.column), c.column]
        if order[-1] != len(shape) - 1:
            moved = substitute(body, {dim_name(a): V(dim_name(k)) for k, a in enumerate(order)})
            copy = self._add(c, "last", tuple(shape[a] for a in order), moved)
            body = load(copy, tuple(V(dim_name(a)) for a in order), "float32")
        self.nodes.append(replace(c.node, body=body, reduction=(), reduce=None))

    def _add(self, c: _Convolution, name: str, shape: tuple[Dim, ...], body: Value, sum_: tuple[Dim, ...] = ()) -> str:
        name = self.fresh_name(f"{c.node.output}{SUFFIX}.{name}")
        return self.add(Compute(name, body, sum_, "sum" if sum_ else None, c.node.origin), shape)

    def _pop_node(self) -> Compute:
        """Remove the last node again and return it."""
        node = self.nodes.pop()
        assert isinstance(node, Compute)
        return node

    def _weights(self, c: _Convolution) -> str:
        """Add ``u`` as a new constant [a, a, channels, outputs] and return its name."""
        layout = (*(t for *_, t, _ in c.windows), c.channel, dim_name(c.column))
        order = [[str(i) for i in c.weights.index].index(x) for x in layout]
        g = self.constants[c.weights.buffer].transpose(order).astype(np.float64)
        u = np.einsum("ai,bj,ijco->abco", c.form.taps, c.form.taps, g, optimize=True)
        return self.constant(f"{c.node.output}{SUFFIX}.u", np.ascontiguousarray(u, np.float32))

    def _combine(
        self, name: str, table: Array, row: Index, places: Sequence[Index], at: Callable[[Index], Value]
    ) -> Value:
        """Return the sum of the values at ``places``, each times its number in row ``row`` of a table."""
        terms = []
        for k, place in enumerate(places):
            term = at(place)
            if any(table[:, k] != 1):
                if name not in self.tables:
                    self.tables[name] = self.constant(f"{SUFFIX}.{name}", table)
                term = op("mul", load(self.tables[name], (row, V(k)), "float32"), term)
            terms.append(term)
        return reduce(partial(op, "add"), terms)

    def _along(self, c: _Convolution, name: str, tensor: str, number: int, axis: int, window: tuple[int, int]) -> str:
        """Apply B along an axis of a tensor: the rows of B become axis ``number``, and tiles replace pixels.

        ``window``: (axis of the output, dilation).
        """
        shape, (of_output, apart) = self.tensors[tensor].shape, window
        count = self.tensors[c.node.output].shape[of_output].ceildiv(c.form.side * apart)
        tiles = (count, V(apart)) if apart > 1 else (count,)
        new = (*shape[:number], V(c.form.size), *shape[number:axis], *tiles, *shape[axis + 1 :])
        digits = [V(dim_name(a)) for a in range(len(new))]
        x, tile = digits.pop(number), digits[axis : axis + len(tiles)]
        first = tile[0] * c.form.side * apart + sum(tile[1:], ZERO)
        before, after = digits[:axis], digits[axis + len(tiles) :]
        places = _element_places(x, c.form.size)
        read = lambda i: load(tensor, (*before, first + i * apart, *after), "float32")  # noqa: E731
        return self._add(c, name, new, self._combine(f"elements{c.form.side}", c.form.elements, x, places, read))

    def _pixels(
        self, c: _Convolution, sums: str, pixels: Sequence[tuple[Index, int]], batch: Sequence[int], column: Index
    ) -> Value:
        """Return ``y`` from the sums of a tile. ``pixels``: (subscript, dilation) along each axis."""
        side = c.form.side
        tile = (i for x, d in pixels for i in ((x // (side * d), x % d) if d > 1 else (x // side,)))
        place = (*(V(dim_name(a)) for a in batch), *tile)

        def along(at: tuple[Index, ...]) -> Value:
            if len(at) == len(pixels):
                return load(sums, (*place, *at, column), "float32")
            pixel, apart = pixels[len(at)]
            r = pixel // apart % side
            places = _sum_places(r, c.form.size)
            return self._combine(f"sums{side}", c.form.sums, r, places, lambda i: along((*at, i)))

        return along(())

    def _image(self, c: _Convolution, batch: Sequence[int]) -> Compute:
        """Return a node for the image as [batch.., (side*tiles + 2) * dilation, channels] with zeros around it.

        The node is not added to the graph.
        """
        shape = self.tensors[c.image.buffer].shape
        order = [*(V(dim_name(a)) for a in batch), *(V(dim_name(a)) for _, a, *_ in c.windows), V(c.channel)]
        here = {str(x): V(dim_name(k)) for k, x in enumerate(order)} | {t: ZERO for *_, t, _ in c.windows}
        index = tuple(i.subs(here) for i in c.image.index)
        body = self._padded(c, index)
        channel, (read,) = V(dim_name(len(order) - 1)), loads(body)
        if channel in read.index[:-1]:
            copy = self._in_order(c, read, channel)
            body = transform(body, lambda x: copy if x == read else x)
        output_shape, side = self.tensors[c.node.output].shape, c.form.side
        rows = ((output_shape[a].ceildiv(side * d) * side + (TAPS - 1)) * d for _, a, _, d in c.windows)
        sizes = (*(output_shape[a] for a in batch), *rows)
        self._add(c, "image", (*sizes, shape[[str(i) for i in c.image.index].index(c.channel)]), body)
        return self._pop_node()

    def _padded(self, c: _Convolution, index: tuple[Index, ...]) -> Value:
        """Return an element of the image, or 0 after its end.

        A padding without other readers is replaced by its guarded element.
        """
        source, element = self.producer.get(c.image.buffer), load(c.image.buffer, index, "float32")
        guarded = frozenset[str]()
        body: Value = element
        if isinstance(source, Compute) and _is_padding(source) and self._alone(source.output):
            assert isinstance(source.body, Op)
            guarded = frozenset(s for i in indices(source.body.args[0]) for s in i.symbols())
            body = source.at(index)
        for a in (a for a, *_ in c.windows if dim_name(a) not in guarded):
            end = FromIndex("int64", self.tensors[c.image.buffer].shape[a])
            body = op("where", op("lt", FromIndex("int64", index[a]), end), body, const(0, "float32"))
        return body

    def _alone(self, tensor: str) -> bool:
        return len(self.readers[tensor]) == 1 and tensor not in self.graph.outputs

    def _in_order(self, c: _Convolution, read: Load, channel: Index) -> Value:
        """Add a channels-last copy and return a load from it."""
        at = read.index.index(channel)
        order = [*(a for a in range(len(read.index)) if a != at), at]
        shape = self.tensors[read.buffer].shape
        index = [V(dim_name(order.index(a))) for a in range(len(order))]
        copy = self._add(c, "turned", tuple(shape[a] for a in order), load(read.buffer, tuple(index), read.dtype))
        return load(copy, tuple(read.index[a] for a in order), read.dtype)


def _window(i: Index) -> tuple[int, str, int] | None:
    """Return (axis, reduction, dilation) if a subscript is ``axis + dilation * reduction``, else None."""
    axes, taps = ([s for s in i.symbols() if f(s)] for f in (is_axis, is_reduction))
    if len(axes) != 1 or len(taps) != 1:
        return None
    apart = i.split(taps[0])[0].constant or 0
    return (_axis(axes[0]), taps[0], apart) if i == V(axes[0]) + V(taps[0]) * apart else None


def _is_padding(n: Node) -> bool:
    return isinstance(n, Compute) and is_guarded_view(n) and len(loads(n.body)) == 1


def _axis(symbol: str) -> int:
    return int(symbol[1:])

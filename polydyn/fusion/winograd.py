"""Winograd's F(2,3): a convolution of 3x3 taps as products of tiles, with 4 multiplications instead of 9 for a pixel.

Two neighbouring sums of three products, ``y[r] = sum(d[r + k] * g[k])`` for r = 0, 1, need four multiplications:

    v = (d0 - d2, d1 - d3, d1 + d2, d1 - d2)
    u = (g0, -g2, (g0 + g1 + g2) / 2, -(g0 - g1 + g2) / 2)
    y[r] = v[r]*u[r] + (v[2]*u[2] + (1 - 2*r) * v[3]*u[3])

The four are numbered ``2*p + q``, so that ``v`` is one expression, affine but for divisions by 2:

    d[(p + q + 1) // 2] + (2*((p - q + 1) // 2) - 1) * d[2 + (q - p + 1) // 2]

Along two axes there are 16 for a tile of 2x2 pixels. With a dilation a tile's pixels and elements are that far apart,
and so many tiles lie one within the other. A convolution becomes four primitives: a copy of the image with zeros around
all tiles, ``v`` (a map, which joins the product's promotion), 16 products over channels, and ``y`` (a map, which what
follows joins). The weights ``u`` are constants. Sums of tiles lie in memory, four times as large as the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polydyn.fusion.products import is_axis, is_contraction, is_reduction
from polydyn.fusion.prologue import is_guarded_view
from polydyn.graph.ir import Compute, Dim, Graph, Node, dim_name, reduction_name
from polydyn.graph.rewriting import Rewriting
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
DILATION = 4
"""The largest: tiles of 2 pixels so far apart cover twice an image that is no larger."""
BALANCE = 8
"""Multiply-adds that a core makes while it moves a byte to or from memory."""
V = Index.of
G: Array = np.array([[1, 0, 0], [0, 0, -1], [0.5, 0.5, 0.5], [-0.5, 0.5, -0.5]])
"""``u`` of three taps, numbered as above."""


@dataclass(frozen=True)
class _Convolution:
    """A node of a graph that is one. ``image``, ``weights``: what it multiplies. ``column``: the axis of its output
    channels; ``channel``: the reduction over input channels; ``windows``: (axis of the image, axis of the output,
    reduction over taps, dilation) of both axes of pixels.
    """

    node: Compute
    image: Load
    weights: Load
    column: int
    channel: str
    windows: tuple[tuple[int, int, str, int], ...]


def winograd(graph: Graph) -> Graph:
    """The graph in which convolutions that gain from it are products of tiles."""
    return _Winograd(graph).run()


def pays(channels: int, outputs: int) -> bool:
    """Whether the multiplications that a pixel saves, 5 of 9 for each pair of channels, outweigh the bytes it moves.

    These are four elements of tiles for each input channel, and four sums for each output channel, written and read.
    """
    return 5 * channels * outputs > BALANCE * 4 * (4 * channels + 8 * outputs)


class _Winograd(Rewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.producer, self.readers = graph.producer(), graph.consumers()

    def run(self) -> Graph:
        """The rewritten graph."""
        for n in self.graph.nodes:
            found = self._convolution(n)
            if found is None:
                self.nodes.append(n)
            else:
                self._rewrite(found)
        read = {*self.graph.outputs, *(t for n in self.nodes for t in n.inputs)}
        self.nodes = [n for n in self.nodes if n.output in read or not _is_padding(n)]
        return self.result()

    def _convolution(self, n: Node) -> _Convolution | None:
        """The node as a convolution of 3x3 taps without strides and groups that gains; None: it is none."""
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
        if any(extents[t] != TAPS for t in taps) or inputs is None or outputs is None or not pays(inputs, outputs):
            return None
        return _Convolution(n, image, weights[0], _axis(column[0]), channel[0], windows)

    def _rewrite(self, c: _Convolution) -> None:
        """Adds the primitives of a convolution; a result in planes is copied from one whose channels lie together."""
        shape = self.tensors[c.node.output].shape
        pixels = tuple((a, d) for _, a, _, d in c.windows)
        batch = [a for a in range(len(shape)) if a not in (*(a for a, _ in pixels), c.column)]
        tiles = tuple(shape[a].ceildiv(2 * d) for a, d in pixels)
        counts = [x for t, (_, d) in zip(tiles, pixels, strict=True) for x in ((t, V(d)) if d > 1 else (t,))]
        common = (*(V(2),) * 4, *(shape[a] for a in batch), *counts)
        *digits, last = (V(dim_name(a)) for a in range(len(common) + 1))
        image, u = self._image(c, batch, tiles), self._weights(c)
        channels = self.tensors[image].shape[-1]
        at, left = digits[4 : 4 + len(batch)], iter(digits[4 + len(batch) :])
        first = [(next(left) * 2 * d + (next(left) if d > 1 else 0), d) for _, d in pixels]
        v = self._add(c, "v", (*common, channels), _elements(image, at, first, (digits[:2], digits[2:4]), last))
        k = V(reduction_name(0))
        factors = load(v, (*digits, k), "float32"), load(u, (*digits[:4], k, last), "float32")
        sums = self._add(c, "sums", (*common, shape[c.column]), op("mul", *factors), (channels,))
        body = _pixels(sums, [(V(dim_name(a)), d) for a, d in pixels], batch, V(dim_name(c.column)))
        order = [*(a for a in range(len(shape)) if a != c.column), c.column]
        if order[-1] != len(shape) - 1:
            moved = substitute(body, {dim_name(a): V(dim_name(k)) for k, a in enumerate(order)})
            copy = self._add(c, "last", tuple(shape[a] for a in order), moved)
            body = load(copy, tuple(V(dim_name(a)) for a in order), "float32")
        self.nodes.append(replace(c.node, body=body, reduction=(), reduce=None))

    def _add(self, c: _Convolution, what: str, shape: tuple[Dim, ...], body: Value, sum_: tuple[Dim, ...] = ()) -> str:
        name = self.fresh(f"{c.node.output}{SUFFIX}.{what}")
        return self.add(Compute(name, body, sum_, "sum" if sum_ else None, c.node.origin), shape)

    def _weights(self, c: _Convolution) -> str:
        """``u`` as [2, 2, 2, 2, channels, outputs], a new constant."""
        wanted = (*(t for *_, t, _ in c.windows), c.channel, dim_name(c.column))
        order = [[str(i) for i in c.weights.index].index(x) for x in wanted]
        g = self.constants[c.weights.buffer].transpose(order).astype(np.float64)
        u = np.einsum("ai,bj,ijco->abco", G, G, g).astype(np.float32)
        return self.constant(f"{c.node.output}{SUFFIX}.u", np.ascontiguousarray(u.reshape(2, 2, 2, 2, *u.shape[2:])))

    def _image(self, c: _Convolution, batch: Sequence[int], tiles: tuple[Dim, ...]) -> str:
        """The image as [batch.., (2*tiles + 2) * dilation, channels], zeros behind its end."""
        shape = self.tensors[c.image.buffer].shape
        order = [*(V(dim_name(a)) for a in batch), *(V(dim_name(a)) for _, a, *_ in c.windows), V(c.channel)]
        here = {str(x): V(dim_name(k)) for k, x in enumerate(order)} | {t: ZERO for *_, t, _ in c.windows}
        index = tuple(i.subs(here) for i in c.image.index)
        body = self._padded(c, index)
        channel, (read,) = V(dim_name(len(order) - 1)), loads(body)
        if channel in read.index[:-1]:
            copy = self._in_order(c, read, channel)
            body = transform(body, lambda x: copy if x == read else x)
        rows = ((t * 2 + (TAPS - 1)) * d for t, (*_, d) in zip(tiles, c.windows, strict=True))
        sizes = (*(self.tensors[c.node.output].shape[a] for a in batch), *rows)
        return self._add(c, "image", (*sizes, shape[[str(i) for i in c.image.index].index(c.channel)]), body)

    def _padded(self, c: _Convolution, index: tuple[Index, ...]) -> Value:
        """An element of the image, of a padding that nobody else reads the element it guards; 0 behind its end."""
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
        """The load of a copy whose channels lie together."""
        at = read.index.index(channel)
        order = [*(a for a in range(len(read.index)) if a != at), at]
        shape = self.tensors[read.buffer].shape
        index = [V(dim_name(order.index(a))) for a in range(len(order))]
        copy = self._add(c, "turned", tuple(shape[a] for a in order), load(read.buffer, tuple(index), read.dtype))
        return load(copy, tuple(read.index[a] for a in order), read.dtype)


def _elements(
    image: str, batch: Sequence[Index], tile: Sequence[tuple[Index, int]], numbers: Sequence[Sequence[Index]],
    channel: Index,
) -> Value:  # fmt: skip
    """``v`` of a tile: along both axes of pixels a sum or a difference of two elements.

    ``tile``: (its first element, dilation) along each; ``numbers``: ``p, q`` along each.
    """

    def along(at: tuple[Index, ...]) -> Value:
        if len(at) == len(numbers):
            return load(image, (*batch, *at, channel), "float32")
        (p, q), (first, apart) = numbers[len(at)], tile[len(at)]
        a, b = (along((*at, first + step * apart)) for step in ((p + q + 1) // 2, 2 + (q - p + 1) // 2))
        return op("add", a, op("mul", FromIndex("float32", (p - q + 1) // 2 * 2 - 1), b))

    return along(())


def _pixels(sums: str, pixels: Sequence[tuple[Index, int]], batch: Sequence[int], column: Index) -> Value:
    """``y`` of the 16 sums of a tile. ``pixels``: (where, dilation) along each axis."""
    tile = (i for x, d in pixels for i in ((x // (2 * d), x % d) if d > 1 else (x // 2,)))
    place = (*(V(dim_name(a)) for a in batch), *tile, column)

    def along(at: tuple[Index, ...]) -> Value:
        if len(at) == 2 * len(pixels):
            return load(sums, (*at, *place), "float32")
        pixel, apart = pixels[len(at) // 2]
        r = pixel // apart % 2
        a, b, d = (along((*at, V(p), V(q))) for p, q in ((0, r), (1, 0), (1, 1)))
        return op("add", a, op("add", b, op("mul", FromIndex("float32", 1 - r * 2), d)))

    return along(())


def _window(i: Index) -> tuple[int, str, int] | None:
    """The axis, the reduction and the dilation whose sum a subscript is; None where it is another expression."""
    axes, taps = ([s for s in i.symbols() if f(s)] for f in (is_axis, is_reduction))
    if len(axes) != 1 or len(taps) != 1:
        return None
    apart = i.split(taps[0])[0].constant or 0
    return (_axis(axes[0]), taps[0], apart) if i == V(axes[0]) + V(taps[0]) * apart and apart <= DILATION else None


def _is_padding(n: Node) -> bool:
    return isinstance(n, Compute) and is_guarded_view(n) and len(loads(n.body)) == 1


def _axis(symbol: str) -> int:
    return int(symbol[1:])

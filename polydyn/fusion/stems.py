"""Convolutions of few channels, with pixels and channels as one reduction for the matrix unit (docs/adr/0023-types.md).

An instruction of the unit multiplies up to 32 steps that are contiguous in memory. An image of 3 channels has no such
steps. Stored channels last, with its channels padded to a power of 2, the taps of a window's row are contiguous: 7
taps of 4 channels are 28 steps. So the window along a row and the channels become one reduction, padded to whole words,
and the convolution reads the image at a distance of ``stride * channels`` for each pixel. Windows are not copied.

    sum over c, t of x[c, s*w + t - p] * k[c, t]  ==  sum over r of X[C * (s*w - p) + r] * K[r],   r = C * t + c

The gain: a 7x7 convolution of 224 x 224 pixels takes 0.6 ms instead of 1.7 (docs/notes/0023-types.md).

Padded steps have weights 0. Sums are equal if the image is finite; an infinite pixel makes the sums that read it as
padding NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from polydyn.fusion.places import is_guarded_view
from polydyn.fusion.products import is_contraction
from polydyn.graph.ir import Compute, Graph, dim_name, reduction_name
from polydyn.graph.rewriting import Rewriting, live
from polydyn.schedules.expr import (
    Array,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    conjuncts,
    const,
    indices,
    loads,
    substitute,
)
from polydyn.schedules.index import Index

MOST_CHANNELS = 8
"""Maximum channels of an image. With 16, the steps of one pixel fill an instruction."""
LEAST_STEPS = 16
"""Steps that the unit multiplies without waste: the steps of a row of the window become a multiple."""
IMAGE, WEIGHTS = "@pixels", "@rows"
V = Index.of


@dataclass(frozen=True)
class _Stem:
    """A convolution of few channels.

    ``image`` and ``weights``: its loads. ``channel`` and ``tap``: the numbers of the reductions over channels and along
    the window's row. ``axis``: the image's axis of channels. ``channels``: their number; ``padded``: their number after
    padding.
    """

    image: Load
    weights: Load
    channel: int
    tap: int
    axis: int
    channels: int
    padded: int


def merge_rows_of_windows(graph: Graph) -> Graph:
    """Rewrite all such convolutions with constant weights."""
    return _Merging(graph).run()


class _Merging(Rewriting):
    def run(self) -> Graph:
        """Return the rewritten graph."""
        self.paddings = {
            n.output: n for n in self.graph.nodes
            if isinstance(n, Compute) and is_guarded_view(n) and isinstance(n.body, Op) and _is_zero(n.body.args[2])
        }  # fmt: skip
        for n in self.graph.nodes:
            stem = self._stem(n) if isinstance(n, Compute) and is_contraction(n) else None
            self.nodes.append(n if stem is None else self._merged(n, stem))  # type: ignore[arg-type]
        return live(self.result())

    def _stem(self, n: Compute) -> _Stem | None:
        assert isinstance(n.body, Op)
        weights = [v for v in n.body.args if isinstance(v, Load) and v.buffer in self.constants]
        images = [v for v in n.body.args if isinstance(v, Load) and v not in weights]
        if n.body.dtype != "float32" or len(weights) != 1 or len(images) != 1:
            return None
        ((w,), (image,)) = weights, images
        for channel, extent in enumerate(n.reduction):
            at = V(reduction_name(channel))
            few = 0 < (extent.constant or 0) <= MOST_CHANNELS
            if not few or at not in image.index[1:-1] or at not in w.index:
                continue
            axis = image.index.index(at)
            whole = self.graph.tensors[image.buffer].shape[axis] == extent
            alone = sum(reduction_name(channel) in i.symbols() for i in indices(n.body)) == 2
            taps = [k for k in range(len(n.reduction)) if _is_tap(image, w, k)]
            if whole and alone and taps:
                channels = int(extent)
                return _Stem(image, w, channel, taps[0], axis, channels, max(2, 1 << (channels - 1).bit_length()))
        return None

    def _merged(self, n: Compute, stem: _Stem) -> Compute:
        """Return the convolution over merged steps; add the nodes that it reads."""
        taps = n.reduction[stem.tap].constant
        assert taps is not None and isinstance(n.body, Op)
        steps = -(-taps * stem.padded // LEAST_STEPS) * LEAST_STEPS
        weights = self.constant(stem.weights.buffer + WEIGHTS, self._merged_weights(stem, steps))
        r = V(reduction_name(stem.tap))
        place = (stem.image.index[-1] - r) * stem.padded + r
        image = self._image(n, stem, place, steps - taps * stem.padded)
        merged = {reduction_name(k) for k in (stem.channel, stem.tap)}
        row = tuple(i for i in stem.weights.index if not i.symbols() & merged)
        new = {id(stem.image): image, id(stem.weights): Load("float32", weights, (*row, r))}
        body = replace(n.body, args=tuple(new[id(v)] for v in n.body.args))
        kept = [k for k in range(len(n.reduction)) if k != stem.channel]
        names = {reduction_name(k): V(reduction_name(at)) for at, k in enumerate(kept)}
        reduction = tuple(V(steps) if k == stem.tap else n.reduction[k] for k in kept)
        return replace(n, body=substitute(body, names), reduction=reduction)

    def _merged_weights(self, stem: _Stem, steps: int) -> Array:
        """Return the weights [.., steps]. The stored weights have a dimension for channels and one for taps."""
        array = self.constants[stem.weights.buffer]
        at = [stem.weights.index.index(V(reduction_name(k))) for k in (stem.tap, stem.channel)]
        moved = np.moveaxis(array, at, (-2, -1))
        out = np.zeros((*moved.shape[:-2], steps // stem.padded, stem.padded), array.dtype)
        out[..., : moved.shape[-2], : moved.shape[-1]] = moved
        return out.reshape(*out.shape[:-2], steps)

    def _image(self, n: Compute, stem: _Stem, place: Index, extra_places: int) -> Load:
        """Return the load of the image's element at ``place`` along its last axis.

        ``extra_places``: the places after the end of a row that the convolution reads.
        """
        pixels = tuple(i for a, i in enumerate(stem.image.index[:-1]) if a != stem.axis)
        padding = self.paddings.get(stem.image.buffer)
        padded = self._padded(padding, stem, extra_places) if padding is not None else None
        if padded is None:
            shape = self.graph.tensors[stem.image.buffer].shape
            same = Load("float32", stem.image.buffer, tuple(V(dim_name(a)) for a in range(len(shape))))
            view = Op("float32", "where", (const(True, "bool"), same, const(0.0, "float32")))
            padded = self._padded(Compute(stem.image.buffer, view, origin=n.origin), stem, extra_places)
            assert padded is not None, "a view of the whole image"
        return Load("float32", padded, (*pixels, place))

    def _padded(self, n: Compute, stem: _Stem, extra_places: int) -> str | None:
        """Add a padded image with merged pixels and channels; return its name, or None if ``n`` pads channels.

        ``n``: the node that pads the image. ``extra_places``: the zeros to add after the end of a row.
        """
        (read,) = loads(n.body)
        assert isinstance(n.body, Op)
        shape = self.graph.tensors[n.output].shape
        channel, last = dim_name(stem.axis), dim_name(len(shape) - 1)
        pixel, width = read.index[-1], stem.padded
        own = pixel - V(last)
        if read.index[stem.axis] != V(channel) or sum(channel in i.symbols() for i in indices(n.body)) != 1:
            return None
        if last in own.symbols() or any(last in i.symbols() and i != pixel for i in indices(n.body)):
            return None
        image, place = self._channels_last(read.buffer, n, stem), own * width + V(last)
        element = Load("float32", image, (*(i for a, i in enumerate(read.index[:-1]) if a != stem.axis),
                                          *_cut(place, width)))  # fmt: skip
        end = self.graph.tensors[read.buffer].shape[-1]
        inside = [Op("bool", "lt", (FromIndex("int64", place), FromIndex("int64", end * width)))]
        for c in conjuncts(n.body.args[0]):
            if isinstance(c, Const):
                continue
            assert isinstance(c, Op)
            if not any(last in i.symbols() for i in indices(c)):
                inside.append(c)
            elif c == Op("bool", "ge", (FromIndex("int64", pixel), const(0, "int64"))):
                inside.append(Op("bool", "ge", (FromIndex("int64", place), const(0, "int64"))))
            elif c != Op("bool", "lt", (FromIndex("int64", pixel), FromIndex("int64", end))):
                return None
        condition = reduce(lambda a, b: Op("bool", "and", (a, b)), inside)
        axes = [a for a in range(len(shape)) if a != stem.axis]
        body = Op("float32", "where", (condition, element, const(0.0, "float32")))
        new = substitute(body, {dim_name(a): V(dim_name(k)) for k, a in enumerate(axes)})
        extent = (*(shape[a] for a in axes[:-1]), shape[-1] * width + extra_places)
        return self.add(Compute(self.fresh_name(n.output + IMAGE), new, origin=n.origin), extent)

    def _channels_last(self, name: str, n: Compute, stem: _Stem) -> str:
        """Add an image with its channels last and padded with zeros; return its name."""
        shape = self.graph.tensors[name].shape
        pixels = [a for a in range(len(shape)) if a != stem.axis]
        last = V(dim_name(len(pixels)))
        at = {a: V(dim_name(k)) for k, a in enumerate(pixels)} | {stem.axis: last}
        element: Value = Load("float32", name, tuple(at[a] for a in range(len(shape))))
        if stem.padded > stem.channels:
            exists = Op("bool", "lt", (FromIndex("int64", last), const(stem.channels, "int64")))
            element = Op("float32", "where", (exists, element, const(0.0, "float32")))
        image = Compute(self.fresh_name(name + IMAGE), element, origin=n.origin)
        return self.add(image, (*(shape[a] for a in pixels), V(stem.padded)))


def _is_zero(v: Value) -> bool:
    return isinstance(v, Const) and v.value == 0


def _cut(place: Index, width: int) -> tuple[Index, Index]:
    """Return the pixel and the channel of an element."""
    return place // width, place - (place // width) * width


def _is_tap(image: Load, weights: Load, step: int) -> bool:
    """Check whether a reduction moves the last place of an image by one, and the weights, and nothing else."""
    name, place = reduction_name(step), image.index[-1]
    distance, rest = place.split(name)
    elsewhere = [i for i in (*image.index[:-1], *weights.index) if i != V(name) and name in i.symbols()]
    return distance == V(1) and name not in rest.symbols() and V(name) in weights.index and not elsewhere

"""Convolutions with narrow groups of channels, in groups that fill a tile of the matrix unit (docs/adr/0023-types.md).

A tile of the unit reads 32 channels of a pixel in the time of one. Groups of 2, 4, 8 or 16 channels become groups of
32: weights between channels of different groups are 0. So the unit does ``32 / size`` times the operations, which its
rate pays for: in ResNeXt-50, a 3x3 convolution with groups of 4 takes 0.25 ms instead of 0.59, and one with groups of 8
takes 0.13 instead of 0.60 (docs/notes/0023-types.md). Vector kernels waste nothing, but each lane reads its own group.

The new sums add products with 0. They are equal if the image is finite; an infinite element makes all 32 channels NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polydyn.fusion.products import group_size, is_axis, is_contraction
from polydyn.graph.ir import Compute, Dim, Graph, dim_name, reduction_name
from polydyn.graph.rewriting import Rewriting
from polydyn.schedules.expr import Array, Load, Op, indices, loads, map_index
from polydyn.schedules.index import Index

SIZES = (2, 4, 8, 16)
"""Channels of a group that is widened. Groups of one channel are depthwise: their vectors waste nothing."""
TILE_CHANNELS = 32
"""Channels of 16 bits that a tile reads for each of its rows."""
SUFFIX = "@groups"
V = Index.of


def widen_groups(graph: Graph) -> Graph:
    """Widen the groups of all products of an image, stored channels last, with constant weights."""
    return _Widening(graph).run()


class _Widening(Rewriting):
    def run(self) -> Graph:
        """Return the rewritten graph."""
        for n in self.graph.nodes:
            self.nodes.append(self._widened(n) if isinstance(n, Compute) and is_contraction(n) else n)
        return self.result()

    def _widened(self, n: Compute) -> Compute:
        """Return a node with wide groups; the node itself if its groups are not narrow or its weights not constant."""
        found = self._grouped(n)
        if found is None:
            return n
        axis, step, weights = found
        size = n.reduction[step].constant
        assert size is not None and isinstance(n.body, Op)
        of, rows = weights.index.index(V(dim_name(axis))), weights.index.index(V(reduction_name(step)))
        name = self.constant(weights.buffer + SUFFIX, _spread(self.constants[weights.buffer], of, rows, size))
        channel = V(dim_name(axis))
        moved = (channel // TILE_CHANNELS) * TILE_CHANNELS - (channel // size) * size

        def wide(i: Index) -> Index:
            return i + moved if group_size(i, dim_name(axis)) else i

        args = tuple(replace(weights, buffer=name) if v is weights else map_index(v, wide) for v in n.body.args)
        reduction = tuple(V(TILE_CHANNELS) if k == step else e for k, e in enumerate(n.reduction))
        return replace(n, body=replace(n.body, args=args), reduction=reduction)

    def _grouped(self, n: Compute) -> tuple[int, int, Load] | None:
        """Return the axis of a product that is cut into narrow groups, the reduction over a group's channels, and the
        load of the weights.
        """
        assert isinstance(n.body, Op)
        weights = [v for v in n.body.args if isinstance(v, Load) and v.buffer in self.constants]
        if n.body.dtype != "float32" or len(weights) != 1:
            return None
        (w,) = weights
        (image,) = (v for v in n.body.args if v is not w)
        shape = self.graph.tensors[n.output].shape
        for axis in range(len(shape)):
            cut = [(i, m) for i in indices(image) if (m := group_size(i, dim_name(axis))) in SIZES]
            read = loads(image)
            if len(cut) != 1 or len(read) != 1 or cut[0][0] != read[0].index[-1]:
                continue  # its channels are not contiguous
            ((i, size),) = cut
            rest = i - (V(dim_name(axis)) // size) * size
            for step, extent in enumerate(n.reduction):
                own = [x for x in indices(n.body) if reduction_name(step) in x.symbols()]
                plain = rest == V(reduction_name(step)) and extent.constant == size and len(own) == 2
                if plain and _is_whole(shape[axis]) and _has_both(w, axis, step):
                    return axis, step, w
        return None


def _is_whole(channels: Dim) -> bool:
    return channels.constant is not None and channels.constant % TILE_CHANNELS == 0


def _has_both(w: Load, axis: int, step: int) -> bool:
    """Check whether weights are subscripted by the axis, by the reduction, and otherwise by neither."""
    named = {V(dim_name(axis)), V(reduction_name(step))}
    others = [i for i in w.index if i not in named]
    return named <= {*w.index} and not any(is_axis(s) for i in others for s in i.symbols())


def _spread(weights: Array, axis: int, rows: int, size: int) -> Array:
    """Return weights [.., channels, .., 32, ..] for groups of 32. ``weights`` is for groups of ``size`` channels.

    ``axis`` and ``rows``: the dimensions of the output channels and of a group's input channels.
    """
    moved = np.moveaxis(weights, (axis, rows), (0, 1))
    out = np.zeros((len(moved), TILE_CHANNELS, *moved.shape[2:]), weights.dtype)
    channel = np.arange(len(moved))
    first = channel // size * size % TILE_CHANNELS
    for k in range(size):
        out[channel, first + k] = moved[:, k]
    return np.ascontiguousarray(np.moveaxis(out, (0, 1), (axis, rows)))

"""Channels last: store the results of convolutions as [N, spatial..., C] (docs/adr/0010-convolutions.md).

A convolution is then a matrix product. Its columns are output channels, its weights are a packed constant with unit
stride, and its rows are pixels with contiguous channels. The order spreads to nodes that read channel ``d1`` of such a
tensor element by element, window by window or reduced over pixels. Other readers subscript the new order.

Only intermediates change. Inputs and outputs of the model keep their order. So do tensors that are computed element by
element on the way to an output: their kernel writes the model's order directly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polydyn.fusion.products import has_column, has_narrow_groups, is_contraction, is_windowed
from polydyn.graph.ir import Compute, Concat, Graph, Tensor, dim_name, iterators
from polydyn.graph.rewriting import Rewriting, compose
from polydyn.schedules.expr import (
    FLOATS,
    Load,
    Op,
    Value,
    indices,
    load,
    loads,
    substitute,
    symbols_of,
    transform,
)  # fmt: skip
from polydyn.schedules.index import Index

SUFFIX = "@last"
IMAGE_DTYPES = (*FLOATS, "int8", "uint8", "int32")
"""Dtypes of images, including quantized images and their sums."""


def channels_last(graph: Graph) -> Graph:
    """Store convolutions and the nodes after them in channels-last order."""
    return _Layout(graph).run()


def channels_last_axis(axis: int, rank: int) -> int:
    """Return the new position of an axis: channels (axis 1) move to the end, spatial axes one to the front."""
    return axis if axis == 0 else rank - 1 if axis == 1 else axis - 1


class _Layout(Rewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.last: dict[str, str] = {}
        """Maps a tensor to the channels-last tensor with the same elements."""
        self.readers = graph.consumers()
        self.parts: dict[str, Compute] = {}
        """Maps that are computed in their reader, by output."""
        self.fixed = self._fixed()

    def _fixed(self) -> set[str]:
        """Return the tensors that keep their order: outputs, subscripts, and their element-by-element producers."""
        bodies = [n.body for n in self.graph.nodes if isinstance(n, Compute)]
        fixed = {*self.graph.outputs, *(a.name for v in bodies for i in indices(v) for a in i.fetches())}
        for n in reversed(self.graph.nodes):
            if isinstance(n, Compute) and n.is_map and n.output in fixed:
                same = tuple(Index.of(dim_name(a)) for a in range(len(self.graph.tensors[n.output].shape)))
                fixed |= {x.buffer for x in loads(n.body) if x.index == same and len(self.readers[x.buffer]) == 1}
        return fixed

    def run(self) -> Graph:
        """Return the rewritten graph."""
        for n in self.graph.nodes:
            if isinstance(n, Concat):
                self._concat(n)
            else:
                self._compute(n)
        return self.result()

    def _compute(self, n: Compute) -> None:
        n = self._with_parts(n)
        if self._is_part(n):
            self.parts[n.output] = n
            return
        n, moves = replace(n, body=transform(n.body, self._reread)), self._moves(n)
        if not moves:
            self.nodes.append(n)
            return
        if is_contraction(n) and (not has_column(n) or has_narrow_groups(n, dim_name(1))):
            n = replace(n, body=transform(n.body, self._taps_first))
        rank = len(self.graph.tensors[n.output].shape)
        name = self._new(n.output)
        env = {dim_name(a): Index.of(dim_name(channels_last_axis(a, rank))) for a in range(rank)}
        self.nodes.append(replace(n, output=name, body=substitute(n.body, env)))

    def _with_parts(self, n: Compute) -> Compute:
        """Inline the parts of another rank (groups of channels, of a norm) into the node, so that it subscripts the
        image directly.
        """
        parts = [self.parts[x.buffer] for x in loads(n.body) if x.buffer in self.parts]
        return compose(n, parts, dict(iterators(self.graph, n))) if parts else n

    def _is_part(self, n: Compute) -> bool:
        """Check whether a map reads a channels-last tensor and has another rank than its only reader.

        The reader must be a map that reads it once.
        """
        t = self.graph.tensors[n.output]
        readers = self.readers[n.output]
        if not n.is_map or self._moves(n) or n.output in self.graph.outputs or len(readers) != 1:
            return False
        reader = readers[0]
        if not isinstance(reader, Compute) or not reader.is_map:
            return False
        rank = len(self.graph.tensors[reader.output].shape)
        once = sum(x.buffer == n.output for x in loads(reader.body)) == 1
        fetched = any(a.name == n.output for i in indices(reader.body) for a in i.fetches())
        return once and not fetched and rank != len(t.shape) and any(x.buffer in self.last for x in loads(n.body))

    def _moves(self, n: Compute) -> bool:
        """Check whether the node's result should be stored channels last."""
        t = self.graph.tensors[n.output]
        if t.name in self.fixed or t.dtype not in IMAGE_DTYPES or len(t.shape) < 3:
            return False
        read = [x for x in loads(n.body) if x.buffer in self.last and len(x.index) == len(t.shape)]
        return _is_convolution(n, len(t.shape)) or any(_along_channels(x.index[1]) for x in read)

    def _reread(self, v: Value) -> Value:
        if not isinstance(v, Load) or v.buffer not in self.last:
            return v
        n, c, *spatial = v.index
        return replace(v, buffer=self.last[v.buffer], index=(n, *spatial, c))

    def _taps_first(self, v: Value) -> Value:
        """Store the weights [C, ...] of a depthwise convolution, or of narrow groups, channels last too: vectors run
        along C.
        """
        if not isinstance(v, Load) or v.buffer not in self.graph.constants or len(v.index) < 2:  # scales, zero points
            return v
        if v.index[0] != Index.of(dim_name(1)):
            return v
        c, *taps = v.index
        name, array = f"{v.buffer}{SUFFIX}", self.graph.constants[v.buffer]
        c_size, *sizes = self.tensors[v.buffer].shape
        self.constants[name] = np.ascontiguousarray(np.moveaxis(array, 0, -1))
        self.tensors[name] = Tensor(name, v.dtype, (*sizes, c_size))
        return replace(v, buffer=name, index=(*taps, c))

    def _concat(self, n: Concat) -> None:
        rank = len(self.graph.tensors[n.output].shape)
        inner = n.output not in self.graph.outputs and rank >= 3
        if not inner or not any(p in self.last for p in n.parts):
            self.nodes.append(replace(n, parts=tuple(self._first(p) for p in n.parts)))
            return
        parts = tuple(self._as_last(p, n.origin) for p in n.parts)
        self.nodes.append(replace(n, output=self._new(n.output), parts=parts, axis=channels_last_axis(n.axis, rank)))

    def _as_last(self, tensor: str, origin: str) -> str:
        """Return the channels-last tensor, copying the tensor if needed."""
        if tensor not in self.last:
            rank = len(self.graph.tensors[tensor].shape)
            index = tuple(Index.of(dim_name(channels_last_axis(a, rank))) for a in range(rank))
            body = load(tensor, index, self.graph.tensors[tensor].dtype)
            self.nodes.append(Compute(self._new(tensor), body, origin=origin))
        return self.last[tensor]

    def _first(self, tensor: str) -> str:
        """Return the tensor in its own order, copying it if it is stored channels last."""
        if tensor in self.last and not any(m.output == tensor for m in self.nodes):
            index = tuple(Index.of(dim_name(a)) for a in range(len(self.graph.tensors[tensor].shape)))
            v = self._reread(load(tensor, index, self.graph.tensors[tensor].dtype))
            self.nodes.append(Compute(tensor, v, origin="layout"))
        return tensor

    def _new(self, tensor: str) -> str:
        t = self.graph.tensors[tensor]
        n, c, *spatial = t.shape
        name = f"{tensor}{SUFFIX}"
        self.tensors[name] = Tensor(name, t.dtype, (n, *spatial, c))
        self.last[tensor] = name
        return name


def _along_channels(subscript: Index) -> bool:
    """Check whether a channel subscript is an output channel, perhaps shuffled, or moves step by step with it."""
    c = dim_name(1)
    return subscript.symbols() == {c} or (subscript.is_polynomial and subscript.split(c)[0] == 1)


def _is_convolution(n: Compute, rank: int) -> bool:
    """Check for a sum of products over pixels: one operand has axis 1 and no pixel axis, the other one has pixel axes.

    With one pixel axis, only windows count; a product without windows is a matrix product.
    """
    if n.reduce != "sum" or not (isinstance(n.body, Op) and n.body.name == "mul") or rank < 3:
        return False
    axes = [symbols_of(v) for v in n.body.args]
    pixels = {dim_name(a) for a in range(2, rank)}
    for weights, image in (axes, axes[::-1]):
        if dim_name(1) in weights and not weights & (pixels | {dim_name(0)}) and image & pixels:
            return is_windowed(n) or (rank > 3 and dim_name(0) in image)
    return False

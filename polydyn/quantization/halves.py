"""Store weights and activations of a model in 16-bit floats: ``polydyn.to_half`` (docs/quantized.md).

Every tensor of float32 becomes one of 16 bits under its own name. Where an operator takes no such tensors, or the user
keeps it, its operands are widened before it and its results rounded after it. Numbers that come from integers, such as
the angles of a rotation by position, stay float32 until they meet other floats: 16 bits cannot count to 2049.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from polydyn.arguments import checked_flag, checked_path
from polydyn.build.cache import writable
from polydyn.errors import InputError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.importer import ModelLike
from polydyn.quantization.judge import Feeds, output_errors
from polydyn.quantization.model_file import ModelFile, Writer, open_model
from polydyn.quantization.products import scopes
from polydyn.quantization.report import Converted, Layer, Report
from polydyn.quantization.sizes import tensor_bytes
from polydyn.quantization.types import (
    attribute,
    chosen_type,
    element_type,
    formal,
    graphs_of,
    infer_types,
    schema,
    set_element_type,
)
from polydyn.schedules.expr import Array

HALVES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
CONTRIB = frozenset([
    "Attention", "BiasGelu", "FastGelu", "FusedMatMul", "GatherBlockQuantized", "Gelu", "GroupQueryAttention",
    "MatMulNBits", "MultiHeadAttention", "QuickGelu", "RotaryEmbedding", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
])  # fmt: skip
"""Operators outside of ONNX whose floats are all of one type, which may be of 16 bits."""
WIDE_INTEGERS = (TensorProto.INT32, TensorProto.INT64, TensorProto.UINT32, TensorProto.UINT64)
CONTROL = ("If", "Loop", "Scan")
MIN_LISTED = 4096
"""Weights with fewer elements are not in the report."""


def to_half(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "float16",
    keep: Collection[str] = (),
    keep_io: bool = False,
    compare: Iterable[Feeds] | Mapping[str, Any] | None = None,
) -> Converted:
    """Return a model whose float32 tensors have 16 bits: weights, activations, caches, and with them half the bytes.

    ``output``: the file to write; None returns the model in memory. ``dtype``: "float16" (11 bits of precision, up to
    65504) or "bfloat16" (8 bits, the range of float32; ONNX Runtime runs few of its operators on a CPU). ``keep``:
    patterns of names of nodes, weights or operators that stay float32. ``keep_io``: inputs and outputs of the model
    stay float32. ``compare``: as for ``polydyn.quantize``. Weights beyond float16's range become its largest number;
    the report counts them. Raises InputError for an argument that does not fit, ModelError for an unreadable model.
    """
    if dtype not in HALVES:
        raise InputError(f"dtype is {dtype!r}", remedy=f"pass {' or '.join(map(repr, HALVES))}")
    path = None if output is None else checked_path(output, "output")
    file = open_model(model)
    before = sum(tensor_bytes(t) for s in scopes(file.proto) for t in s.constants.values())
    if file.proto.functions:
        file.proto = onnx.inliner.inline_local_functions(file.proto)
    with writable(path or Path()), Writer(path) as writer:
        editor = _Halves(file, writer, dtype, keep)
        result = editor.finish(checked_flag(keep_io, "keep_io"))
    after = sum(tensor_bytes(t) for s in scopes(result) for t in s.constants.values())
    report = Report(tuple(editor.layers.values()), before, after, notes=tuple(editor.notes()))
    converted = result if path is None else path
    if compare is not None:
        report = replace(report, outputs=output_errors(model, converted, compare))
    return Converted(converted, report)


class _Halves:
    def __init__(self, file: ModelFile, writer: Writer, dtype: str, keep: Collection[str]) -> None:
        self.file, self.writer, self.dtype, self.code, self.keep = file, writer, dtype, HALVES[dtype], keep
        self.types = infer_types(file.proto)
        self.opsets = {o.domain or "ai.onnx": o.version for o in file.proto.opset_import}
        self.names = set(self.types) | {n.name for s in scopes(file.proto) for n in s.graph.node}
        self.layers: dict[str, Layer] = {}
        self.wide: dict[str, str] = {}
        """Tensors that exist as float32 too: name -> the other name."""
        self.shared: dict[str, tuple[str, Array]] = {}
        self.counted: set[str] = set()
        """Tensors of float32 that are computed from integers and constants."""
        self.constants: set[str] = set()
        self.clamped: dict[str, int] = {}
        self.kept: dict[str, str] = {}
        self.large = {t.name: t for t in file.proto.graph.initializer}

    # -- names and types ---------------------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        """Return a name that the model does not have."""
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def is_float(self, name: str) -> bool:
        """Whether a tensor was float32."""
        return bool(name) and self.types.get(name) == TensorProto.FLOAT

    def _reason(self, n: NodeProto) -> str:
        """Return why a node computes in float32, "" if it does not."""
        names = (n.name, n.op_type, *n.input)
        if any(fnmatchcase(x, p) for x in names if x for p in self.keep):
            return "keep names it"
        if n.op_type in CONTROL:
            return ""
        declared = self._schema(n)
        if declared is None:
            return "" if n.op_type in CONTRIB else f"{n.domain}::{n.op_type} has no known types"
        floats = [x for x in n.input if self.is_float(x)]
        if n.op_type == "Cast" and self.types.get(n.input[0]) in WIDE_INTEGERS and self.is_float(n.output[0]):
            return "integers"
        if any(x in self.counted for x in floats) and all(x in self.counted | self.constants for x in floats):
            return "integers"
        result = formal(declared.outputs, 0)
        if any(self.is_float(o) for o in n.output[:1]) and f"tensor({self.dtype})" not in result.types:
            return f"{n.op_type} has no {self.dtype}"
        return ""

    def _schema(self, n: NodeProto) -> Any:
        domain = "" if n.domain == "ai.onnx" else n.domain
        return schema(n.op_type, self.opsets.get(domain or "ai.onnx", 1), domain)

    def _takes_half(self, n: NodeProto, position: int) -> bool:
        declared = self._schema(n)
        return declared is None or f"tensor({self.dtype})" in formal(declared.inputs, position).types

    # -- nodes -------------------------------------------------------------------------------------------------------

    def graph(self, graph: GraphProto) -> None:
        """Convert the nodes of a graph. Every name then is of 16 bits if it was float32."""
        nodes: list[NodeProto] = []
        self.constants |= {t.name for t in graph.initializer}
        for v in graph.input:
            self._set_type(v)
        for n in graph.node:
            nodes += self.node(NodeProto.FromString(n.SerializeToString()))
        for v in (*graph.output, *graph.value_info):
            self._set_type(v)
        if graph is not self.file.proto.graph:
            for t in graph.initializer:
                if t.data_type == TensorProto.FLOAT:
                    name, wide = t.name, numpy_helper.to_array(t)
                    t.CopyFrom(numpy_helper.from_array(self.rounded(name, wide), name))
        read, left = {o.name for o in graph.output}, []
        for n in reversed(nodes):
            added = n.op_type == "Constant" or n.name.startswith(ROUNDING)
            if not added or read & set(n.output):
                read |= _reads(n)
                left.append(n)
        del graph.node[:]
        graph.node.extend(reversed(left))

    def _set_type(self, v: onnx.ValueInfoProto) -> None:
        if element_type(v.type) == TensorProto.FLOAT:
            set_element_type(v.type, self.code)

    def node(self, n: NodeProto) -> list[NodeProto]:
        """Convert a node. Return it with the conversions before and after it."""
        for g in graphs_of(n):
            self.graph(g)
        if n.op_type == "Constant":
            return self._constant(n)
        why = self._reason(n)
        if not why:
            self._choose_half(n)
        elif why != "integers":
            self.kept[n.name or n.output[0]] = why
        before: list[NodeProto] = []
        for k, x in enumerate(n.input):
            if self.is_float(x) and (why or not self._takes_half(n, k)):
                n.input[k] = self.widened(x, before)
        after: list[NodeProto] = []
        declared = self._schema(n)
        for k, o in enumerate(n.output):
            fixed = declared is not None and f"tensor({self.dtype})" not in formal(declared.outputs, k).types
            if self.is_float(o) and n.op_type not in CONTROL and (why or fixed):
                n.output[k] = self.wide[o] = self.fresh(f"{o}_float")
                counted = why == "integers" or (fixed and not why)
                self.counted |= {o} if counted else set()
                after += self._round(self.wide[o], o, counted)
        return [*before, n, *after]

    def _round(self, wide: str, name: str, clip: bool) -> list[NodeProto]:
        """Round a tensor to 16 bits. ``clip``: it may hold numbers such as the lowest float32, as masks do."""
        nodes: list[NodeProto] = []
        if clip and self.dtype == "float16" and self.opsets.get("ai.onnx", 1) >= 11:
            low, high = (self.wide_constant(f"half_{x}", np.float32(v)) for x, v in (("min", -65504), ("max", 65504)))
            clipped = self.fresh(f"{name}_clipped")
            nodes.append(helper.make_node("Clip", [wide, low, high], [clipped], self.fresh(f"{ROUNDING}{name}_clip")))
            wide = clipped
        nodes.append(helper.make_node("Cast", [wide], [name], self.fresh(f"{ROUNDING}{name}"), to=self.code))
        return nodes

    def wide_constant(self, name: str, value: Any) -> str:
        """Return the name of a float32 constant of the whole model."""
        if name not in self.shared:
            self.shared[name] = self.fresh(name), np.asarray(value)
        return self.shared[name][0]

    def widened(self, x: str, nodes: list[NodeProto]) -> str:
        """Return the float32 tensor for a name: the weight itself, what was computed, or a conversion in ``nodes``."""
        if x in self.wide:
            return self.wide[x]
        if x in self.large:
            self.wide[x] = self.fresh(f"{x}_float")
            self.file.copy(self.large[x], self.writer, self.wide[x])
            return self.wide[x]
        name = self.fresh(f"{x}_wide")
        nodes.append(helper.make_node("Cast", [x], [name], self.fresh(f"{x}_widened"), to=TensorProto.FLOAT))
        return name

    def _constant(self, n: NodeProto) -> list[NodeProto]:
        """Convert a Constant, and keep its float32 for readers that need it."""
        self.constants |= set(n.output)
        if not self.is_float(n.output[0]):
            return [n]
        value = next(a for a in n.attribute if a.name.startswith("value"))
        array = (
            numpy_helper.to_array(value.t)
            if value.name == "value"
            else np.asarray(helper.get_attribute_value(value), np.float32)
        )
        self.wide[n.output[0]] = self.fresh(f"{n.output[0]}_float")
        rounded = self.rounded(n.output[0], array)
        return [
            helper.make_node("Constant", [], [n.output[0]], n.name, value=numpy_helper.from_array(rounded)),
            helper.make_node("Constant", [], [self.wide[n.output[0]]], value=numpy_helper.from_array(array)),
        ]

    def _choose_half(self, n: NodeProto) -> None:
        """Change the attribute that chooses the type of a result."""
        declared = self._schema(n)
        if declared is None or not n.output or not self.is_float(n.output[0]):
            return
        if chosen_type(n, declared) != TensorProto.FLOAT:
            return
        if n.op_type == "ConstantOfShape":
            value = attribute(n, "value")
            array = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value.t)
            made = helper.make_attribute("value", numpy_helper.from_array(self.rounded(n.output[0], array)))
        else:
            key = next(k for k in ("to", "dtype", "output_dtype") if k in declared.attributes)
            value, made = attribute(n, key), helper.make_attribute(key, self.code)
        if value is not None:
            n.attribute.remove(value)
        n.attribute.append(made)

    # -- weights -----------------------------------------------------------------------------------------------------

    def rounded(self, name: str, wide: Array) -> Array:
        """Round an array. Finite numbers beyond float16's range become its largest ones, and are counted."""
        if self.dtype == "float16":
            beyond = np.isfinite(wide) & (np.abs(wide) > np.finfo(np.float16).max)
            if beyond.any():
                self.clamped[name] = int(beyond.sum())
                wide = np.where(beyond, np.sign(wide) * np.float32(np.finfo(np.float16).max), wide)
        with np.errstate(over="ignore"):
            return np.asarray(wide).astype(numpy_dtype(self.dtype))

    def finish(self, keep_io: bool) -> onnx.ModelProto:
        """Convert the graphs, then the initializers, and write the model."""
        proto = self.file.proto
        graph = proto.graph
        casts = self._io(graph) if keep_io else ([], [])
        self.graph(graph)
        nodes = [*casts[0], *(NodeProto.FromString(n.SerializeToString()) for n in graph.node), *casts[1]]
        if keep_io:
            del graph.node[:]
            graph.node.extend(nodes)
            for v in (*graph.input, *graph.output):
                if element_type(v.type) == self.code and v.name in self.io:
                    set_element_type(v.type, TensorProto.FLOAT)
        used = {x for n in graph.node for x in _reads(n)} | {o.name for o in graph.output}
        for t in graph.initializer:
            self._initializer(t, used)
        for name, value in self.shared.values():
            if name in used:
                self.writer.add_array(name, value)
        return self.writer.finish(proto)

    def _initializer(self, t: TensorProto, used: Collection[str]) -> None:
        large = np.prod(t.dims) >= MIN_LISTED
        if t.data_type != TensorProto.FLOAT:
            self.file.copy(t, self.writer)
        elif t.name in used:
            wide = self.file.read(t)
            half = self.rounded(t.name, wide)
            self.writer.add_array(t.name, half)
            if large:
                norm, wrong = _norm(wide), _norm(half.astype(np.float32) - wide)
                self.layers[t.name] = Layer(t.name, t.name, tuple(t.dims), 16, wrong / norm if norm else 0.0)
        elif t.name in self.wide and large:
            why = "an operator without 16-bit floats, or one that keep names, reads it"
            self.layers[t.name] = Layer(t.name, t.name, tuple(t.dims), 32, 0.0, why)

    def _io(self, graph: GraphProto) -> tuple[list[NodeProto], list[NodeProto]]:
        """Rename inputs and outputs of float32 inside of the graph; return the conversions before and after it."""
        first, last = [], []
        names: dict[str, str] = {}
        initializers = {t.name for t in graph.initializer}
        self.io = {v.name for v in (*graph.input, *graph.output) if element_type(v.type) == TensorProto.FLOAT}
        for v in graph.input:
            if v.name in self.io and v.name not in initializers:
                names[v.name] = self.fresh(f"{v.name}_half")
                first.append(helper.make_node("Cast", [v.name], [names[v.name]], to=self.code))
        for v in graph.output:
            if v.name in self.io:
                inner = names.setdefault(v.name, self.fresh(f"{v.name}_half"))
                last.append(helper.make_node("Cast", [inner], [v.name], to=TensorProto.FLOAT))
        self.types |= dict.fromkeys(names.values(), TensorProto.FLOAT)
        _rename(graph, names)
        return first, last

    def notes(self) -> list[str]:
        """Return what the report says besides the weights."""
        kept = [f"{name} computes in float32: {why}" for name, why in self.kept.items()]
        return kept + [f"{x}: {n} numbers beyond float16 became its largest" for x, n in self.clamped.items()]


ROUNDING = "round_to_half_"
"""Beginning of the names of added conversions. Like constants, they are left out if nothing reads them."""


def _norm(a: Array) -> float:
    return float(np.sqrt(np.einsum("i,i->", a.reshape(-1), a.reshape(-1), dtype=np.float64)))


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    for n in graph.node:
        for values in (n.input, n.output):
            for k, x in enumerate(values):
                values[k] = names.get(x, x)
        for g in graphs_of(n):
            _rename(g, names)
            for v in g.output:
                v.name = names.get(v.name, v.name)


def _reads(n: NodeProto) -> set[str]:
    inside = {x for g in graphs_of(n) for m in g.node for x in _reads(m)}
    return {*n.input, *inside, *(o.name for g in graphs_of(n) for o in g.output)}

"""Quantize the weights of a model's products: ``polydyn.quantize`` (docs/quantized.md)."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, helper

from polydyn.arguments import checked_flag, checked_integer, checked_path
from polydyn.build.cache import writable
from polydyn.errors import InputError
from polydyn.graph.importer import ModelLike
from polydyn.quantization.blocks import Rounded, pack_bits, round_blocks
from polydyn.quantization.judge import Feeds, feeds_list, mean_squares, output_errors
from polydyn.quantization.model_file import ModelFile, Writer, open_model
from polydyn.quantization.products import Product, Unsuited, find_products, scopes
from polydyn.quantization.report import Converted, Layer, Report
from polydyn.quantization.sizes import bits_of, tensor_bytes
from polydyn.schedules.expr import Array

METHODS = ("blocks", "dynamic")
BLOCKS = (16, 32, 64, 128, 256)
"""Block sizes of ONNX Runtime's operator."""
MICROSOFT = "com.microsoft"
PACKED_STEPS = 8
"""polydyn keeps weights packed if blocks, also the last one, are several words of this many steps."""
DYNAMIC_OPSET = 11
"""Opset of DynamicQuantizeLinear."""
ACCURACY = {4: 4, 8: 0}
"""ONNX Runtime's accuracy level by bits: with 4, the rows of the other operand are rounded to bytes by blocks."""


@dataclass(frozen=True)
class Settings:
    """Arguments of ``quantize``, checked."""

    bits: int
    block: int
    symmetric: bool
    method: str
    max_error: float
    search: bool
    accuracy_level: int | None


def quantize(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    bits: int = 4,
    block: int = 32,
    symmetric: bool = True,
    method: str = "blocks",
    max_error: float | None = None,
    keep: Collection[str] = (),
    search: bool = True,
    accuracy_level: int | None = None,
    calibration: Iterable[Feeds] | Feeds | None = None,
    compare: Iterable[Feeds] | Mapping[str, Any] | None = None,
) -> Converted:
    """Round the constant weights of MatMul and Gemm to 4 or 8 bits. The result is an ONNX model for any runtime.

    ``output``: the file to write; None returns the model in memory. A large model gets a data file next to it.
    ``method``: "blocks" stores ``bits`` per weight, with a scale per ``block`` weights of a column (MatMulNBits, whose
    sums are of floats); "dynamic" stores bytes with a scale per column, and rows become bytes in every call
    (DynamicQuantizeLinear, MatMulInteger). ``symmetric``: no zero points. ``search``: try several clippings of each
    block. ``max_error``: bound on the relative error of a layer; one with a larger error gets 8 bits, and stays a float
    if that is not enough. ``keep``: patterns of names of nodes or weights that stay floats. ``accuracy_level``: ONNX
    Runtime's attribute; 4 lets runtimes round rows to bytes by blocks, 0 does not; by default 4 with 4 bits, else 0.
    ``calibration``: inputs of calls; errors are then weighed by the mean squares that the weights meet. ``compare``:
    inputs of calls, or sizes of symbols for random inputs: the report has the error of the model's outputs.
    ``calibration`` and ``compare`` compile the model, which takes more memory than the rest. Raises InputError for an
    argument that does not fit, ModelError for an unreadable model.
    """
    settings = _checked(bits, block, symmetric, method, max_error, search, accuracy_level)
    path = None if output is None else checked_path(output, "output")
    file = open_model(model)
    before = sum(map(tensor_bytes, _all_tensors(file.proto)))
    found = find_products(file.proto, keep)
    products = [x for x in found if isinstance(x, Product)]
    squares = {} if calibration is None else mean_squares(file, products, feeds_list(calibration, "calibration"))
    with writable(path or Path()), Writer(path) as writer:
        editor = _Editor(file, writer, settings, squares)
        layers = [editor.layer(x) for x in found]
        result = editor.finish()
    report = Report(tuple(layers), before, sum(map(tensor_bytes, _all_tensors(result))), notes=tuple(editor.notes))
    converted = result if path is None else path
    if compare is not None:
        report = replace(report, outputs=output_errors(model, converted, compare))
    return Converted(converted, report)


def _checked(
    bits: int, block: int, symmetric: bool, method: str, max_error: float | None, search: bool, level: int | None
) -> Settings:  # fmt: skip
    if checked_integer(bits, "bits") not in ACCURACY:
        raise InputError(f"bits is {bits}", remedy="pass 4 or 8; polydyn.to_half stores 16")
    if method not in METHODS:
        raise InputError(f"method is {method!r}", remedy=f"pass {' or '.join(map(repr, METHODS))}")
    if checked_integer(block, "block") not in BLOCKS:
        raise InputError(f"block is {block}", remedy=f"pass one of {', '.join(map(str, BLOCKS))}")
    if level not in (None, 0, 1, 2, 3, 4):
        raise InputError(f"accuracy_level is {level}", remedy="pass 0 to 4, or leave it out")
    if max_error is not None and not (isinstance(max_error, (int, float)) and max_error > 0):
        raise InputError(f"max_error is {max_error}", remedy="pass a relative error above 0, such as 0.08")
    flags = checked_flag(symmetric, "symmetric"), checked_flag(search, "search")
    return Settings(bits, block, flags[0], method, max_error or math.inf, flags[1], level)


def _all_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    for scope in scopes(model):
        yield from scope.constants.values()


class _Editor:
    """Replaces products of a model, and writes the weights as it goes."""

    def __init__(self, file: ModelFile, writer: Writer, settings: Settings, squares: Mapping[str, Array]) -> None:
        self.file, self.writer, self.settings, self.squares = file, writer, settings, squares
        self.notes: list[str] = []
        self.names = {x for s in scopes(file.proto) for n in s.graph.node for x in (*n.input, *n.output, n.name)}
        self.names |= {x for s in scopes(file.proto) for x in (*s.constants, *s.inputs)}
        self.packed: dict[tuple[Any, ...], tuple[list[str], Layer]] = {}
        self.replaced: dict[int, list[NodeProto]] = {}
        self.rows: dict[tuple[int, str], list[str]] = {}
        opsets = {o.domain or "ai.onnx": o.version for o in file.proto.opset_import}
        self.opset = opsets.get("ai.onnx", 1)
        if settings.method == "dynamic" and self.opset < DYNAMIC_OPSET:
            raise InputError(
                f"the model has opset {self.opset}, dynamic quantization needs {DYNAMIC_OPSET}",
                remedy="export it with a newer opset, or use method='blocks'",
            )  # fmt: skip

    def fresh(self, name: str) -> str:
        """Return a name that the model does not have."""
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    # -- layers ------------------------------------------------------------------------------------------------------

    def layer(self, x: Product | Unsuited) -> Layer:
        """Replace a product if its weights can be replaced. Return what became of it."""
        if isinstance(x, Unsuited):
            return _float_layer(x.name, x.weight, x.reason)
        reason = self._obstacle(x)
        if reason:
            return _float_layer(x.name, x.weight, reason)
        dynamic = self.settings.method == "dynamic"
        importance = self._importance(x)
        key = (*x.key, None if importance is None else x.node.input[0])
        if key not in self.packed:
            self.packed[key] = (self._pack_dynamic if dynamic else self._pack_blocks)(x, importance)
        names, layer = self.packed[key]
        layer = replace(layer, name=x.name)
        if names:
            nodes = self._dynamic_nodes(x, names) if dynamic else self._block_nodes(x, names, layer.bits)
            self.replaced[id(x.node)] = nodes
        return layer

    def _obstacle(self, x: Product) -> str:
        """Return why the weights of a product stay floats, or ""."""
        s = self.settings
        if x.dtype not in (("float32",) if s.method == "dynamic" else ("float32", "float16")):
            operator = "DynamicQuantizeLinear" if s.method == "dynamic" else "MatMulNBits of ONNX Runtime"
            return f"{operator} has no {x.dtype}"
        if 0 in x.weight.dims:
            return "it is empty"
        if s.method == "dynamic":
            return ""
        if len(x.weight.dims) != 2:
            return f"it has {len(x.weight.dims)} axes: a product of batches, and MatMulNBits has one matrix"
        if x.steps < s.block:
            return f"its {x.steps} steps are less than a block of {s.block}"
        if math.gcd(x.steps, s.block) % PACKED_STEPS or math.gcd(x.steps, s.block) == PACKED_STEPS:
            return f"its {x.steps} steps end in a block that is no multiple of 16, which would not stay packed"
        return ""

    def _importance(self, x: Product) -> Array | None:
        return self.squares.get(x.node.input[0]) if x.scope.outer is None else None

    def _weights(self, x: Product) -> Array:
        """Return the weights [.., columns, steps] of a product."""
        w = self.file.read(x.weight)
        w = w if x.turned else w.swapaxes(-1, -2)
        return w if x.factor == 1 else w * w.dtype.type(x.factor)

    def _pack_blocks(self, x: Product, importance: Array | None) -> tuple[list[str], Layer]:
        """Write the packed weights of a product, at the bits that keep the bound. Return their names."""
        s, w = self.settings, self._weights(x)
        shape, why = tuple(x.weight.dims), ""
        for bits in dict.fromkeys((s.bits, 8)):
            r = round_blocks(
                w, bits, s.block, symmetric=s.symmetric, search=s.search, importance=importance,
                scale_dtype=x.dtype,
            )  # fmt: skip
            if r.relative_error <= s.max_error:
                layer = Layer(x.name, x.weight.name, shape, bits, r.relative_error, why)
                return self._write_blocks(x, r, bits), layer
            why = f"with {bits} bits its error is {r.relative_error:.4f}"
        return [], _float_layer(x.name, x.weight, f"{why}, above the bound")

    def _write_blocks(self, x: Product, r: Rounded, bits: int) -> list[str]:
        names = [self.writer.add_array(self.fresh(f"{x.weight.name}_q{bits}"), pack_bits(r.q, bits))]
        names.append(self.writer.add_array(self.fresh(f"{x.weight.name}_scales"), r.scales))
        if r.zeros is not None:
            names.append(self.writer.add_array(self.fresh(f"{x.weight.name}_zeros"), pack_bits(r.zeros, bits)))
        return names

    def _pack_dynamic(self, x: Product, importance: Array | None) -> tuple[list[str], Layer]:
        """Write bytes [.., steps, columns] with a scale per column."""
        w = self._weights(x)
        rows = w.reshape(-1, x.steps)
        r = round_blocks(rows, 8, x.steps, symmetric=True, search=self.settings.search, importance=importance)
        if r.relative_error > self.settings.max_error:
            reason = f"with 8 bits its error is {r.relative_error:.4f}, above the bound"
            return [], _float_layer(x.name, x.weight, reason)
        q = (r.q.reshape(w.shape) ^ 128).view("int8").swapaxes(-1, -2)
        scales = r.scales.reshape(*w.shape[:-2], 1, x.columns) if w.ndim > 2 else r.scales.reshape(-1)
        names = [self.writer.add_array(self.fresh(f"{x.weight.name}_q8"), q),
                 self.writer.add_array(self.fresh(f"{x.weight.name}_scales"), scales)]  # fmt: skip
        return names, Layer(x.name, x.weight.name, tuple(x.weight.dims), 8, r.relative_error)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _block_nodes(self, x: Product, names: list[str], bits: int) -> list[NodeProto]:
        s, level = self.settings, self.settings.accuracy_level
        level = ACCURACY[bits] if level is None else level
        bias = x.node.input[2] if x.node.op_type == "Gemm" and len(x.node.input) > 2 else ""
        result = self.fresh(f"{x.node.output[0]}_product") if bias else x.node.output[0]
        attributes: dict[str, Any] = {"K": x.steps, "N": x.columns, "bits": bits, "block_size": s.block}
        attributes |= {"accuracy_level": level} if level else {}
        node = helper.make_node(
            "MatMulNBits", [x.node.input[0], *names], [result], x.node.name, domain=MICROSOFT, **attributes
        )
        return [node, *self._biased(x, result, bias)]

    def _dynamic_nodes(self, x: Product, names: list[str]) -> list[NodeProto]:
        a, nodes = x.node.input[0], []
        here = id(x.scope.graph), a
        if here not in self.rows:  # products of the same rows quantize them once
            self.rows[here] = [self.fresh(f"{a}_{part}") for part in ("q", "scale", "zero")]
            nodes.append(helper.make_node("DynamicQuantizeLinear", [a], self.rows[here]))
        rows, scale, zero = self.rows[here]
        bias = x.node.input[2] if x.node.op_type == "Gemm" and len(x.node.input) > 2 else ""
        out = x.node.output[0]
        total, wide, factor = (self.fresh(f"{out}_{part}") for part in ("sum", "float", "factor"))
        result = self.fresh(f"{out}_product") if bias else out
        nodes += [
            helper.make_node("MatMulInteger", [rows, names[0], zero], [total], x.node.name),
            helper.make_node("Cast", [total], [wide], to=TensorProto.FLOAT),
            helper.make_node("Mul", [scale, names[1]], [factor]),
            helper.make_node("Mul", [wide, factor], [result]),
        ]
        return [*nodes, *self._biased(x, result, bias)]

    def _biased(self, x: Product, result: str, bias: str) -> list[NodeProto]:
        return [helper.make_node("Add", [result, bias], [x.node.output[0]])] if bias else []

    # -- the whole model ---------------------------------------------------------------------------------------------

    def finish(self) -> onnx.ModelProto:
        """Exchange the nodes, remove what nothing reads any more, and write the model."""
        proto = self.file.proto
        proto.ir_version = max(proto.ir_version, 4)
        initializers = {t.name for t in proto.graph.initializer}
        every = list(scopes(proto))  # inner graphs last: they are edited before the nodes around them are copied
        for scope in reversed(every):
            self._exchange(scope.graph)
        used = _used(proto.graph)
        for t in proto.graph.initializer:
            if t.name in used:
                self.file.copy(t, self.writer)
        free = [v for v in proto.graph.input if v.name not in initializers or v.name in used]
        del proto.graph.input[:]
        proto.graph.input.extend(free)
        contrib = any(n.domain == MICROSOFT for nodes in self.replaced.values() for n in nodes)
        if contrib and all(o.domain != MICROSOFT for o in proto.opset_import):
            proto.opset_import.add(domain=MICROSOFT, version=1)
        return self.writer.finish(proto)

    def _exchange(self, graph: onnx.GraphProto) -> None:
        if not self.replaced:
            return
        nodes = [m for n in graph.node for m in self.replaced.get(id(n), [n])]
        while True:
            needed = {x for n in nodes for x in _reads(n)} | {o.name for o in graph.output}
            left = [n for n in nodes if n.op_type not in ("Transpose", "Identity", "Constant")
                    or any(o in needed for o in n.output)]  # fmt: skip
            if len(left) == len(nodes):
                break
            nodes = left
        copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(copies)
        kept = [t for t in graph.initializer if graph is self.file.proto.graph or t.name in needed]
        if len(kept) < len(graph.initializer):
            kept = [TensorProto.FromString(t.SerializeToString()) for t in kept]
            del graph.initializer[:]
            graph.initializer.extend(kept)


def _reads(n: NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads, also in its graphs."""
    yield from n.input
    for a in n.attribute:
        for g in [a.g] if a.type == onnx.AttributeProto.GRAPH else a.graphs:
            yield from _used(g)


def _used(graph: onnx.GraphProto) -> set[str]:
    return {x for n in graph.node for x in _reads(n)} | {o.name for o in graph.output}


def _float_layer(name: str, weight: TensorProto, reason: str) -> Layer:
    return Layer(name, weight.name, tuple(weight.dims), bits_of(weight.data_type), 0.0, reason)

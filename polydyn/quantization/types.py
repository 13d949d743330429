"""Element types of the tensors of a model, by the schemas of its operators. Shapes are not needed for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import onnx
import onnx.defs
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

CODES = {f"tensor({name})": code for name, code in {
    "float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
    "double": TensorProto.DOUBLE, "int64": TensorProto.INT64, "int32": TensorProto.INT32, "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "string": TensorProto.STRING,
}.items()}  # fmt: skip
"""ONNX's codes of the types that schemas name for single outputs."""


@cache
def schema(op: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    """Return the schema of an operator; None if ONNX has none."""
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


def formal(parameters: Any, position: int) -> Any:
    """Return the declared parameter of an input or output; the last one stands for all further ones."""
    return parameters[min(position, len(parameters) - 1)] if parameters else None


def attribute(n: NodeProto, name: str) -> AttributeProto | None:
    """Return an attribute of a node."""
    return next((a for a in n.attribute if a.name == name), None)


def graphs_of(n: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs inside of a node."""
    for a in n.attribute:
        yield from [a.g] if a.type == AttributeProto.GRAPH else a.graphs


def element_type(t: onnx.TypeProto) -> int:
    """Return the element type of a tensor, or of the tensors of a sequence; 0 if there is none."""
    kind = t.WhichOneof("value")
    if kind == "sequence_type":
        return element_type(t.sequence_type.elem_type)
    if kind == "optional_type":
        return element_type(t.optional_type.elem_type)
    return int(t.tensor_type.elem_type) if kind == "tensor_type" else 0


def set_element_type(t: onnx.TypeProto, code: int) -> None:
    """Change the element type of a tensor, or of the tensors of a sequence."""
    kind = t.WhichOneof("value")
    if kind == "sequence_type":
        set_element_type(t.sequence_type.elem_type, code)
    elif kind == "optional_type":
        set_element_type(t.optional_type.elem_type, code)
    else:
        t.tensor_type.elem_type = code


def infer_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element type of every tensor by name, 0 if it is unknown. Names in inner graphs are those of SSA."""
    opsets = {o.domain or "": o.version for o in model.opset_import}
    opsets.setdefault("", opsets.get("ai.onnx", 1))
    types: dict[str, int] = {}
    _infer(model.graph, opsets, types)
    return types


def _infer(graph: GraphProto, opsets: dict[str, int], types: dict[str, int]) -> None:
    declared = {v.name: element_type(v.type) for v in (*graph.value_info, *graph.output)}
    for v in graph.input:
        types[v.name] = element_type(v.type) or types.get(v.name, 0)
    types |= {t.name: t.data_type for t in graph.initializer}
    for n in graph.node:
        _bind_bodies(n, types)
        for g in graphs_of(n):
            _infer(g, opsets, types)
        for k, name in enumerate(n.output):
            if name:
                types[name] = _output(n, k, opsets, types) or declared.get(name, 0)


def _bind_bodies(n: NodeProto, types: dict[str, int]) -> None:
    """Give the inputs of a body without a declared type that of what the node passes in."""
    if n.op_type in ("Loop", "Scan"):
        for g in graphs_of(n):
            passed = ["", "", *n.input[2:]] if n.op_type == "Loop" else list(n.input)
            types |= {v.name: types.get(x, 0) for v, x in zip(g.input, passed, strict=False) if x}


def _output(n: NodeProto, position: int, opsets: dict[str, int], types: dict[str, int]) -> int:
    """Return the element type of an output of a node."""
    bodies = list(graphs_of(n))
    if bodies and n.op_type in ("If", "Loop", "Scan"):
        results = bodies[0].output[1:] if n.op_type == "Loop" else bodies[0].output
        return types.get(results[position].name, 0)
    if n.op_type == "Constant":
        value = attribute(n, "value")
        if value is not None:
            return int(value.t.data_type)
        return TensorProto.FLOAT if attribute(n, "value_float") or attribute(n, "value_floats") else TensorProto.INT64
    declared = schema(n.op_type, opsets.get(n.domain if n.domain != "ai.onnx" else "", 1), n.domain)
    if declared is None:  # results of other domains' operators have the type of their first floats
        floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
        return next((types[x] for x in n.input if types.get(x) in floats), 0)
    out = formal(declared.outputs, position)
    for k, x in enumerate(n.input):
        if x and formal(declared.inputs, k).type_str == out.type_str:
            return types.get(x, 0)
    only = next(iter(out.types)) if len(out.types) == 1 else ""
    return CODES.get(only, 0) or chosen_type(n, declared)


def chosen_type(n: NodeProto, declared: onnx.defs.OpSchema) -> int:
    """Return the type that attributes choose for an output, 0 if they do not."""
    for key in ("to", "dtype", "output_dtype"):
        if key in declared.attributes:
            a = attribute(n, key)
            return int(a.i) if a is not None and a.i else TensorProto.FLOAT if key == "dtype" else 0
    if n.op_type == "ConstantOfShape":
        value = attribute(n, "value")
        return TensorProto.FLOAT if value is None else int(value.t.data_type)
    return 0

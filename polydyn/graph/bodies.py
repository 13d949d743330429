"""Operators that expand to other operators: written in Python here, or defined by ONNX as a function.

Propagation replaces such a node by its body as soon as the types of its inputs are known, just as it replaces an If by
one of its branches. No later stage sees the node, so it fuses exactly like its decomposed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx
import onnx.defs
from onnx import helper, numpy_helper

from polydyn.errors import ModelError, PolydynError, UnsupportedError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.importer import ImportedGraph, ModelInput, inner_prefix, read_function
from polydyn.graph.ir import Tensor
from polydyn.graph.operators.registry import InferContext, OnnxNode
from polydyn.schedules.expr import Array

OPSET = 21
"""Opset of the nodes in bodies that are written in Python."""


class Body:
    """Builds the nodes that replace one node. Tensors are names, as in ONNX."""

    def __init__(self, node: OnnxNode, ctx: InferContext) -> None:
        self.node = node
        self.ctx = ctx
        self.nodes: list[OnnxNode] = []
        self.constants: dict[str, Array] = {}
        self.results: dict[int, str] = {}
        self.asked: set[str] = set()

    def input(self, position: int) -> str:
        """Return the name of an input of the node, or ``""`` if it is absent."""
        return self.node.inputs[position] if position < len(self.node.inputs) else ""

    def output(self, position: int) -> bool:
        """Check whether the node's output at a position is used."""
        return position < len(self.node.outputs) and bool(self.node.outputs[position])

    def tensor(self, name: str) -> Tensor:
        """Return type and shape of an input of the node."""
        return self.ctx.tensor(name)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the node."""
        self.asked.add(name)
        return self.node.attribute(name, default)

    def given(self, *names: str) -> dict[str, Any]:
        """Return the attributes of these names that the node has."""
        return {name: value for name in names if (value := self.attribute(name)) is not None}

    def ignore(self, *names: str) -> None:
        """Mark attributes that change nothing. Attributes that a body neither reads nor ignores are rejected."""
        self.asked.update(names)

    def op(self, name: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output. Return the output's name."""
        return self.ops(name, 1, *inputs, **attributes)[0]

    def ops(self, name: str, count: int, *inputs: str, opset: int = OPSET, **attributes: Any) -> tuple[str, ...]:
        """Add a node with several outputs. Return their names."""
        place = len(self.nodes)
        own = f"{inner_prefix(self.node)}{name}_{place}"
        outputs = tuple(f"{own}.{k}" if k else own for k in range(count))
        self.nodes.append(OnnxNode(f"{name}_{place}", name, inputs, outputs, attributes, opset))
        return outputs

    def cast(self, x: str, dtype: str) -> str:
        """Cast the tensor to another dtype."""
        return self.op("Cast", x, to=int(helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))))

    def constant(self, value: Any, dtype: str = "int64") -> str:
        """Add a constant."""
        name = f"{inner_prefix(self.node)}constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value, numpy_dtype(dtype))
        return name

    def like(self, value: float, name: str) -> str:
        """Add a constant with the dtype of an input of the node."""
        return self.constant(value, self.tensor(name).dtype)

    def set_output(self, name: str, position: int = 0) -> None:
        """Set the tensor that is the node's output at a position."""
        self.results[position] = name

    def shape(self, *parts: str | int) -> str:
        """Return a vector of sizes from numbers and names of vectors."""
        names = [p if isinstance(p, str) else self.constant([p]) for p in parts]
        return names[0] if len(names) == 1 else self.op("Concat", *names, axis=0)

    def size(self, name: str, axis: int) -> str:
        """Return the size of a tensor along an axis >= 0, as a vector of one element."""
        return self.op("Shape", name, start=axis, end=axis + 1)

    def reshape(self, name: str, *parts: str | int) -> str:
        """Reshape the tensor. 0 keeps a size, -1 takes the remaining elements."""
        return self.op("Reshape", name, self.shape(*parts))

    def reduce(self, name: str, x: str, *axes: int, keepdims: int = 1) -> str:
        """Add a reduction over axes."""
        return self.op(name, x, self.constant(axes), keepdims=keepdims)

    def refuse(self, subject: str, remedy: str | None = None) -> UnsupportedError:
        """Return the error for an unsupported part of the operator."""
        return UnsupportedError(f"{self.node.op}: {subject} is not supported", node=self.node.name, remedy=remedy)

    def wrong(self, reason: str) -> ModelError:
        """Return the error for a node that violates ONNX's definition."""
        rule = f"{self.node.op} of ONNX, opset {self.node.opset}"
        return ModelError(f"{self.node.op} {self.node.name}: {reason}", node=self.node.name, rule=rule)

    def graph(self) -> ImportedGraph:
        """Return the body with the outputs of the node. Raises UnsupportedError for an unknown output or attribute."""
        if unknown := sorted(self.node.attributes.keys() - self.asked):
            raise self.refuse(f"the attribute {unknown[0]}={self.node.attribute(unknown[0])}")
        for position, name in enumerate(self.node.outputs):
            if name and position not in self.results:
                raise self.refuse(f"its output {position} ({name})")
        outputs = tuple(self.results[k] if name else "" for k, name in enumerate(self.node.outputs))
        return ImportedGraph(self.node.op, (), outputs, tuple(self.nodes), self.constants)


BODIES: dict[str, Callable[[Body], None]] = {}
FUNCTIONS: dict[str, onnx.FunctionProto] = {}
"""Functions of operators that onnx does not define (``polydyn/extend.py``)."""


def body(*names: str) -> Callable[[Callable[[Body], None]], Callable[[Body], None]]:
    """Register a function that writes the body of one or more operators."""

    def register(write: Callable[[Body], None]) -> Callable[[Body], None]:
        for name in names:
            BODIES[name] = write
        return write

    return register


def has_body(node: OnnxNode) -> bool:
    """Check whether a node can be replaced by a body."""
    return node.op in BODIES or node.op in FUNCTIONS or _function_schema(node) is not None


def body_of(node: OnnxNode, ctx: InferContext) -> ImportedGraph:
    """Return the nodes that replace a node, over the names of its inputs."""
    if node.op in BODIES:
        written = Body(node, ctx)
        try:
            BODIES[node.op](written)
        except PolydynError as e:
            raise e if e.node else type(e)(str(e), node=f"{node.name} ({node.op})") from e
        return written.graph()
    return read_function(FUNCTIONS.get(node.op) or _function(node, ctx), node)


def split_name(op: str) -> tuple[str, str]:
    """Split ``domain::name`` into domain and name. The default domain is empty."""
    domain, _, name = op.rpartition("::")
    return domain, name


def _function_schema(node: OnnxNode) -> Any:
    """Return onnx's schema if it has a function, else None."""
    domain, name = split_name(node.op)
    try:
        schema: Any = onnx.defs.get_schema(name, node.opset, domain)
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _function(node: OnnxNode, ctx: InferContext) -> onnx.FunctionProto:
    """Return ONNX's function for a node: the version for its opset, or the first version."""
    schema = _function_schema(node)
    if schema.has_context_dependent_function:
        version = _version(schema.context_dependent_function_opset_versions, node.opset)
        types = [_type_of(ctx, x).SerializeToString() for x in node.inputs]
        text = schema.get_context_dependent_function_with_opset_version(
            version, to_proto(node).SerializeToString(), types
        )
    else:
        text = schema.get_function_with_opset_version(_version(schema.function_opset_versions, node.opset))
    if not text:
        raise UnsupportedError(f"{node.op}: ONNX has no function for these inputs and attributes", node=node.name)
    function: onnx.FunctionProto = onnx.FunctionProto.FromString(text) if isinstance(text, bytes) else text
    return function


def _version(versions: Iterable[int], opset: int) -> int:
    known = sorted(versions)
    return max((v for v in known if v <= opset), default=known[0])


def _type_of(ctx: InferContext, name: str) -> onnx.TypeProto:
    if not name:
        return onnx.TypeProto()
    t = ctx.tensor(name)
    kind = helper.np_dtype_to_tensor_dtype(numpy_dtype(t.dtype))
    return helper.make_tensor_type_proto(kind, [d.constant for d in t.shape])


def to_proto(node: OnnxNode) -> onnx.NodeProto:
    """Convert the node to ONNX's protobuf."""
    domain, name = split_name(node.op)
    proto = helper.make_node(name, node.inputs, node.outputs, node.name, domain=domain)
    for key, value in sorted(node.attributes.items()):
        if isinstance(value, ImportedGraph):
            value = _graph_proto(value)
        elif isinstance(value, np.ndarray):
            value = numpy_helper.from_array(value, key)
        if not isinstance(value, tuple) or value:
            proto.attribute.append(helper.make_attribute(key, list(value) if isinstance(value, tuple) else value))
    return proto


def _graph_proto(graph: ImportedGraph) -> onnx.GraphProto:
    """Convert a graph inside a node to ONNX's protobuf."""
    inputs = [_value_info(x.name, x) for x in graph.inputs]
    outputs = [_value_info(o, graph.declared.get(o)) for o in graph.outputs]
    constants = [numpy_helper.from_array(a, x) for x, a in graph.constants.items()]
    return helper.make_graph(list(map(to_proto, graph.nodes)), graph.name or "body", inputs, outputs, constants)


def _value_info(name: str, x: ModelInput | None) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto(name=name)
    if x is not None and x.dtype:
        kind = helper.np_dtype_to_tensor_dtype(numpy_dtype(x.dtype))
        info.type.CopyFrom(helper.make_tensor_type_proto(kind, x.dims))
    return info

"""Read ONNX: a path, bytes or a ModelProto becomes plain, checked data (``ImportedGraph``)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.defs
import onnx.numpy_helper
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from polydyn.errors import MissingModelError, ModelError, PolydynError, UnsupportedError
from polydyn.graph.check import check_names, check_node, check_text
from polydyn.graph.data_files import data_file
from polydyn.graph.dtypes import PACKED, numpy_dtype, onnx_dtype, unpacked
from polydyn.graph.inlining import Key, body_of, called, check_versions, functions_of, opsets_of
from polydyn.graph.node_order import ordered_nodes
from polydyn.graph.operators.registry import OnnxNode
from polydyn.graph.sparse import dense
from polydyn.schedules.expr import Array


@dataclass(frozen=True)
class LocatedModel:
    """A model in memory whose external tensors are in files of ``folder``."""

    proto: onnx.ModelProto
    folder: Path


ModelLike: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | LocatedModel"


@dataclass(frozen=True)
class ModelInput:
    """An input. Every dim is a size, a name, or None if the model does not name it. ``dims`` None: unknown rank."""

    name: str
    dtype: str
    dims: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class ImportedGraph:
    """Nodes in topological order. ``constants`` holds initializers and the results of Constant nodes."""

    name: str
    inputs: tuple[ModelInput, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Array]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of a model (``metadata_of``)."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Outputs of a model that are inputs: maps the name of the copy to the name of both."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """Conversions by the host before and after a call (``graph/texts.py``), as JSON data."""
    optional: Mapping[str, tuple[tuple[int | str | None, ...], Array]] = field(default_factory=dict)
    """Initializers of a model that are inputs too: their declared axes, and their values."""
    declared: Mapping[str, ModelInput] = field(default_factory=dict, compare=False, repr=False)
    """Declared types and shapes of tensors that nodes compute. Only ``graph/fallback.py`` reads them."""


def metadata_of(model: onnx.ModelProto) -> dict[str, Any]:
    """Return a model's metadata under ONNX Runtime's names. ``version`` is the largest int64 if the model has none."""
    return {
        "custom_metadata_map": {p.key: p.value for p in model.metadata_props},
        "description": model.doc_string, "domain": model.domain, "graph_description": model.graph.doc_string,
        "graph_name": model.graph.name, "producer_name": model.producer_name,
        "version": model.model_version if model.HasField("model_version") else 2**63 - 1,
    }  # fmt: skip


def load_model(model: ModelLike) -> ImportedGraph:
    """Read and check a model. Initializers become numpy views of the file's bytes where possible.

    Raises ModelError for an unreadable model, or one that violates ONNX, and UnsupportedError for a valid but
    unsupported one.
    """
    proto, folder, subject = _parse(model)
    try:
        return _read(proto, folder)
    except PolydynError as e:
        if e.node or e.tensor or e.rule:
            raise
        raise type(e)(f"{subject}: {e.message}", remedy=e.remedy) from e


def _read(proto: onnx.ModelProto, folder: Path | None) -> ImportedGraph:
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output or proto.graph.input):
        raise ModelError("the model has no graph", remedy="export it again; the file may be empty or cut off")
    opsets = opsets_of(proto.opset_import)
    opset, newest = opsets.get("ai.onnx", 1), onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise UnsupportedError(
            f"the model is of opset {opset}, onnx {onnx.__version__} knows 1 to {newest}",
            remedy=f"export it with an opset up to {newest}, or install a newer onnx",
        )
    reader = _Reader(opsets, folder, functions_of(proto))
    graph = _with_copies(reader.graph(proto.graph, ()), opset)
    if proto.ir_version >= FREE_INITIALIZERS:
        graph = replace(graph, optional={v.name: _optional(v, graph.constants[v.name]) for v in proto.graph.input
                                         if v.name in graph.constants})  # fmt: skip
    if not graph.outputs:
        raise ModelError("the graph has no outputs", remedy="mark at least one tensor as an output of the model")
    return replace(graph, metadata=metadata_of(proto))


FREE_INITIALIZERS = 4
"""First version of the file format in which initializers need not be inputs. One that is an input may be overridden by
a call.
"""


def _optional(v: onnx.ValueInfoProto, value: Array) -> tuple[tuple[int | str | None, ...], Array]:
    """Return axes and value of an input with an initializer; the initializer's shape if the input declares no axes."""
    dims = _input(v, inside=True).dims
    return dims if dims is not None and len(dims) == value.ndim else value.shape, value


def with_inputs(graph: ImportedGraph, names: Collection[str]) -> ImportedGraph:
    """Turn some optional inputs of a graph into inputs, in place of their initializers."""
    if not names:
        return graph
    constants = {n: a for n, a in graph.constants.items() if n not in names}
    free = {n: x for n, x in graph.optional.items() if n in names}
    dtypes = {n: "string" if a.dtype == object else str(a.dtype) for n, (_, a) in free.items()}
    inputs = (*graph.inputs, *(ModelInput(n, dtypes[n], dims) for n, (dims, _) in free.items()))
    with_copies = _with_copies(replace(graph, inputs=inputs, constants=constants), onnx.defs.onnx_opset_version())
    return replace(with_copies, copies={**graph.copies, **with_copies.copies})


def _with_copies(graph: ImportedGraph, opset: int) -> ImportedGraph:
    """Add a copy, with a new name, of every input that is an output too, and of an output that is listed again: callers
    see it as ``y_2``, because results are by name."""
    inputs = {x.name for x in graph.inputs}
    taken = inputs | graph.constants.keys() | {o for n in graph.nodes for o in n.outputs}
    nodes, outputs, names = list(graph.nodes), list[str](), dict[str, str]()
    for x in graph.outputs:
        copy, again = x, x in graph.outputs[: len(outputs)]
        if again or x in inputs:
            copy = next(c for k in count(2 if again else 1) if (c := f"{x}_{k}" if again else x + "'" * k) not in taken)
            label = f"{copy}: {x} again" if again else f"copy of {x}"
            nodes.append(OnnxNode(label, "Identity", (x,), (copy,), {}, opset))
            names |= {} if again else {copy: x}
        taken.add(copy)
        outputs.append(copy)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs), copies=names)


def read_function(function: onnx.FunctionProto, node: OnnxNode) -> ImportedGraph:
    """Return a function's nodes for one call: over the names of the call's inputs, with the outputs that the call
    has.
    """
    arguments = dict(zip(function.input, (*node.inputs, *("" for _ in function.input)), strict=False))
    results = {o for n in function.node for o in n.output}
    outputs = [o if name else "" for o, name in zip(function.output, node.outputs, strict=False)]
    for o, name in zip(outputs, node.outputs, strict=False):
        if o and o not in results and o not in arguments:
            raise UnsupportedError(f"{node.op} does not compute its output {name} here", node=node.name, tensor=name)
    proto = onnx.GraphProto(name=node.op)
    proto.node.extend(_with_attributes(n, function, node) for n in function.node)
    proto.output.extend(onnx.ValueInfoProto(name=o) for o in outputs if o)
    opsets = {"ai.onnx": onnx.defs.onnx_opset_version()}  # default for functions that name no opset
    reader = _Reader(opsets | opsets_of(function.opset_import), None)
    read = reader.graph(proto, arguments.keys())
    inside = {o for n in read.nodes for o in n.outputs if o} | read.constants.keys()
    names = arguments | {o: f"{inner_prefix(node)}{o}" for o in inside}
    return replace(renamed(read, names), outputs=tuple(names.get(o, o) for o in outputs))


def inner_prefix(node: OnnxNode) -> str:
    """Return the prefix of names inside a node's body. No input of the node begins with it."""
    prefix = "."
    while any(x.startswith(prefix) for x in node.inputs):
        prefix += "."
    return prefix


def _with_attributes(n: onnx.NodeProto, function: onnx.FunctionProto, node: OnnxNode) -> onnx.NodeProto:
    """Replace references to attributes in a function's node by the call's attributes."""
    out = onnx.NodeProto()
    out.CopyFrom(n)
    del out.attribute[:]
    defaults = {a.name: a for a in function.attribute_proto} | _defaults(node)
    for a in n.attribute:
        if not a.ref_attr_name:
            copy = onnx.AttributeProto()
            copy.CopyFrom(a)
            if a.type == onnx.AttributeProto.GRAPH:
                inner = [_with_attributes(m, function, node) for m in a.g.node]
                del copy.g.node[:]
                copy.g.node.extend(inner)
            out.attribute.append(copy)
        elif a.ref_attr_name in node.attributes:
            value = node.attributes[a.ref_attr_name]
            value = onnx.numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
            out.attribute.append(onnx.helper.make_attribute(a.name, value, attr_type=a.type or None))
        elif a.ref_attr_name in defaults:
            copy = onnx.AttributeProto()
            copy.CopyFrom(defaults[a.ref_attr_name])
            copy.name = a.name
            out.attribute.append(copy)
    return out


def _defaults(node: OnnxNode) -> dict[str, onnx.AttributeProto]:
    """Return the default attributes that ONNX defines for an operator's node."""
    domain, _, name = node.op.rpartition("::")
    try:
        attributes = onnx.defs.get_schema(name, node.opset, domain).attributes
    except onnx.defs.SchemaError:
        return {}
    return {k: a.default_value for k, a in attributes.items() if a.default_value.name}


def renamed(graph: ImportedGraph, names: Mapping[str, str]) -> ImportedGraph:
    """Rename tensors, also where graphs inside read them."""

    def new(xs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(x, x) for x in xs)

    def inside(n: OnnxNode) -> Mapping[str, Any]:
        return {k: renamed(v, names) if isinstance(v, ImportedGraph) else v for k, v in n.attributes.items()}

    return replace(
        graph, outputs=new(graph.outputs), constants={names.get(t, t): a for t, a in graph.constants.items()},
        declared={names.get(t, t): x for t, x in graph.declared.items()},
        nodes=tuple(
            replace(n, inputs=new(n.inputs), outputs=new(n.outputs), attributes=inside(n)) for n in graph.nodes
        ),
    )  # fmt: skip


def remedy_of(model: object) -> str:
    """Return what to do with an object that is no ONNX model."""
    bases = {f"{c.__module__}.{c.__qualname__}" for c in type(model).__mro__}
    if bases & {"torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram"}:
        return "polydyn.from_torch(module, args) compiles it"
    return "give a path, bytes or an onnx.ModelProto"


def _parse(model: ModelLike) -> tuple[onnx.ModelProto, Path | None, str]:
    """Return the protobuf, the folder of its data files, and the model's name for errors."""
    if isinstance(model, onnx.ModelProto):
        return model, None, "this model"
    if isinstance(model, LocatedModel):
        return model.proto, model.folder.resolve(), "this model"
    if isinstance(model, (bytes, bytearray, memoryview)):
        data, folder, subject = bytes(model), None, "these bytes"
    elif isinstance(model, (str, os.PathLike)):
        path = Path(model)
        try:
            data, folder, subject = path.read_bytes(), path.resolve().parent, str(path)
        except (OSError, ValueError) as e:  # ValueError: a path with a NUL
            why = getattr(e, "strerror", None) or e
            if isinstance(e, IsADirectoryError):
                raise ModelError(f"{path} is a directory", remedy="polydyn.from_pretrained(folder) compiles it") from e
            kind = MissingModelError if isinstance(e, FileNotFoundError) else ModelError
            raise kind(f"cannot read {path}: {why}", remedy="give the path of an .onnx file") from e
    else:
        raise ModelError(f"a {type(model).__name__} is not a model", remedy=remedy_of(model))
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError) as e:
        raise ModelError(
            f"{subject}: not an ONNX protobuf, or a truncated one ({len(data)} bytes)",
            remedy="export or download the model again; git-lfs pointers must be fetched first",
        ) from e
    return proto, folder, subject


class _Reader:
    """Turns protobuf graphs (the model's and those inside If) into plain data."""

    def __init__(
        self, opsets: Mapping[str, int], folder: Path | None, functions: Mapping[Key, onnx.FunctionProto] | None = None,
        names: set[str] | None = None,
    ) -> None:  # fmt: skip
        self.opsets = opsets
        self.folder = folder
        self.functions = functions or {}
        self.names: set[str] = set() if names is None else names

    def graph(self, proto: onnx.GraphProto, outer: Collection[str]) -> ImportedGraph:
        check_names(proto, outputs=not outer)
        constants = {t.name: self.array(t) for t in proto.initializer}
        constants |= {t.values.name: self.sparse(t, t.values.name) for t in proto.sparse_initializer}
        inputs = tuple(_input(v, inside=bool(outer)) for v in proto.input if v.name not in constants)
        nodes: list[OnnxNode] = []
        declared: dict[str, ModelInput] = {}
        defined = {"", *outer, *constants, *(i.name for i in inputs)}
        for position, n in ordered_nodes(proto):
            _check_inputs(n, position, defined)
            name = self.name(n, position)
            part = self.part(n, name, defined)
            for o in filter(None, n.output):
                if o in defined:
                    raise ModelError(f"{o} is defined twice", node=name, tensor=o, rule="ONNX graphs are SSA")
                defined.add(o)
            nodes += part.nodes
            constants |= part.constants
            declared |= part.declared
        for v in proto.output:
            if v.name not in defined:
                raise ModelError(f"output {v.name} is computed by no node", tensor=v.name, remedy="export it again")
        declared |= {v.name: _declared(v) for v in (*proto.value_info, *proto.output)}
        outputs = tuple(v.name for v in proto.output)
        return ImportedGraph(proto.name, inputs, outputs, tuple(nodes), constants, declared=declared)

    def part(self, n: onnx.NodeProto, name: str, defined: set[str]) -> ImportedGraph:
        """Return what a node stands for: itself, a constant, or the nodes of a function of the model."""
        function = self.functions.get(called(n))
        if function is not None:
            check_versions(function, self.opsets, name)
            reader = _Reader(opsets_of(function.opset_import), self.folder, self.functions, self.names)
            return reader.graph(body_of(function, n, name), defined)
        domain = n.domain or "ai.onnx"
        op = n.op_type if domain == "ai.onnx" else f"{domain}::{n.op_type}"
        attributes = {a.name: self.attribute(a, defined, name) for a in n.attribute}
        node = OnnxNode(name, op, tuple(n.input), tuple(n.output), attributes, self.opsets.get(domain, 1))
        if node.op != "Constant":
            return ImportedGraph(name, (), node.outputs, (node,), {})
        check_node(node)
        return ImportedGraph(name, (), node.outputs, (), {o: _constant(node) for o in node.outputs if o})

    def name(self, n: onnx.NodeProto, position: int) -> str:
        """Return a name of a node that no other node has."""
        for text in (n.name, n.op_type, n.domain, *n.input, *n.output, *(a.name for a in n.attribute)):
            check_text(text, f"a part of node {position}")
        name = n.name or f"{n.op_type}_{position}"
        while name in self.names:
            name += "'"
        self.names.add(name)
        return name

    def attribute(self, a: onnx.AttributeProto, defined: set[str], node: str) -> Any:
        if a.type == onnx.AttributeProto.TENSOR:
            return self.array(a.t)
        if a.type == onnx.AttributeProto.SPARSE_TENSOR:
            return self.sparse(a.sparse_tensor, a.sparse_tensor.values.name or node)
        if a.type == onnx.AttributeProto.GRAPH:
            return self.graph(a.g, defined)
        try:
            value = onnx.helper.get_attribute_value(a)
            if isinstance(value, bytes):
                return value.decode()
            if a.type == onnx.AttributeProto.STRINGS:
                return tuple(x.decode() for x in value)
        except ValueError as e:  # no type, a reference outside a function, bytes that are not text
            raise ModelError(f"the attribute {a.name} cannot be read: {e}", node=node, remedy="export it again") from e
        return tuple(value) if not isinstance(value, (int, float, str)) and isinstance(value, Iterable) else value

    def array(self, t: onnx.TensorProto) -> Array:
        """Return the data of a tensor. Strings become an array of objects (``graph/texts.py``)."""
        if t.data_type == onnx.TensorProto.STRING and len(t.string_data) == math.prod(t.dims):
            return np.array(t.string_data, object).reshape(tuple(t.dims))
        dtype = numpy_dtype(onnx_dtype(t.data_type, tensor=t.name))
        shape = tuple(t.dims)
        try:
            if min(shape, default=0) < 0:
                raise ValueError("a size is negative")
            if t.data_location == onnx.TensorProto.EXTERNAL:
                return self.external(t, dtype, shape)
            if t.HasField("raw_data") and dtype.name in PACKED:
                return unpacked(np.frombuffer(t.raw_data, np.uint8), dtype, shape)
            if t.HasField("raw_data"):
                return np.frombuffer(t.raw_data, dtype.newbyteorder("<") if dtype.kind != "V" else dtype).reshape(shape)
            return np.asarray(onnx.numpy_helper.to_array(t)).reshape(shape)
        except PolydynError:
            raise
        except (ValueError, TypeError, OverflowError, RuntimeError, OSError) as e:
            raise ModelError(
                f"the data of constant {t.name} do not fit its shape {list(shape)}: {e}", tensor=t.name,
                remedy="the file is damaged or cut off; export it again",
            ) from e  # fmt: skip

    def sparse(self, t: onnx.SparseTensorProto, name: str) -> Array:
        """Return a sparse tensor as a dense array."""
        return dense(name, self.array(t.values), self.array(t.indices), t.dims)

    def external(self, t: onnx.TensorProto, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Map the data file next to the model, read-only. Paths may not leave the model's folder."""
        info = {e.key: e.value for e in t.external_data}
        if self.folder is None:
            raise ModelError(
                f"constant {t.name} lies in the file {info.get('location')}, but the model was not given as a path",
                tensor=t.name, remedy="give the path of the model, or load it with its external data",
            )  # fmt: skip
        path = external_path(self.folder, t)
        count, bits = math.prod(shape), PACKED.get(dtype.name, 8 * dtype.itemsize)
        size = -(-count * bits // 8)
        length = int(info.get("length", size))
        if length != size:
            raise ValueError(f"the data file holds {length} bytes of it")
        if count == 0:
            return np.zeros(shape, dtype)
        offset = int(info.get("offset", 0))
        if bits < 8:
            return unpacked(np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(size,)), dtype, shape)
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))).reshape(shape)


def external_path(folder: Path, tensor: onnx.TensorProto) -> Path:
    """Return the data file of an external tensor, below the resolved ``folder`` of the model, without reading it.

    Raises ModelError if it is elsewhere, or not a regular file, because reading a pipe or a device may never end.
    """
    location = next((e.value for e in tensor.external_data if e.key == "location"), "")
    path = data_file(folder, location)
    if path is None:
        raise ModelError(
            f"the data file {location!r} of constant {tensor.name} is not next to the model, or not a regular file",
            tensor=tensor.name, remedy="keep the data files in the folder of the model",
        )  # fmt: skip
    return path


def _declared(v: onnx.ValueInfoProto) -> ModelInput:
    """Return the declared type and shape of a tensor that a node computes; empty for unsupported types."""
    try:
        declared = _input(v, inside=True)
    except UnsupportedError:
        return ModelInput(v.name, "", None)
    return replace(declared, dtype="") if declared.dtype == "string" else declared


def _input(v: onnx.ValueInfoProto, inside: bool) -> ModelInput:
    """Read an input. ``inside``: of a body, whose node determines what is passed in."""
    if inside and not v.type.HasField("tensor_type"):
        return ModelInput(v.name, "", None)
    if not v.type.HasField("tensor_type"):
        kind = v.type.WhichOneof("value") or "nothing"
        raise UnsupportedError(f"input {v.name} is a {kind}, not a tensor", tensor=v.name)
    t = v.type.tensor_type
    text = t.elem_type == onnx.TensorProto.STRING
    dtype = "string" if text else onnx_dtype(t.elem_type, tensor=v.name) if t.elem_type or not inside else ""
    if not t.HasField("shape"):
        return ModelInput(v.name, dtype, None)
    dims: list[int | str | None] = []
    for d in t.shape.dim:
        kind = d.WhichOneof("value")
        known = kind == "dim_value" and d.dim_value >= 0
        dims.append(d.dim_value if known else None if UNNAMED.fullmatch(d.dim_param) else d.dim_param)
    return ModelInput(v.name, dtype, tuple(dims))


UNNAMED = re.compile(r"\s*(\?+|\*+|-\d+|none|unk(nown)?([\W\d_].*)?)?\s*", re.IGNORECASE | re.DOTALL)
"""Names that exporters write for unnamed dims (tf2onnx: ``unk__12``). Each such axis has a separate size."""


def _check_inputs(n: onnx.NodeProto, position: int, defined: set[str]) -> None:
    for x in n.input:
        if x not in defined:
            name = n.name or f"{n.op_type}_{position}"
            raise ModelError(f"{x} is read but defined nowhere", node=name, tensor=x, remedy="export the model again")


def _constant(node: OnnxNode) -> Array:
    dtypes = {"value_int": "int64", "value_ints": "int64", "value_float": "float32", "value_floats": "float32"}
    for key, dtype in dtypes.items():
        if key in node.attributes:
            return np.array(node.attributes[key], numpy_dtype(dtype))
    for key in {"value_string", "value_strings"} & node.attributes.keys():
        return np.array(node.attributes[key], object)
    value = node.attributes.get("value", node.attributes.get("sparse_value"))
    if not isinstance(value, np.ndarray):
        raise UnsupportedError(
            f"Constant with {', '.join(node.attributes) or 'no attribute'} is not supported", node=node.name
        )
    return value

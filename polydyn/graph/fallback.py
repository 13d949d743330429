"""Nodes that another runtime computes at the user's request: steps of the host.

``Options(fallback="onnxruntime")``: nodes with unsupported operators or forms are grouped into regions
(``graph/regions.py``). ONNX Runtime runs each region as a separate model between two parts of the program
(docs/adr/0030-fallback.md). All sizes of its results are new symbols. Sizes that ONNX's inference knows are proven or
checked on every call.
"""

from __future__ import annotations

import base64
from functools import lru_cache

import onnx
import onnx.defs
from onnx import helper, numpy_helper

from polydyn.errors import UnsupportedError
from polydyn.graph.bodies import split_name, to_proto
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.importer import ImportedGraph
from polydyn.graph.ir import Dim, Graph, Tensor
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, Operator
from polydyn.graph.regions import KIND, CannotCross, members
from polydyn.onnx_runtime import RUNS, ort_classes, ort_session
from polydyn.schedules.index import Index
from polydyn.schedules.names import given_back

MAX_CONSTANT_ELEMENTS = 1024
"""Maximum elements of a constant that is stored in the region's model: axes, sizes and scales, which some operators
require to be constant.
"""
CROSSING_DTYPES = (
    "float32", "float64", "float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
"""Dtypes of tensors that may pass between a region and the program."""


def standalone(node: OnnxNode, ctx: Context) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a region as a model over the names of its tensors, and the names of its inputs.

    Only constants have fixed sizes, so the model does not depend on facts about sizes. Raises CannotCross if the region
    reads a tensor whose type cannot pass.
    """
    values, constants = [], []
    for k, x in enumerate(node.inputs):
        known = ctx.constant(x)
        if known is not None and (known.size <= MAX_CONSTANT_ELEMENTS or str(known.dtype) not in CROSSING_DTYPES):
            constants.append(numpy_helper.from_array(known, x))
            continue
        t = ctx.tensor(x)
        if t.dtype not in CROSSING_DTYPES:
            raise CannotCross(x, t.dtype)
        code = helper.np_dtype_to_tensor_dtype(numpy_dtype(t.dtype))
        shape = [f".{k}.{a}" for a in range(len(t.shape))] if known is None else known.shape
        values.append(helper.make_tensor_value_info(x, code, shape))
    infos = [onnx.ValueInfoProto(name=o) for o in node.outputs]
    graph = helper.make_graph(list(map(to_proto, members(node))), node.name, values, infos, constants)
    model = helper.make_model(graph, opset_imports=_opsets(node), ir_version=10)
    return model, tuple(v.name for v in values)


def _opsets(node: OnnxNode) -> list[onnx.OperatorSetIdProto]:
    """Return the opset of each domain in a region. Raises UnsupportedError if two opsets differ in a node's
    operator.
    """
    opsets: dict[str, int] = {"": 1}
    inside = list(members(node))
    for n in inside:  # the list grows
        domain, _ = split_name(n.op)
        opsets[domain] = max(opsets.get(domain, 1), n.opset)
        inside += [m for v in n.attributes.values() if isinstance(v, ImportedGraph) for m in v.nodes]
    for n in inside:
        domain, name = split_name(n.op)
        if n.opset != opsets[domain] and _version(name, n.opset, domain) != _version(name, opsets[domain], domain):
            raise _refusal(node, f"{n.name} is of opset {n.opset}, another node of {opsets[domain]}")
    if opsets[""] == 1:
        opsets[""] = 17
    return [helper.make_opsetid(domain, version) for domain, version in opsets.items()]


def _version(name: str, opset: int, domain: str) -> int:
    try:
        return int(onnx.defs.get_schema(name, opset, domain).since_version)
    except onnx.defs.SchemaError:
        return opset


def _refusal(node: OnnxNode, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.name} cannot be left to ONNX Runtime: {reason}", node=node.name, rule="fallback", remedy=node.fallback
    )


def results(node: OnnxNode, ctx: Context) -> list[tuple[str, str, list[Dim | None]]]:
    """Return name, dtype and shape of every output, as reported by ONNX Runtime for the model.

    Raises UnsupportedError if ONNX Runtime is not installed or rejects a node, and CannotCross if an output is not a
    tensor of known rank.
    """
    ort_classes()
    model, fed = standalone(node, ctx)
    try:
        outputs = _outputs(model.SerializeToString(deterministic=True))
    except Exception as e:  # many undocumented classes
        raise _refusal(node, str(e).strip().split("\n")[0]) from e
    dims = {f".{k}.{a}": d for k, x in enumerate(node.inputs) if x in fed for a, d in enumerate(ctx.tensor(x).shape)}
    outputs_found = []
    for o, (said, shape) in zip(node.outputs, outputs, strict=True):
        dtype = _dtype(o, said)
        if shape is None and o in node.attribute("ranks"):
            shape = [None] * node.attribute("ranks")[o]
        if shape is None:
            raise CannotCross(o, "a tensor of a rank that data decide")
        outputs_found.append((o, dtype, [Index.of(d) if isinstance(d, int) else dims.get(str(d)) for d in shape]))
    return outputs_found


@lru_cache(maxsize=64)
def _outputs(model: bytes) -> list[tuple[str, list[int | str | None] | None]]:
    """Return type and shape of the outputs of a model. A shape of None means that the rank is unknown."""
    session = ort_session(model)
    ranks = _ranks(onnx.load_from_string(model))
    return [(o.type, o.shape or ranks.get(o.name)) for o in session.get_outputs()]


def _ranks(model: onnx.ModelProto) -> dict[str, list[int | str | None]]:
    """Return the ranks that ONNX infers. ONNX Runtime's answer does not distinguish a scalar from an unknown rank."""
    inferred = onnx.shape_inference.infer_shapes(model)
    types = {o.name: o.type.tensor_type for o in inferred.graph.output if o.type.HasField("tensor_type")}
    return {n: [None] * len(t.shape.dim) for n, t in types.items() if t.HasField("shape")}


def _dtype(output: str, type_text: str) -> str:
    """Return our name of a type that ONNX Runtime writes as ``tensor(float)``."""
    name = type_text.removeprefix("tensor(").removesuffix(")")
    dtype = {"float": "float32", "double": "float64"}.get(name, name)
    if dtype not in CROSSING_DTYPES:
        raise CannotCross(output, f"a {type_text}")
    return dtype


def _settings(node: OnnxNode) -> dict[str, str]:
    return {"node": node.name}


def infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Request the sizes from the host. Sizes that ONNX Runtime reports in advance are made equal to them."""
    types_of_outputs = results(node, ctx)
    _, fed = standalone(node, ctx)
    places = [(o, a) for o, _, shape in types_of_outputs for a in range(len(shape))]
    symbols = iter(ctx.ask(KIND, fed, [f"{o}.{a}" for o, a in places], settings=_settings(node)))
    types = {}
    for o, dtype, shape in types_of_outputs:
        sizes = [(next(symbols), d) for d in shape]
        why = f"ONNX Runtime says the shape of {o}"
        types[o] = Inferred(dtype, tuple(s if d is None else ctx.unify(s, d, why) for s, d in sizes))
    return tuple(types[o] for o in node.outputs)


def expand(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add the step that runs the region's model."""
    model, fed = standalone(node, ctx)
    tensors: list[Tensor] = [ctx.tensor(o) for o in node.outputs]
    data = base64.b64encode(model.SerializeToString(deterministic=True)).decode()
    more = {"model": data, "names": list(fed), "ranks": [len(t.shape) for t in tensors]}
    ctx.made(KIND, fed, [(t.name, t.dtype, t.shape) for t in tensors], settings=_settings(node), more=more)


def fallback_note(node: OnnxNode) -> str:
    """Return the note for users about a node of a region."""
    return f"{node.name} ({node.op}) {RUNS}: {node.fallback}"


def fallback_notes(graph: Graph) -> list[str]:
    """Return the notes about all nodes that another runtime computes."""
    return [given_back(n) for n in graph.notes if f") {RUNS}: " in n]


FALLBACK = Operator(KIND, infer, expand)
"""Rules of a region that another runtime computes."""

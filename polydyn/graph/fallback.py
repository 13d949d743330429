"""Nodes that another runtime computes, where the user asks for that: steps of the host.

``Options(fallback="onnxruntime")``: a node of an operator that is not built, or of a form that its rule refuses,
becomes a model of its own that ONNX Runtime runs between two parts of the program (docs/adr/0030-fallback.md). All
sizes of its results are symbols of their own; those that ONNX's inference knows are proven or checked on every call.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from polydyn.errors import UnsupportedError
from polydyn.graph.bodies import split_name
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.ir import Dim, Graph, Tensor
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, Operator
from polydyn.schedules.index import Index

KIND = "onnxruntime"
"""Of the steps, and the value of ``Options.fallback``."""
RUNS = "runs in ONNX Runtime"
MOST_ELEMENTS = 1024
"""Of a constant that is written into the node's model: axes, sizes and scales, which some operators want constant."""
TYPES = (
    "float32", "float64", "float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
"""Of tensors that may cross."""


def standalone(node: OnnxNode, ctx: InferContext | ExpandContext) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The node as a model, and the tensors that it is fed: inputs ``x<position>``, outputs ``y<position>``.

    Sizes are left open, so that the model does not depend on what was learned. UnsupportedError: the node has a body,
    or a tensor of a type that cannot cross.
    """
    domain, name = split_name(node.op)
    inputs, values, fed, constants = [], [], [], []
    for k, x in enumerate(node.inputs):
        inputs.append(f"x{k}" if x else "")
        if not x:
            continue
        t, known = ctx.tensor(x), ctx.constant(x)
        if t.dtype not in TYPES:
            raise _refusal(node, f"its input {x} is {t.dtype}")
        if known is not None and known.size <= MOST_ELEMENTS:
            constants.append(numpy_helper.from_array(np.ascontiguousarray(known), f"x{k}"))
        else:
            code = helper.np_dtype_to_tensor_dtype(numpy_dtype(t.dtype))
            values.append(helper.make_tensor_value_info(f"x{k}", code, [f"x{k}_{a}" for a in range(len(t.shape))]))
            fed.append(x)
    outputs = [f"y{k}" if o else "" for k, o in enumerate(node.outputs)]
    made = helper.make_node(name, inputs, outputs, node.name, domain=domain)
    made.attribute.extend(_attribute(node, n, v) for n, v in sorted(node.attributes.items()) if v is not None)
    infos = [onnx.ValueInfoProto(name=o) for o in outputs if o]
    graph = helper.make_graph([made], node.name, values, infos, constants)
    opsets = [helper.make_opsetid(domain, node.opset)] + ([helper.make_opsetid("", 17)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), tuple(fed)


def _attribute(node: OnnxNode, name: str, value: Any) -> onnx.AttributeProto:
    if isinstance(value, np.ndarray):
        value = numpy_helper.from_array(value)
    try:
        return helper.make_attribute(name, value)
    except (TypeError, ValueError) as e:
        raise _refusal(node, f"its attribute {name} is a body") from e


def _refusal(node: OnnxNode, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.op} cannot be left to ONNX Runtime: {why}", node=node.name, rule="fallback", remedy=node.fallback
    )


def results(node: OnnxNode, ctx: InferContext | ExpandContext) -> list[tuple[str, str, list[Dim | None]]]:
    """Name, dtype and shape of every output that is read: what ONNX Runtime says of the model.

    UnsupportedError: ONNX Runtime is not installed or refuses the node, or an output is no tensor of a rank.
    """
    try:
        import onnxruntime
    except ImportError as e:
        raise UnsupportedError(
            "ONNX Runtime is not installed", node=node.name, rule="fallback", remedy="pip install polydyn[fallback]"
        ) from e
    model, _ = standalone(node, ctx)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:  # of many classes, none of them documented
        raise _refusal(node, str(e).strip().split("\n")[0]) from e
    ranks = _ranks(model)
    dims = {f"x{k}_{a}": d for k, x in enumerate(node.inputs) if x for a, d in enumerate(ctx.tensor(x).shape)}
    found = []
    for o, said in zip([o for o in node.outputs if o], session.get_outputs(), strict=True):
        dtype = _dtype(node, o, said.type)
        shape = said.shape or ranks.get(said.name)
        if shape is None:
            raise _refusal(node, f"the rank of {o} is unknown")
        found.append((o, dtype, [Index.of(d) if isinstance(d, int) else dims.get(str(d)) for d in shape]))
    return found


def _ranks(model: onnx.ModelProto) -> dict[str, list[None]]:
    """Of outputs whose rank ONNX infers: a scalar and an unknown rank look alike in ONNX Runtime's answer."""
    inferred = onnx.shape_inference.infer_shapes(model)
    types = {o.name: o.type.tensor_type for o in inferred.graph.output if o.type.HasField("tensor_type")}
    return {n: [None] * len(t.shape.dim) for n, t in types.items() if t.HasField("shape")}


def _dtype(node: OnnxNode, output: str, said: str) -> str:
    """Our name of a type as ONNX Runtime writes it: ``tensor(float)``."""
    name = said.removeprefix("tensor(").removesuffix(")")
    dtype = {"float": "float32", "double": "float64"}.get(name, name)
    if dtype not in TYPES:
        raise _refusal(node, f"its output {output} is {said}")
    return dtype


def _settings(node: OnnxNode) -> dict[str, str]:
    return {"node": node.name}


def infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Sizes are asked of the host; those that ONNX Runtime says beforehand are the same."""
    found = results(node, ctx)
    _, fed = standalone(node, ctx)
    places = [(o, a) for o, _, shape in found for a in range(len(shape))]
    symbols = iter(ctx.ask(KIND, fed, [f"{o}.{a}" for o, a in places], settings=_settings(node)))
    types = {}
    for o, dtype, shape in found:
        sizes = [(next(symbols), d) for d in shape]
        why = f"ONNX Runtime says the shape of {o}"
        types[o] = Inferred(dtype, tuple(s if d is None else ctx.unify(s, d, why) for s, d in sizes))
    return tuple(types.get(o, Inferred("float32", ())) for o in node.outputs)


def expand(node: OnnxNode, ctx: ExpandContext) -> None:
    """The step that runs the node's model."""
    model, fed = standalone(node, ctx)
    tensors: list[Tensor] = [ctx.tensor(o) for o in node.outputs if o]
    names = [i.name for i in model.graph.input]
    more = {"model": base64.b64encode(model.SerializeToString(deterministic=True)).decode(), "names": names}
    ctx.made(KIND, fed, [(t.name, t.dtype, t.shape) for t in tensors], settings=_settings(node), more=more)


def fallback_note(node: OnnxNode) -> str:
    """What the user is told of a node."""
    return f"{node.name} ({node.op}) {RUNS}: {node.fallback}"


def fallback_notes(graph: Graph) -> list[str]:
    """The notes of all nodes that another runtime computes."""
    return [n for n in graph.notes if f") {RUNS}: " in n]


FALLBACK = Operator(KIND, infer, expand)
"""In place of the rules of a node that another runtime computes."""

"""A slow, obvious interpreter of Graphs, and a helper that builds ONNX models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.ir import Compute, Graph
from polydyn.schedules.expr import OPS, REDUCTIONS, Const, FromIndex, Load, Op, Value, neutral


def run(graph: Graph, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Evaluate element by element, after checking the guards."""
    sizes = {s.symbol: feeds[s.input].shape[s.axis] for s in graph.sources}
    for g in graph.guards:
        a, b = g.left.evaluate(sizes), g.right.evaluate(sizes)
        assert {"==": a == b, "<=": a <= b, "%==": a % b == 0 if b else a == 0}[g.relation], g.message
    known = {**graph.constants, **feeds}
    for node in graph.nodes:
        shape = tuple(d.evaluate(sizes) for d in graph.tensors[node.output].shape)
        if not isinstance(node, Compute):
            known[node.output] = np.concatenate([known[p] for p in node.parts], node.axis)
            assert known[node.output].shape == shape
            continue
        out = np.empty(shape, numpy_dtype(graph.tensors[node.output].dtype))
        extents = [d.evaluate(sizes) for d in node.reduction]
        for at in np.ndindex(*shape):
            env = sizes | {f"d{i}": x for i, x in enumerate(at)}
            if node.reduce is None:
                out[at] = value(node.body, env, known)
                continue
            total = np.asarray(neutral(node.reduce, node.body.dtype).value, out.dtype)
            for r in itertools.product(*map(range, extents)):
                env |= {f"r{i}": x for i, x in enumerate(r)}
                total = OPS[REDUCTIONS[node.reduce]].numpy(total, value(node.body, env, known))
            out[at] = total
        known[node.output] = out
    return {t: known[t] for t in graph.outputs}


def value(v: Value, env: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> Any:
    def fetch(name: str, at: tuple[int, ...]) -> int:
        assert all(0 <= i < n for i, n in zip(at, arrays[name].shape, strict=True)), f"{name}{at}"
        return int(arrays[name][at])

    if isinstance(v, Const):
        return np.asarray(v.value, numpy_dtype(v.dtype))
    if isinstance(v, FromIndex):
        return np.asarray(v.index.evaluate(env, fetch), numpy_dtype(v.dtype))
    if isinstance(v, Load):
        at = tuple(i.evaluate(env, fetch) for i in v.index)
        assert all(0 <= i < n for i, n in zip(at, arrays[v.buffer].shape, strict=True)), f"{v.buffer}{at}"
        return arrays[v.buffer][at]
    assert isinstance(v, Op)
    if v.name == "where":
        return value(v.args[1] if value(v.args[0], env, arrays) else v.args[2], env, arrays)
    args = [value(a, env, arrays) for a in v.args]
    return np.asarray(args[0]).astype(numpy_dtype(v.dtype)) if v.name == "cast" else OPS[v.name].numpy(*args)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[str, Sequence[int | str | None] | None]],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    """Build an ONNX model; inputs are ``name: (dtype, dims)``."""
    kinds = {t: helper.np_dtype_to_tensor_dtype(numpy_dtype(t)) for t, _ in inputs.values()}
    graph = helper.make_graph(
        list(nodes),
        "m",
        [helper.make_tensor_value_info(n, kinds[t], d) for n, (t, d) in inputs.items()],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Build a node from names separated by blanks; ``-`` is an absent input."""
    names = ["" if x == "-" else x for x in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"{op}_{outputs.split()[0]}", **attributes)

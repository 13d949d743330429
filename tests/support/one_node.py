"""One-node models: built, imported, evaluated by the reference evaluator and by onnx's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator

import polydyn.backend as backend
from polydyn.graph import reference
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph
from polydyn.schedules.expr import Array
from polydyn.testing.conformance import as_array


def model_of(
    op: str,
    inputs: Mapping[str, tuple[str, Sequence[int | str]] | Array],
    attributes: Mapping[str, Any] | None = None,
    opset: int = 18,
    outputs: Sequence[str] = ("y",),
    names: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """Build a model of one node.

    An input is (dtype, dims) or the array of an initializer; ``""`` in ``names`` is absent.
    """
    node = helper.make_node(op, list(names or inputs), list(outputs), name=f"the_{op}", **(attributes or {}))
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(numpy_dtype(x[0])), list(x[1]))
            for n, x in inputs.items()
            if isinstance(x, tuple)
        ],
        [helper.make_empty_tensor_value_info(o) for o in outputs if o],
        [onnx.numpy_helper.from_array(x, n) for n, x in inputs.items() if not isinstance(x, tuple)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def expected(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Return the results of onnx's reference evaluator."""
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(None, dict(feeds)))


def check_with_onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, Array], tolerance: float = 1e-5) -> None:
    """Check a model with ONNX Runtime, for operators that onnx's own evaluator gets wrong or lacks."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = reference.evaluate(import_model(model), feeds)
    for array, want in zip(got.values(), session.run(None, dict(feeds)), strict=True):
        np.testing.assert_allclose(array, want, tolerance, tolerance)


def check(
    model: onnx.ModelProto, feeds: Mapping[str, Array], tolerance: float = 1e-5, graph: Graph | None = None
) -> None:
    """Check that the reference evaluator on the imported graph agrees with onnx's evaluator."""
    got = reference.evaluate(graph or import_model(model), feeds)
    for (name, array), want in zip(got.items(), expected(model, feeds), strict=True):
        assert array.dtype == want.dtype, (name, array.dtype, want.dtype)
        assert array.shape == want.shape, (name, array.shape, want.shape)
        np.testing.assert_allclose(array.astype(np.float64), want.astype(np.float64), tolerance, tolerance)


def check_case(case: Any) -> None:
    """Run ONNX's own node case through the backend, with its dtypes and numbers."""
    rep = backend.prepare(case.model, threads=1)
    for inputs, wanted in case.data_sets:
        got = rep.run([as_array(x) for x in inputs])
        for a, b in zip(got, map(as_array, wanted), strict=True):
            assert a.dtype == b.dtype
            if a.dtype.kind == "V":  # dtypes that numpy lacks
                a, b = a.astype(np.float32), b.astype(np.float32)
            np.testing.assert_allclose(a, b, case.rtol, case.atol)

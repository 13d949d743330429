"""Models of one node of com.microsoft, compared with ONNX Runtime, which defines its operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import polydyn
from polydyn.graph import reference
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def model_of(
    op: str,
    inputs: Mapping[str, tuple[str, Sequence[int | str]] | Array | None],
    outputs: Sequence[str] = ("y",),
    domain: str = "com.microsoft",
    **attributes: Any,
) -> onnx.ModelProto:
    """Build a model of one node; an input is (dtype, dims), the array of an initializer, or absent."""
    names = [n if x is not None else "" for n, x in inputs.items()]
    node = helper.make_node(op, names, list(outputs), name=f"the_{op}", domain=domain, **attributes)
    graph = helper.make_graph(
        [node], "one",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(numpy_dtype(x[0])), list(x[1]))
            for n, x in inputs.items() if isinstance(x, tuple)
        ],
        [helper.make_empty_tensor_value_info(o) for o in outputs if o],
        [numpy_helper.from_array(x, n) for n, x in inputs.items() if isinstance(x, np.ndarray)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@lru_cache(maxsize=1)
def compiled(model: bytes, kernels: bool) -> tuple[onnxruntime.InferenceSession, Graph, polydyn.Program | None]:
    """Open the model in ONNX Runtime, as primitives, and compiled: once for all the shapes of a test."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session, import_model(model), polydyn.compile(model, threads=1) if kernels else None


def agrees(
    model: onnx.ModelProto, *calls: dict[str, Array], tolerance: float = 2e-5, steps: int = 0, kernels: bool = True
) -> None:
    """Check that primitives and kernels of a model equal ONNX Runtime; ``steps``: tolerance of integer outputs.

    Without ``kernels`` nothing is compiled: for further forms of an operator whose first forms are compiled.
    """
    session, graph, program = compiled(model.SerializeToString(deterministic=True), kernels)
    for feeds in calls:
        wanted = session.run(None, feeds)
        for results in (reference.evaluate(graph, feeds), *((program.run(feeds),) if program else ())):
            for (name, got), want in zip(results.items(), wanted, strict=True):
                assert got.dtype == want.dtype and got.shape == want.shape, (name, got.shape, want.shape)
                a, b = got.astype(np.float64), want.astype(np.float64)
                if want.dtype.kind == "f":
                    np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=name)
                else:
                    assert np.abs(a - b).max(initial=0) <= steps, name

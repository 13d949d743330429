"""Fusion plans of small models for the tests of CUDA code generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx
from onnx import TensorProto, helper

from benchmarks.gpu.emulated import Arrays
from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.fusion.grouping import fuse
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold

TYPES = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}  # fmt: skip


def plan_of(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[Any, ...]],
    outputs: list[str],
    constants: Arrays | None = None,
    dtype: str | Mapping[str, str] = "float32",
) -> FusionPlan:
    """The fusion plan of a small model; ``inputs``: name -> dims; ``dtype``: of all inputs or of each."""
    of = {n: dtype if isinstance(dtype, str) else dtype[n] for n in inputs}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, TYPES[of[n]], list(s)) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [onnx.numpy_helper.from_array(a, n) for n, a in (constants or {}).items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return fuse(fold(import_model(model)))


def with_bugs(kernel: CudaKernel, bugs: Mapping[str, tuple[str, str]]) -> tuple[CudaKernel, ...]:
    """A version of the kernel for each planted bug (old text, new text): compiled together, which is much faster."""
    out = []
    for i, (bug, (old, new)) in enumerate(bugs.items()):
        assert old in kernel.text, f"the planted bug '{bug}' no longer fits the kernel"
        name = f"{kernel.name}_bug{i}"
        text = kernel.text.replace(old, new).replace(kernel.name, name)
        out.append(replace(kernel, name=name, text=text, version=f"bug {i}"))
    return tuple(out)

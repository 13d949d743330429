"""Models of quantized operators, written by hand, and checks of exact agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from polydyn.build.features import machine_features
from polydyn.compiler import plan_program
from polydyn.graph import reference
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import Array

Inputs = Mapping[str, tuple[str, Sequence[int | str]]]


def quantized_model(
    nodes: Sequence[onnx.NodeProto], inputs: Inputs, outputs: Sequence[str], opset: int = 21, **constants: Any
) -> onnx.ModelProto:
    """Build a model with inputs of any dtype: ``name: (dtype, dims)``."""
    graph = helper.make_graph(
        list(nodes), "m",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(numpy_dtype(t)), list(d))
            for n, (t, d) in inputs.items()
        ],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def targets() -> list[str]:
    """Return the targets whose code this machine can run.

    Cases with the last one have an id without its name, because tests/rare_cases.txt lists ids.
    """
    return ["cpu:avx2", *(["cpu:avx512"] if "avx512bw" in machine_features() else [])]


def same_as_reference(m: onnx.ModelProto, *feeds: Mapping[str, Array], target: str = "cpu") -> HostPlan:
    """Check that the compiled model equals the reference evaluator exactly; return the plan for further checks."""
    plan, graph = plan_program(m, target=target), import_model(m)
    program = build_program(plan, target=target, threads=1)
    for f in feeds:
        got = program.run(dict(f))
        for name, want in reference.evaluate(graph, f).items():
            assert got[name].dtype == want.dtype
            np.testing.assert_array_equal(got[name], want, f"{name} at {[a.shape for a in f.values()]}")
    return plan


def random_bytes(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    """Return random numbers over all values of the dtype."""
    ends = np.iinfo(dtype)
    return np.asarray(rng.integers(ends.min, ends.max + 1, shape), dtype)


class Qdq:
    """Writes a model in the QDQ form: float operators, every tensor between them quantized and dequantized."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"{op}_{name}", **attributes))
        return name

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def step(self, x: str, scale: Any, zero: Any = None, **attributes: Any) -> str:
        """Add quantization and dequantization with new constants; without a zero point as uint8."""
        numbers = [self.constant(np.asarray(scale, np.float32))]
        numbers += [] if zero is None else [self.constant(zero)]
        q = self.add("QuantizeLinear", x, *numbers, **attributes)
        return self.add("DequantizeLinear", q, *numbers, **attributes)

    def weight(self, w: Array, scale: Any, zero: Any = None, axis: int = 1) -> str:
        """Add a dequantized constant."""
        numbers = [self.constant(np.asarray(scale, np.float32))]
        numbers += [] if zero is None else [self.constant(zero)]
        return self.add("DequantizeLinear", self.constant(w), *numbers, axis=axis)

    def model(self, inputs: Inputs, output: str) -> onnx.ModelProto:
        return quantized_model(self.nodes, inputs, [output], 17, **self.constants)


def qdq_layers(zeros: Sequence[int], size: int = 34, per_column: bool = True, rows: int | str = "M") -> onnx.ModelProto:
    """Build linear layers of one form from x [rows, size]; ``zeros``: the zero point of each one's input.

    Scales differ.
    """
    m, x = Qdq(), "x"
    for i, zero in enumerate(zeros):
        x = m.step(x, 0.02 + i / 500, np.uint8(zero) if zero else None)
        scale = (1 + m.rng.random(size) if per_column else np.float32(1 + i / 10)) / 90 / size**0.5
        x = m.add("MatMul", x, m.weight(random_bytes(m.rng, "int8", size, size), scale))
    return m.model({"x": ("float32", [rows, size])}, m.step(x, 0.03, np.uint8(128)))

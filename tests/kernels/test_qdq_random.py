"""Random models in the QDQ form, compared with ONNX Runtime bit by bit.

Scales are powers of two and sums are short, so that float32 holds every number exactly: the order of operations and the
position of scales make no difference, and every element has to be equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from polydyn.compiler import plan_program
from polydyn.fusion.pipeline import rewrite_graph
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.program.assemble import build_program
from polydyn.schedules.expr import Array
from tests.support.quantized import Qdq, quantized_model, random_bytes, targets

STEPS = ("uint8", "uint8", "uint8", "int8", "int8", "int8", "int16", "uint16")
BYTES = ("int8", "int8", "uint8")
CHEAP_CASE = 10
"""A seed with few kernels and a product two steps at a time."""


class Random(Qdq):
    """Writes a model of the operators around products: every choice is drawn. Tensors are [.., columns]."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.outputs: list[str] = []

    def pick(self, *of: Any) -> Any:
        return of[int(self.rng.integers(len(of)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def numbers(self, dtype: str, *shape: int) -> list[str]:
        """Add a scale and perhaps a zero point, which may be 0 or an extreme; one per tensor or one per column."""
        shape = shape or self.pick((), (), (1,))
        scale = 2.0 ** self.rng.integers(-6, -1, shape) * self.pick(1, 1, 1, -1)
        ends = np.iinfo(dtype)
        zero = self.pick(
            random_bytes(self.rng, dtype, *shape), np.zeros(shape), np.full(shape, self.pick(ends.min, ends.max))
        )
        names = [self.constant(np.asarray(scale, np.float32)), self.constant(np.asarray(zero, dtype))]
        return names[: 1 if dtype == "uint8" and self.chance(0.3) else 2]

    def layer(self, x: str, columns: int) -> tuple[str, int]:
        """Apply an operator to a tensor; return the result and its columns."""
        kind = self.pick("product", "product", "product", "steps", "twice", "pad", "relu", "joined", "cut")
        if kind == "product":
            return self.product(self.steps(x, columns), columns)
        if kind == "twice":
            y, n = self.product(self.steps(x, columns), columns)
            z, _ = self.product(self.steps(x, columns), columns, n)
            return self.add("Add", self.steps(y, n), z), n
        if kind == "pad":
            ends = self.constant(np.array([0, self.pick(0, 1, 2), 0, self.pick(0, 1)]))
            padded = self.add("Pad", self.steps(x, columns), ends, self.constant(np.float32(self.pick(0, 0, 1))))
            return self.product(padded, columns + int(self.constants[ends].sum()))
        if kind == "joined":
            return self.add("Concat", self.steps(x, columns), self.add("Neg", x), axis=-1), 2 * columns
        if kind == "cut" and columns > 2:
            ends = [self.constant(np.array([e])) for e in (1, columns, -1)]
            return self.add("Slice", self.steps(x, columns), *ends), columns - 1
        return self.add("Relu", x) if kind == "relu" else self.steps(x, columns), columns

    def steps(self, x: str, columns: int) -> str:
        """Quantize and dequantize, perhaps again with the same numbers or with others, perhaps as an output too."""
        dtype, axis = self.pick(*STEPS), {}
        numbers = self.numbers(dtype)
        if self.chance(0.1):
            numbers, axis = self.numbers(dtype, columns), {"axis": 1}
        for again in range(self.pick(1, 1, 1, 2, 3)):
            if again and not axis and self.chance(0.5):
                numbers = self.numbers(dtype)
            bytes_ = self.add("QuantizeLinear", x, *numbers, **axis)
            x = self.add("DequantizeLinear", bytes_, *numbers, **axis)
            self.outputs += [t for t in (bytes_, x) if self.chance(0.1)]
        return x

    def product(self, x: str, k: int, n: int = 0) -> tuple[str, int]:
        """Add a product with constants, perhaps with a bias and quantized."""
        n = n or self.pick(1, 2, 3, 8, 17, 33, 48, 50)
        y = self.add("MatMul", x, self.weights(k, n))
        if self.chance(0.4):
            bias = self.constant(np.asarray(self.rng.integers(-999, 999, n), np.int32))
            y = self.add("Add", y, self.add("DequantizeLinear", bias, self.constant(np.float32(2**-9))))
        return (self.steps(y, n) if self.chance(0.6) else y), n

    def weights(self, k: int, n: int) -> str:
        """Add constants [k, n]: unchanged, transposed, a part of others, or quantized by the model."""
        how, dtype = self.pick("plain", "plain", "turned", "part", "floats"), self.pick(*BYTES)
        shape = {"turned": (n, k), "part": (k + 3, n + 2)}.get(how, (k, n))
        axis = self.pick(None, None, None, 0, 1, 1)
        numbers = self.numbers(dtype, *(() if axis is None else (shape[axis],)))
        more = {} if axis is None else {"axis": axis - self.pick(0, 2)}
        if how == "floats":
            floats = self.constant(np.asarray(self.rng.integers(-40, 40, shape) / 64, np.float32))
            bytes_ = self.add("QuantizeLinear", floats, *numbers, **more)
        else:
            bytes_ = self.constant(random_bytes(self.rng, dtype, *shape))
        w = self.add("DequantizeLinear", bytes_, *numbers, **more)
        if how == "turned":
            return self.add("Transpose", w, perm=[1, 0])
        first = int(self.rng.integers(4))
        ends = [np.array(e) for e in ([first, 1], [first + k, 1 + n], [0, 1])]
        return self.add("Slice", w, *map(self.constant, ends)) if how == "part" else w


def drawn(seed: int) -> onnx.ModelProto:
    """Draw a model from x [M, columns], of floats that are multiples of 1/64."""
    q = Random(seed)
    columns: int = q.pick(2, 4, 7, 8, 16, 34)
    x, n = q.steps("x", columns), columns
    for _ in range(q.pick(1, 2, 2)):
        x, n = q.layer(x, n)
        if q.chance(0.2):
            q.outputs.append(x)
    outputs = dict.fromkeys([*q.outputs, q.steps(x, n) if q.chance(0.5) else x])
    return quantized_model(q.nodes, {"x": ("float32", ["M", columns])}, list(outputs), **q.constants)


def feeds(m: onnx.ModelProto, rows: int) -> dict[str, Array]:
    columns = m.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    numbers = np.random.default_rng(rows).integers(-256, 256, (rows, columns)) / 64
    return {"x": np.asarray(numbers, np.float32)}


def expected(m: onnx.ModelProto) -> ort.InferenceSession:
    """Open ONNX Runtime with every operator computed unchanged."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])


def equal(got: dict[str, Array], session: ort.InferenceSession, f: dict[str, Array], seed: int) -> None:
    names = [o.name for o in session.get_outputs()]
    for name, want in zip(names, session.run(names, f), strict=True):
        assert got[name].dtype == want.dtype
        np.testing.assert_array_equal(got[name], want, f"{name} of seed {seed} at {f['x'].shape}")


def test_rewritten_graphs_mean_what_models_mean() -> None:
    integers = 0
    for seed in range(40):
        m = drawn(seed)
        graph, session = rewrite_graph(import_model(m)), expected(m)
        integers += any("@sum" in n.output for n in graph.nodes)
        for rows in (0, 1, 5):
            equal(reference.evaluate(graph, feeds(m, rows)), session, feeds(m, rows), seed)
    assert integers >= 10, "products of integers are among them"


@pytest.mark.parametrize("target", targets())
def test_compiled_models_are_exact(target: str) -> None:
    m = drawn(CHEAP_CASE)
    session, program = expected(m), build_program(plan_program(m, target=target), target=target, threads=2)
    for rows in (0, 1, 2, 7, 33):
        equal(program.run(feeds(m, rows)), session, feeds(m, rows), CHEAP_CASE)

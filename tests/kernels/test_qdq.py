"""Models in the QDQ form: integer products, layers that share kernels, long epilogues, hostile numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from polydyn.checked import CheckedProgram
from polydyn.codegen.passes.epilogues import MOST_OPERATIONS
from polydyn.compiler import plan_program
from polydyn.fusion.pipeline import rewrite_graph
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute, Graph
from polydyn.graph.operators.quantization import dequantized
from polydyn.graph.passes.steps import dequantization
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import Array, Op, loads, op, walk
from tests.support.graphs import Sheet
from tests.support.one_node import check_with_onnxruntime
from tests.support.quantized import Qdq, qdq_layers, random_bytes, targets

RNG = np.random.default_rng(5)
SIZES = (0, 1, 2, 7, 33)


def floats(*shape: int) -> Array:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def rewritten(m: onnx.ModelProto) -> Graph:
    return rewrite_graph(import_model(m))


def sums(graph: Graph) -> int:
    """Count integer products of a graph."""
    return sum("@sum" in n.output for n in graph.nodes)


def exactly(m: onnx.ModelProto, *feeds: dict[str, Array], target: str = "cpu") -> HostPlan:
    """Check that the compiled model equals the rewritten graph, bit by bit."""
    plan, graph = plan_program(m, target=target), rewritten(m)
    program = build_program(plan, target=target, threads=2)
    for f in feeds:
        got = program.run(f)
        for name, want in reference.evaluate(graph, f).items():
            np.testing.assert_array_equal(got[name], want, str([a.shape for a in f.values()]))
    return plan


def onnxruntime_of(m: onnx.ModelProto, f: dict[str, Array]) -> Array:
    """Return the output with every operator computed unchanged, in floats."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, f)[0])


def nearly(got: Array, want: Array, step: float, part: float = 0.02) -> None:
    """Compare multiples of a step: a small part of them may be one step apart."""
    apart = np.rint(np.abs(got - want) / step)
    assert got.shape == want.shape and apart.max(initial=0) <= 1
    assert np.mean(apart) <= part if apart.size else True


# -- extremes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "scale", "floats_left"), [
    (np.int8(-5), 0.02, 0), (np.uint8(3), 0.02, 0), (np.uint8(3), 0.03, 1), (np.uint8(3), -0.02, 1),
])  # fmt: skip
def test_an_extreme_that_is_quantized_like_its_input_is_one_of_bytes(zero: Any, scale: float, floats_left: int) -> None:
    m = Qdq()
    pooled = m.add(
        "MaxPool", m.step("x", np.copysign(0.02, scale), zero), kernel_shape=[3, 2], strides=[2, 1], pads=[1] * 4
    )
    model = m.model({"x": ("float32", ["N", 4, "H", "W"])}, m.step(pooled, scale, zero))
    extremes = [n for n in rewritten(model).nodes if isinstance(n, Compute) and n.reduce == "max"]
    assert [n.body.dtype == "float32" for n in extremes] == [bool(floats_left)]
    feeds = [{"x": floats(n, 4, h, w) * 3} for n, h, w in ((1, 1, 1), (2, 7, 5), (0, 3, 3))]
    exactly(model, *feeds)
    if scale > 0:
        nearly(
            reference.evaluate(rewritten(model), feeds[1])[model.graph.output[0].name],
            onnxruntime_of(model, feeds[1]),
            scale,
        )


# -- products ----------------------------------------------------------------------------------------------------------


def test_a_layer_between_quantizations_is_one_integer_product() -> None:
    """Sums of int32 two steps at a time, compared with ONNX Runtime's floats."""
    m, target = qdq_layers([131]), targets()[0]
    graph = rewritten(m)
    assert sums(graph) == 1 and {"int32", "uint8"} <= {graph.tensors[n.output].dtype for n in graph.nodes}
    feeds = [{"x": floats(n, 34)} for n in SIZES]
    plan = exactly(m, *feeds, target=target)
    (product,) = (launch for launch in plan.launches if launch.kind == "contract")
    assert "pd_dot2_add" in next(k.text for k in plan.kernels if k.name == product.candidates[0].kernel)
    program = build_program(plan, target=target, threads=1)
    for f in feeds[1:]:
        nearly(program.run(f)[graph.outputs[0]], onnxruntime_of(m, f), 0.03)


def test_a_convolution_pads_with_the_zero_point() -> None:
    """[N, C, H, W] with a scale for each output channel, a bias with the scale of the sums; the padding is bytes."""
    q = Qdq()
    x = q.step("x", 0.04, np.uint8(7))
    w = q.weight(random_bytes(q.rng, "int8", 10, 4, 3, 3), q.rng.random(10) / 900 + 1e-3, axis=0)
    bias = q.add("DequantizeLinear", q.constant(np.arange(-5, 5, dtype=np.int32) * 900), q.constant(np.float32(4e-5)))
    y = q.step(q.add("Relu", q.add("Conv", x, w, bias, pads=[1, 0, 1, 2])), 0.05)
    m = q.model({"x": ("float32", ["N", 4, "H", "W"])}, y)
    graph = rewritten(m)
    assert sums(graph) == 1
    assert [graph.tensors[n.output].dtype for n in graph.nodes if "@bytes" in n.output] == ["uint8"]
    plan = plan_program(m)
    assert [launch.kind for launch in plan.launches][-1] == "contract" and len(plan.launches) <= 2
    program = build_program(plan, threads=2)
    for n, h, width in ((1, 9, 7), (2, 3, 20), (0, 6, 6), (1, 33, 17), (1, 1, 1)):
        f = {"x": floats(n, 4, h, width)}
        nearly(program.run(f)[y], onnxruntime_of(m, f), 0.05)
    nearly(CheckedProgram(plan).run(f)[y], program.run(f)[y], 0.05, 0)


def product_of(
    steps: int = 34, scale: Any = 0.01, by: Any = 0.01, zero: Any = None, less: Any = None, axis: int = 1
) -> onnx.ModelProto:
    """Build x [M, steps] quantized with ``scale``, ``zero``; times bytes [steps, 3] dequantized with ``by``, ``less``.
    """
    q = Qdq()
    x = q.step("x", scale, zero)
    y = q.add("MatMul", x, q.weight(random_bytes(q.rng, "int8", steps, 3), by, less, axis))
    return q.model({"x": ("float32", ["M", steps])}, y)


@pytest.mark.parametrize(
    ("product", "integers"),
    [
        (product_of(), True),
        (product_of(by=np.array([0.01, 0.02, 0.03])), True),
        (product_of(by=[0.01], zero=np.array([3], np.uint8)), True),
        (product_of(by=[0.1, 2, -3], zero=np.int8(-3)), True),
        (product_of(by=np.ones(3), zero=np.uint8(200), less=np.array([-128, 0, 127], np.int8)), True),
        (product_of(zero=np.int16(3)), False),  # not bytes
        (product_of(35), True),  # an odd number of steps: the last word is not full
        (product_of(65792), True),
        (product_of(65794), False),  # 65794 * 255 * 128 > 2^31
        (product_of(65794, zero=np.int8(1)), True),  # 65794 * 129 * 128 < 2^31
        (product_of(65794, zero=np.int8(-128)), False),
        (product_of(33024, less=np.int8(-128)), True),  # 33024 * 255 * 255 < 2^31
        (product_of(33028, less=np.int8(-128)), False),
        (product_of(33028, less=np.int8(127)), False),
        (product_of(scale=1e-20, by=1e-20), False),  # their product is not a normal number
        (product_of(scale=1e10, by=1e-40), False),  # one of them is not normal
        (product_of(scale=1e-40, by=1e10), False),
        (product_of(by=np.full(34, 0.01), axis=0), False),  # a scale for each step of the sum
        (product_of(scale=np.full(34, 0.01), zero=np.zeros(34, np.uint8)), False),
    ],
)  # fmt: skip
def test_when_a_product_is_one_of_integers(product: onnx.ModelProto, integers: bool) -> None:
    graph = rewritten(product)
    assert sums(graph) == integers
    before = import_model(product)
    f = {"x": floats(3, before.tensors["x"].shape[1].constant or 0)}
    (got,), (want,) = (list(reference.evaluate(g, f).values()) for g in (graph, before))
    np.testing.assert_allclose(got, want, 2e-6, 2e-6 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    "scales",
    [*({"scale": x} for x in (0.0, np.nan, -np.inf, 1e-40, -0.02)), {"by": [0, np.nan, 1]}, {"by": [np.inf, 1e-40, 2]}],
)  # fmt: skip
def test_scales_that_are_no_ordinary_numbers(scales: dict[str, Any]) -> None:
    """They behave as in floats: no sum is split for them, nothing is omitted, nothing is a literal."""
    m = product_of(**scales, zero=np.uint8(9))
    assert sums(rewritten(m)) == (scales == {"scale": -0.02})
    f = {"x": np.concatenate([floats(5, 34), np.zeros((1, 34), np.float32)])}
    with np.errstate(all="ignore"):
        (want,) = reference.evaluate(import_model(m), f).values()
        (got,) = build_program(plan_program(m), threads=1).run(f).values()
    np.testing.assert_allclose(got, want, 1e-5, 1e-5 * float(np.nanmax(np.abs(want[np.isfinite(want)]), initial=0)))


def test_the_zero_point_of_the_activations_comes_out_of_the_sum() -> None:
    """Bytes are multiplied unchanged, as tensor cores do, unless weights have a zero point too."""
    for less, read in ((None, 2), (np.int8(3), 4)):
        graph = rewritten(product_of(zero=np.uint8(200), less=less))
        (total,) = (n for n in graph.nodes if "@sum" in n.output)
        assert len(loads(total.body)) == read and ("t3@zero" in graph.constants) == (less is None)  # type: ignore[union-attr]
    assert len(plan_program(product_of(64, zero=np.uint8(200)), target="cuda:sm_80").launches) == 2


@pytest.mark.parametrize(
    ("shape", "ends"),
    [((40, 3), (0, 34)), ((40, 3), (6, 40)), ((2, 34, 3), (0, 1)), ((2, 34, 3), (1, 2)), ((34, 3), (0, 34))],
)
def test_a_product_with_a_part_of_the_weights(shape: tuple[int, ...], ends: tuple[int, int]) -> None:
    """The zero point of the activations is multiplied by the sum of that part, not of the whole constant."""
    q = Qdq()
    x = q.step("x", 0.05, np.uint8(77))
    first, last = (q.constant([e]) for e in ends)
    w = q.add("Slice", q.weight(random_bytes(q.rng, "int8", *shape), 0.01), first, last, q.constant([0]))
    m = q.model({"x": ("float32", ["M", 34])}, q.add("MatMul", x, w))
    graph, f = rewritten(m), {"x": floats(5, 34)}
    assert sums(graph) == 1
    (got,) = reference.evaluate(graph, f).values()
    want = onnxruntime_of(m, f)
    np.testing.assert_allclose(got, want, 2e-6, 2e-6 * float(np.abs(want).max()))


def test_steps_that_the_weights_are_not_summed_along() -> None:
    """The zero point of the activations is added to every weight element once per such step."""
    s = Sheet("uint8", x=("M", 4, 3))
    for name, array in {"s": np.float32(0.5), "z": np.uint8(9)}.items():
        s.constant(name, np.asarray(array))
    s.constant("w", random_bytes(np.random.default_rng(0), "int8", 4, 5))
    s.let("a", ("M", 4, 3), dequantized(s.at("x", "d0", "d1", "d2"), s.at("s"), s.at("z")))
    s.let("b", (4, 5), dequantized(s.at("w", "d0", "d1"), s.at("s"), None))
    s.let("y", ("M", 5), op("mul", s.at("a", "d0", "r0", "r1"), s.at("b", "r0", "d1")), (4, 3), "sum")
    graph, f = s.graph("y"), {"x": random_bytes(np.random.default_rng(1), "uint8", 3, 4, 3)}
    whole = rewrite_graph(graph)
    assert sums(whole) == 1 and any(n.endswith("@zero") for n in whole.constants)
    np.testing.assert_array_equal(reference.evaluate(whole, f)["y"], reference.evaluate(graph, f)["y"])


@pytest.mark.parametrize(("value", "integers"), [(0.0, 2), (1.0, 0), (-0.0, 0)])
def test_products_of_one_padding_share_it(value: float, integers: int) -> None:
    """It may be on several sides, with one condition for all of them. It pads with zeros."""
    q = Qdq()
    ends = q.constant(np.array([1, 1, 0, 1]))
    padded = q.add("Pad", q.step("x", 0.5, np.uint8(7)), ends, q.constant(np.float32(value)))
    x, y = (q.add("MatMul", padded, q.weight(random_bytes(q.rng, "int8", 36, 3), 0.25)) for _ in range(2))
    m, f = q.model({"x": ("float32", ["M", 34])}, q.add("Add", x, y)), {"x": floats(5, 34)}
    graph = rewritten(m)
    made = [n.body for n in graph.nodes if isinstance(n, Compute) and "@bytes" in n.output]
    assert sums(graph) == integers and len(made) == bool(integers)
    assert all(sum(isinstance(v, Op) and v.name == "where" for v in walk(body)) == 1 for body in made)
    np.testing.assert_array_equal(*reference.evaluate(graph, f).values(), onnxruntime_of(m, f))


@pytest.mark.parametrize("outputs", [[], ["t2"]])
def test_weights_that_the_model_quantizes_itself(outputs: list[str]) -> None:
    """Float weights with a separate QuantizeLinear are bytes like any other, unless these are an output."""
    q = Qdq()
    x, w = q.step("x", 0.05, np.uint8(77)), q.constant(floats(34, 3))
    y = q.add("MatMul", x, q.step(w, np.array([0.01, 0.02, 0.03]), np.zeros(3, np.int8), axis=1))
    m, f = q.model({"x": ("float32", ["M", 34])}, y), {"x": floats(5, 34)}
    m.graph.output.extend(onnx.ValueInfoProto(name=t) for t in outputs)
    graph, want = rewritten(m), onnxruntime_of(m, f)
    assert sums(graph) == (not outputs)
    assert outputs or "int8" in {str(a.dtype) for a in graph.constants.values()}
    np.testing.assert_allclose(reference.evaluate(graph, f)[y], want, 2e-6, 2e-6 * float(np.abs(want).max()))


def test_a_product_without_columns() -> None:
    q = Qdq()
    y = q.add("MatMul", q.step("x", 0.5), q.weight(random_bytes(q.rng, "int8", 34, 0), 0.25))
    m = q.model({"x": ("float32", ["M", 34])}, y)
    assert sums(rewritten(m)) == 0
    assert reference.evaluate(rewritten(m), {"x": floats(5, 34)})[y].shape == (5, 0)


def test_a_product_whose_scale_is_an_input_stays_in_floats() -> None:
    q = Qdq()
    x = q.add("DequantizeLinear", q.add("QuantizeLinear", "x", "s"), "s")
    y = q.add("MatMul", x, q.weight(random_bytes(q.rng, "int8", 34, 3), 0.01))
    m = q.model({"x": ("float32", ["M", 34]), "s": ("float32", [])}, y)
    assert sums(rewritten(m)) == 0
    check_with_onnxruntime(m, {"x": floats(3, 34), "s": np.array(0.1, np.float32)})


# -- quantizing again --------------------------------------------------------------------------------------------------


def test_what_is_dequantized_moved_and_quantized_alike_is_moved() -> None:
    """The bytes are transposed, in one kernel; another scale or zero point prevents this."""
    for scale, zero, same in ((0.1, 3, True), (0.2, 3, False), (0.1, 4, False)):
        q = Qdq()
        numbers = q.constant(np.float32(0.1)), q.constant(np.uint8(3))
        turned = q.add("Transpose", q.add("DequantizeLinear", "x", *numbers), perm=[1, 0])
        turned = q.add("Reshape", turned, q.constant(np.array([-1])))
        y = q.add("QuantizeLinear", turned, q.constant(np.float32(scale)), q.constant(np.uint8(zero)))
        m = q.model({"x": ("uint8", ["A", "B"])}, y)
        assert all(n.is_view for n in rewritten(m).nodes if not isinstance(n, str)) == same  # type: ignore[union-attr]
        f = {"x": np.arange(256, dtype=np.uint8).reshape(8, 32)}
        exactly(m, f, {"x": f["x"][:0]}, {"x": f["x"][:1, :1]})
        np.testing.assert_array_equal(build_program(plan_program(m)).run(f)[y], onnxruntime_of(m, f))


def test_what_is_dequantized_twice_alike_is_dequantized_once() -> None:
    """The constants may differ if their numbers are equal; the whole tensor must be dequantized with equal parameters.
    """
    q = Qdq()
    parts = {"part": q.add("Slice", "x", *(q.constant(np.array([e])) for e in (0, 5, 0))), "whole": "x"}
    parts["turned"] = q.add("Transpose", "x", perm=[1, 0])
    ways = [("part", 0.5, 3), ("turned", 0.5, 3), ("whole", 0.5, 3), ("turned", 0.5, 3), ("part", 0.5, 3)]
    ways += [("whole", 0.25, 3), ("whole", 0.5, 4)]
    for part, scale, zero in ways:
        y = q.add("DequantizeLinear", parts[part], q.constant(np.float32(scale)), q.constant(np.uint8(zero)))
    m = q.model({"x": ("uint8", ["A", "A"])}, y)
    m.graph.output.extend(onnx.ValueInfoProto(name=f"t{n}") for n in range(2, 8))
    graph, f = rewritten(m), {"x": np.arange(256, dtype=np.uint8).reshape(16, 16)}
    assert [n.output for n in graph.nodes if dequantization(n)] == ["t2", "t3", "t4", "t7", "t8"]
    got, want = reference.evaluate(graph, f), reference.evaluate(import_model(m), f)
    assert all(np.array_equal(got[t], want[t]) for t in graph.outputs)


@pytest.mark.parametrize("scale", [1e-40, 0.0, np.nan, np.inf, 3e36])
def test_quantizing_again_with_no_ordinary_scale_is_not_left_out(scale: float) -> None:
    q = Qdq()
    y = q.step(q.step("x", scale, np.int8(5)), scale, np.int8(5))
    m = q.model({"x": ("float32", ["N"])}, y)
    graph = rewritten(m)
    assert len(graph.nodes) == 4
    with np.errstate(all="ignore"):
        exactly(m, {"x": np.array([0, 1, -1, 1e-38, 3e38, np.nan, np.inf], np.float32)})


# -- shared kernels ----------------------------------------------------------------------------------------------------


def test_layers_share_a_kernel() -> None:
    """Scales and zero points are operands: with twice the layers there are no more kernels, and no more text."""
    few, many = (qdq_layers([3 + 20 * i for i in range(n)]) for n in (3, 6))
    plan = plan_program(many)
    assert {k.text for k in plan.kernels} == {k.text for k in plan_program(few).kernels}
    products = [launch.candidates[0].kernel for launch in plan.launches if launch.kind == "contract"]
    assert len(products) == 6 and len(set(products)) <= 3, "the first and the last one may differ"


def test_a_zero_point_of_0_is_left_out_and_not_shared() -> None:
    """A kernel without a zero point serves no layer that has one, of any value."""
    zeros = [3, 0, 0, 200, 200, 0, 0, 0]
    plan = exactly(qdq_layers(zeros, rows=7), {"x": floats(7, 34)})
    products = [launch for launch in plan.launches if launch.kind == "contract"]
    shared: dict[str, set[tuple[bool, bool]]] = {}
    for launch, zero, then in zip(products[1:-1], zeros[1:-1], zeros[2:], strict=True):
        shared.setdefault(launch.candidates[0].kernel, set()).add((zero != 0, then != 0))
    assert all(len(kinds) == 1 for kinds in shared.values()) and len(shared) == 4


def test_the_same_model_gives_the_same_program() -> None:
    first, second = (plan_program(qdq_layers([3, 5], per_column=False)) for _ in range(2))
    assert [k.text for k in first.kernels] == [k.text for k in second.kernels] and first.launches == second.launches
    assert list(first.constants) == list(second.constants)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first.constants.values(), second.constants.values(),
                                                          strict=True))  # fmt: skip


# -- attention and long epilogues --------------------------------------------------------------------------------------


def attention(layers: int) -> onnx.ModelProto:
    """Build consecutive attentions, with every tensor between their operators quantized: scores three times."""
    q, x = Qdq(), "x"
    for i in range(layers):
        s = 1 + i / 10
        x = q.step(x, 0.03 * s, np.uint8(120 + i))
        kt = q.add("Transpose", q.step(f"k{i}", 0.03 * s, np.uint8(125)), perm=[0, 2, 1])
        scores = q.step(q.add("MatMul", x, kt), 0.15 * s, np.uint8(128 + i))
        scores = q.step(q.add("Mul", scores, q.constant(np.float32(0.25))), 0.04 * s, np.uint8(127))
        scores = q.step(q.add("Add", scores, "mask"), 0.05 * s, np.uint8(150))
        p = q.step(q.add("Softmax", scores, axis=-1), 1 / 255 * s)
        x = q.step(q.add("MatMul", p, q.step(f"v{i}", 0.03 * s, np.uint8(130))), 0.02 * s, np.uint8(126))
    tensors = [f"{t}{i}" for i in range(layers) for t in "kv"]
    inputs = {"x": ("float32", ["B", "Q", 16]), "mask": ("float32", ["B", "Q", "K"])}
    y = q.step(x, 0.03, np.uint8(120))
    return q.model({**inputs, **{t: ("float32", ["B", "K", 16]) for t in tensors}}, y)


def feeds(m: onnx.ModelProto, b: int, rows: int, keys: int) -> dict[str, Array]:
    sizes = {"B": b, "Q": rows, "K": keys}
    shapes = {i.name: [d.dim_value or sizes[d.dim_param] for d in i.type.tensor_type.shape.dim] for i in m.graph.input}
    return {n: np.asarray(RNG.standard_normal(s), np.float32) for n, s in shapes.items()}


def test_attentions_share_a_kernel_of_moderate_size() -> None:
    """Epilogues of dozens of operations are written once for a tile, not for every register of every variant."""
    plan = plan_program(attention(2), target="cpu:avx512")
    names = [launch.candidates[0].kernel for launch in plan.launches if launch.kind == "attention"]
    assert len(names) == 2 and len(set(names)) == 1
    (text,) = (k.text for k in plan.kernels if k.name == names[0])
    assert len(text) < 300_000, "a million and more, were they written for every register"


@pytest.mark.slow
@pytest.mark.parametrize("target", targets())
def test_attentions_with_long_epilogues(target: str) -> None:
    m = attention(2)
    program, graph = build_program(plan_program(m, target=target), target=target, threads=2), rewritten(m)
    (y,) = graph.outputs
    for sizes in ((1, 1, 1), (2, 7, 7), (1, 33, 50), (0, 4, 4), (2, 0, 5), (1, 5, 17), (1, 8, 16)):
        f = feeds(m, *sizes)
        nearly(program.run(f)[y], reference.evaluate(graph, f)[y], 0.03, 0.05)


@pytest.mark.parametrize(("columns", "target"), [(3, targets()[0]), pytest.param(50, targets()[-1], id="widest")])
def test_long_epilogues(columns: int, target: str) -> None:
    """A value that is read twice is one register; columns that fill tiles and others; two outputs of one product.

    A NaN sum is quantized to 0, an infinite one to the end of the range.
    """
    q = Qdq()
    x = q.add("MatMul", "x", q.constant(q.rng.standard_normal((20, columns)).astype(np.float32)))
    first = q.step(x, 0.1, np.uint8(100))
    y = q.step(q.add("Mul", first, q.add("Sigmoid", q.step(first, 0.07, np.int8(-3)))), 0.09, np.int8(3))
    q.nodes.append(onnx.helper.make_node("Identity", [first], ["first"], name="copy"))
    m = q.model({"x": ("float32", ["M", 20])}, y)
    m.graph.output.append(onnx.ValueInfoProto(name="first"))
    plan = plan_program(m, target=target)
    (contract,) = plan.launches[:1]
    notes = [n for k in plan.kernels if k.name == contract.candidates[0].kernel for n in k.notes]
    assert any("epilogue apart" in n for n in notes), MOST_OPERATIONS
    program, graph, checked = build_program(plan, target=target, threads=2), rewritten(m), None
    for n in (*SIZES, 8, 9):
        f = {"x": floats(n, 20)}
        f["x"][1:3, 0] = (np.nan, np.inf)[: max(0, n - 1)]
        got, want = program.run(f), reference.evaluate(graph, f)
        nearly(got[y], want[y], 0.09)
        nearly(got["first"], want["first"], 0.1)
        checked = f
    if columns == 3:
        for name, array in CheckedProgram(plan).run(checked).items():
            np.testing.assert_array_equal(array, program.run(checked)[name])


def test_a_long_epilogue_behind_blocks_of_the_reduction() -> None:
    """It runs after the last block only; its output carries the sums of earlier ones."""
    q = Qdq()
    w = q.constant(q.rng.standard_normal((1100, 19)).astype(np.float32))
    x = q.step(q.add("MatMul", "x", w), 0.9, np.uint8(100))
    x = q.step(q.add("Mul", x, q.constant(np.float32(0.3))), 0.2, np.int8(3))
    y = q.add("Sigmoid", q.step(x, 0.3, np.int8(-2)))
    m = q.model({"x": ("float32", ["M", 1100])}, y)
    plan, graph = plan_program(m), rewritten(m)
    program = build_program(plan, threads=2)
    assert any("reduction block 768" in n and "epilogue apart" in n for k in plan.kernels for n in k.notes)
    for rows in (0, 1, 3, 9):
        f = {"x": floats(rows, 1100)}
        got, want = program.run(f)[y], reference.evaluate(graph, f)[y]
        np.testing.assert_allclose(got, want, 0, 0.06)
        assert not got.size or np.mean(np.abs(got - want) > 1e-5) < 0.02


def test_a_residual_is_kept_in_bytes() -> None:
    """If one product reads a tensor in bytes and a sum reads it in floats, only the bytes are in memory."""
    q = Qdq()

    def layer(x: str) -> str:
        return q.step(q.add("MatMul", x, q.weight(random_bytes(q.rng, "int8", 16, 16), np.float32(0.01))), 0.04)

    first = layer(q.step("x", 0.02))
    m = q.model({"x": ("float32", ["M", 16])}, q.step(q.add("Relu", q.add("Add", layer(first), first)), 0.05))
    plan = plan_program(m)
    made = {b for launch in plan.launches for b in launch.writes or ()} - set(plan.outputs)
    assert made and {plan.buffers[b].dtype for b in made} == {"uint8"}
    nearly(build_program(plan, threads=1).run(f := {"x": floats(7, 16)})[plan.outputs[0]], onnxruntime_of(m, f), 0.05)

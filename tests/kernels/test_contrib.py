"""Operators of com.microsoft: compiled at several sizes and compared with ONNX Runtime, which defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import polydyn
from polydyn.compiler import plan_program
from polydyn.errors import UnsupportedError
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from tests.support.contrib import RNG, agrees, floats, model_of
from tests.support.marks import slow

ROWS = [{"x": floats(b, n, 8)} for b, n in ((1, 1), (2, 7), (3, 33), (0, 5))]


@pytest.mark.parametrize(("op", "attributes"), [
    ("Gelu", {}), ("QuickGelu", {}), ("QuickGelu", {"alpha": 1.0}), ("FastGelu", {}),
])  # fmt: skip
def test_activations(op: str, attributes: dict[str, Any]) -> None:
    agrees(model_of(op, {"x": ("float32", ("B", "L", 8))}, **attributes), *ROWS)


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu"])
def test_activations_with_a_bias(op: str) -> None:
    agrees(model_of(op, {"x": ("float32", ("B", "L", 8)), "b": floats(8)}), *ROWS)


@pytest.mark.parametrize(("trans_a", "trans_b"), [slow(0, 0), slow(1, 0), (0, 1), slow(1, 1)])
def test_fused_products(trans_a: int, trans_b: int) -> None:
    a, b = ("B", "K", "M") if trans_a else ("B", "M", "K"), ("N", "K") if trans_b else ("K", "N")
    given = {"a": ("float32", a), "b": ("float32", b)}
    model = model_of("FusedMatMul", given, transA=trans_a, transB=trans_b, alpha=0.5)
    for m, k, n in ((1, 1, 1), (7, 31, 2), (33, 2, 7)):
        feeds = {"a": floats(*(2, k, m) if trans_a else (2, m, k)), "b": floats(*(n, k) if trans_b else (k, n))}
        agrees(model, feeds)
    with pytest.raises(UnsupportedError, match="transBatchA"):
        import_model(model_of("FusedMatMul", given, transBatchA=1))


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_skipped_layer_norms(beta: bool, bias: bool) -> None:
    given: dict[str, Any] = {"x": ("float32", ("B", "L", 8)), "s": ("float32", ("B", "L", 8)), "g": floats(8)}
    feeds = [{**f, "s": floats(*f["x"].shape)} for f in ROWS]
    names = ("y", "", "", "total")
    simple = {**given, "b": floats(8)} if bias else given
    agrees(model_of("SkipSimplifiedLayerNormalization", simple, names, epsilon=1e-6), *feeds)
    full = {**given, "beta": floats(8) if beta else None, **({"b": floats(8)} if bias else {})}
    agrees(model_of("SkipLayerNormalization", full, names, epsilon=1e-6), *feeds)


def test_simplified_layer_norm_with_its_statistics() -> None:
    given = {"x": ("float32", ("B", "L", 8)), "g": floats(8)}
    agrees(model_of("SimplifiedLayerNormalization", given, ("y", "inverse"), domain=""), *ROWS[:3])


@pytest.mark.parametrize("segments", [True, False])
def test_embeddings(segments: bool) -> None:
    given: dict[str, Any] = {
        "ids": ("int32", ("B", "L")), "segments": ("int32", ("B", "L")) if segments else None,
        "words": floats(30, 8), "places": floats(40, 8), "types": floats(2, 8) if segments else None,
        "gamma": floats(8), "beta": floats(8), "mask": ("int32", ("B", "L")),
    }  # fmt: skip
    model = model_of("EmbedLayerNormalization", given, ("y", "sums"), epsilon=1e-5)
    calls = []
    for b, n in ((1, 1), (2, 7), (3, 33)):
        lengths = np.minimum(np.arange(1, b + 1) * 3, n)
        feeds = {"ids": RNG.integers(0, 30, (b, n)), "mask": np.arange(n) < lengths[:, None]}
        feeds |= {"segments": RNG.integers(0, 2, (b, n))} if segments else {}
        calls.append({k: v.astype(np.int32) for k, v in feeds.items()})
    agrees(model, *calls)


@pytest.mark.parametrize("metric", [{}, {"metric": "euclidean"}])
def test_distances(metric: dict[str, Any]) -> None:
    model = model_of("CDist", {"a": ("float32", ("M", "K")), "b": ("float32", ("N", "K"))}, **metric)
    agrees(model, *({"a": floats(m, k), "b": floats(n, k)} for m, n, k in ((1, 1, 1), (2, 7, 5), (33, 2, 3))))


@pytest.mark.parametrize(
    ("activation", "parameters"), [slow("Relu", []), slow("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.5])]
)
def test_fused_convolutions(activation: str, parameters: list[float]) -> None:
    given = {"x": ("float32", ("N", 3, "H", "W")), "w": floats(4, 3, 3, 3), "b": floats(4)}
    attributes: dict[str, Any] = {"activation": activation, "pads": [1, 1, 1, 1]}
    attributes |= {"activation_params": parameters} if parameters else {}
    model = model_of("FusedConv", given, **attributes)
    agrees(model, *({"x": floats(n, 3, h, w)} for n, h, w in ((1, 1, 1), (2, 7, 5))), tolerance=1e-4)
    with pytest.raises(UnsupportedError, match="Softplus"):
        import_model(model_of("FusedConv", given, activation="Softplus"))


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", ["", slow("lengths"), slow("keys"), "pairs"])
@pytest.mark.parametrize("causal", [0, 1])
def test_projected_attention(masked: str, causal: int) -> None:
    dims = {"": None, "lengths": ("int32", ("B",)), "keys": ("int32", ("B", "T")), "pairs": ("int32", ("B", "L", "T"))}
    given: dict[str, Any] = {"x": ("float32", ("B", "L", 6)), "w": floats(6, 24), "b": floats(24), "m": dims[masked]}
    model = model_of("Attention", given, num_heads=2, unidirectional=causal)
    for b, n in ((1, 1), (2, 7), (3, 33)):
        feeds = {"x": floats(b, n, 6)}
        shapes = {"lengths": (b,), "keys": (b, n), "pairs": (b, n, n)}
        if masked == "lengths":
            feeds["m"] = RNG.integers(1, n + 1, b).astype(np.int32)
        elif masked:
            feeds["m"] = RNG.integers(0, 2, shapes[masked]).astype(np.int32)
        agrees(model, feeds, kernels=(masked, causal) in {("", 0), ("lengths", 1), ("pairs", 1)})


def test_projected_attention_with_a_cache() -> None:
    given = {
        "x": ("float32", ("B", "L", 6)), "w": floats(6, 24), "b": floats(24), "m": None,
        "past": ("float32", (2, "B", 2, "P", 4)),
    }  # fmt: skip
    model = model_of("Attention", given, ("y", "present"), num_heads=2, unidirectional=1)
    agrees(model, *({"x": floats(b, n, 6), "past": floats(2, b, 2, p, 4)} for b, n, p in ((1, 1, 5), (2, 3, 7))))


@pytest.mark.parametrize("cached", [slow(True), False])
@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention(cached: bool, causal: int) -> None:
    row = ("float32", ("B", "L", 8))
    cache = ("float32", ("B", 2, "P", 4)) if cached else None
    given = {
        "q": row, "k": row, "v": row, "b": floats(24), "m": None, "a": ("float32", (1, 2, "L", "T")),
        "pk": cache, "pv": cache,
    }  # fmt: skip
    outputs = ("y", "prk", "prv") if cached else ("y",)
    model = model_of("MultiHeadAttention", given, outputs, num_heads=2, unidirectional=causal)
    for b, n, p in ((1, 1, 5), (2, 7, 2), (1, 33, 1)):
        feeds = {k: floats(b, n, 8) for k in "qkv"} | {"a": floats(1, 2, n, n + p * cached)}
        feeds |= {k: floats(b, 2, p, 4) for k in ("pk", "pv")} if cached else {}
        agrees(model, feeds, kernels=cached == bool(causal))


def test_packed_multi_head_attention() -> None:
    """ONNX Runtime supports packed queries on GPUs only; they are equivalent to three inputs."""
    packed = import_model(model_of("MultiHeadAttention", {"q": ("float32", ("B", "L", 2, 3, 4))}, num_heads=2))
    row = ("float32", ("B", "L", 8))
    apart = import_model(model_of("MultiHeadAttention", {"q": row, "k": row, "v": row}, num_heads=2))
    for b, n in ((1, 1), (2, 7)):
        x = floats(b, n, 2, 3, 4)
        parts = {k: x[:, :, :, i].reshape(b, n, 8) for i, k in enumerate("qkv")}
        np.testing.assert_array_equal(reference.evaluate(packed, {"q": x})["y"], reference.evaluate(apart, parts)["y"])


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("offset", [True, False])
def test_rotary_embeddings(interleaved: int, offset: bool) -> None:
    given = {
        "x": ("float32", ("B", "L", 16)), "at": ("int64", (1,) if offset else ("B", "L")),
        "cos": floats(50, 4), "sin": floats(50, 4),
    }  # fmt: skip
    model = model_of("RotaryEmbedding", given, interleaved=interleaved)
    for b, n in ((1, 1), (2, 7), (3, 31)):
        agrees(model, {"x": floats(b, n, 16), "at": np.array([5]) if offset else RNG.integers(0, 50, (b, n))})


def group_query(rotary: int, window: int, packed: bool, softcap: float = 0.0) -> onnx.ModelProto:
    """Build a GroupQueryAttention of 4 heads over 2 as exporters write it, with sizes from an attention mask's shape.
    """
    width = 4 * 16 + 2 * 2 * 16 if packed else 4 * 16
    cache = ("float32", ["B", 2, "P", 16])
    nodes = [
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["total64"]),
        helper.make_node("Cast", ["total64"], ["total"], to=6),
        helper.make_node("ReduceSum", ["mask", "axis"], ["sums"], keepdims=0),
        helper.make_node("Sub", ["sums", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["lengths"], to=6),
        helper.make_node(
            "GroupQueryAttention",
            ["q", *(["", ""] if packed else ["k", "v"]), "pk", "pv", "lengths", "total", "cos", "sin"],
            ["y", "prk", "prv"], domain="com.microsoft", num_heads=4, kv_num_heads=2, do_rotary=rotary,
            local_window_size=window, softcap=softcap,
        ),
    ]  # fmt: skip
    row = {"q": ("float32", ["B", "L", width])}
    row |= {} if packed else {k: ("float32", ["B", "L", 32]) for k in "kv"}
    inputs = row | {"pk": cache, "pv": cache, "mask": ("int64", ["B", "T"])}
    angles = RNG.uniform(0, 6, (64, 8))
    graph = helper.make_graph(
        nodes, "one",
        [helper.make_tensor_value_info(n, 1 if t == "float32" else 7, d) for n, (t, d) in inputs.items()],
        [helper.make_empty_tensor_value_info(o) for o in ("y", "prk", "prv")],
        [numpy_helper.from_array(x, n) for n, x in {
            "one": np.array(1), "axis": np.array([1]), "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
        }.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("rotary", "window", "softcap"), [(0, -1, 0.0), slow(1, -1, 0.0), slow(1, 3, 0.0), (0, 2, 5.0)]
)
def test_group_query_attention(rotary: int, window: int, softcap: float, packed: bool) -> None:
    model = group_query(rotary, window, packed, softcap)
    for b, n, p in ((1, 7, 0), (2, 5, 0), (1, 1, 6), (2, 1, 31)):
        feeds = {"q": floats(b, n, 128 if packed else 64), "mask": np.ones((b, n + p), np.int64)}
        feeds |= {} if packed else {k: floats(b, n, 32) for k in "kv"}
        feeds |= {k: floats(b, 2, p, 16) for k in ("pk", "pv")}
        agrees(model, feeds, kernels=packed == bool(rotary) and window != -1)


@pytest.mark.parametrize("sink", [False, True])
def test_weights_that_share_with_one_score_more(sink: bool) -> None:
    model = group_query(0, 3, True)
    (node,) = (n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    if sink:
        node.input.extend(["", "", "sink"])
        model.graph.initializer.append(numpy_helper.from_array(floats(4), "sink"))
    else:
        node.attribute.append(helper.make_attribute("smooth_softmax", 1))
    for b, n, p in ((1, 7, 0), (2, 1, 6)):
        feeds = {"q": floats(b, n, 128), "mask": np.ones((b, n + p), np.int64)}
        agrees(model, feeds | {k: floats(b, 2, p, 16) for k in ("pk", "pv")}, kernels=False)


def test_a_total_length_that_is_data() -> None:
    model = group_query(0, -1, True)
    for name in ("total64", "total"):
        for n in [n for n in model.graph.node if name in n.output]:
            model.graph.node.remove(n)
    model.graph.node.remove(model.graph.node[0])
    model.graph.input.append(helper.make_tensor_value_info("total", 6, []))
    program, session = polydyn.compile(model, threads=1), onnxruntime.InferenceSession(model.SerializeToString())
    for b, n, p in ((1, 7, 0), (2, 1, 6)):
        feeds = {"q": floats(b, n, 128), "mask": np.ones((b, n + p), np.int64), "total": np.array(n + p, np.int32)}
        feeds |= {k: floats(b, 2, p, 16) for k in ("pk", "pv")}
        for got, want in zip(program.run(feeds).values(), session.run(None, feeds), strict=True):
            np.testing.assert_allclose(got, want, 2e-5, 2e-5)


def decomposed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Build a model of ``group_query`` without rotation, with its attention expanded by hand to ONNX's own operators.
    """
    g = model.graph
    nodes = [n for n in g.node if n.op_type != "GroupQueryAttention"]
    numbers = {"one": np.array(1), "axis": np.array([1]), "zero": np.array(0), "none": np.array([0] * 6)}
    numbers |= {"first": np.array([0]), "all": np.array([1, 2, 3]), "two": np.array([2])}
    numbers |= {"twice": np.array([1, 1, 2, 1, 1])}
    numbers |= {"four": np.array([0, 0, 4, -1]), "kv": np.array([0, 0, 2, -1]), "join": np.array([0, 0, -1])}
    numbers |= {"unit": np.array([1]), "columns": np.array([2])}
    initializers = [numpy_helper.from_array(x, n) for n, x in numbers.items()]
    initializers += [numpy_helper.from_array(np.array(x, np.float32), n) for n, x in (
        ("scale", 0.25), ("allowed", 0.0), ("masked", -np.inf),
    )]  # fmt: skip

    def add(op: str, inputs: str, output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs.split(), [output], **attributes))
        return output

    add("Shape", "q", "length", start=1, end=2)
    add("Shape", "lengths", "samples", start=0, end=1)
    add("Expand", "first samples", "zeros")
    add("Cast", "lengths", "lengths64", to=7)
    add("Add", "lengths64 unit", "through")
    add("Sub", "through length", "behind")
    add("Unsqueeze", "total64 first", "most")
    add("Equal", "length most", "whole")
    add("Where", "whole zeros behind", "before")
    for x, shape in (("q", "four"), ("k", "kv"), ("v", "kv")):
        add("Reshape", f"{x} {shape}", f"{x}4")
        add("Transpose", f"{x}4", f"{x}h", perm=[0, 2, 1, 3])
    add("Shape", "pk", "held", start=2, end=3)
    add("Max", "held most", "room")
    add("Sub", "room held", "missing")
    add("Concat", "none missing first", "pads", axis=0)
    for x in "kv":
        add("Pad", f"p{x} pads", f"wide{x}")
        add("TensorScatter", f"wide{x} {x}h before", f"pr{x}", axis=2)
        add("Unsqueeze", f"pr{x} two", f"apart{x}")
        add("Expand", f"apart{x} twice", f"each{x}")
        for a in range(4):
            add("Shape", f"pr{x}", f"size{x}{a}", start=a, end=a + 1)
        add("Mul", f"size{x}1 columns", f"heads{x}")
        add("Concat", f"size{x}0 heads{x} size{x}2 size{x}3", f"shape{x}", axis=0)
        add("Reshape", f"each{x} shape{x}", f"all{x}")
    add("Squeeze", "length first", "n")
    add("Squeeze", "sizek2 first", "m")
    add("Range", "zero n one", "rows")
    add("Range", "zero m one", "places")
    add("Unsqueeze", "rows axis", "row")
    add("Unsqueeze", "before all", "offset")
    add("Add", "row offset", "last_place")
    add("LessOrEqual", "places last_place", "near")
    add("Where", "near allowed masked", "bias")
    add("Transpose", "allk", "keys", perm=[0, 1, 3, 2])
    add("MatMul", "qh keys", "products")
    add("Mul", "products scale", "scaled")
    add("Add", "scaled bias", "biased")
    add("Softmax", "biased", "weights", axis=-1)
    add("MatMul", "weights allv", "mixed")
    add("Transpose", "mixed", "turned", perm=[0, 2, 1, 3])
    add("Reshape", "turned join", "y")
    graph = helper.make_graph(nodes, "two", g.input, g.output, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def test_group_query_attention_gives_the_kernels_of_its_decomposition() -> None:
    fused = group_query(0, -1, False)
    apart = decomposed(fused)
    plans = [plan_program(m) for m in (fused, apart)]
    kernels = [sorted(k.name for k in p.kernels) for p in plans]
    assert kernels[0] == kernels[1]
    assert any(name.startswith("attention") for name in kernels[0])
    feeds = {"q": floats(2, 1, 64), "mask": np.ones((2, 7), np.int64)} | {k: floats(2, 1, 32) for k in "kv"}
    feeds |= {k: floats(2, 2, 6, 16) for k in ("pk", "pv")}
    one, two = (reference.evaluate(import_model(m), feeds) for m in (fused, apart))
    for name in ("y", "prk", "prv"):
        np.testing.assert_array_equal(one[name], two[name])

"""Every former bug, as the smallest program that showed it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import polydyn
from polydyn.build.features import machine_features
from polydyn.compiler import plan_graph, plan_program
from polydyn.errors import InputError
from polydyn.schedules.expr import FromIndex, Value, cast, const, op
from polydyn.schedules.index import Index
from polydyn.testing import models
from polydyn.testing.inputs import feeds
from tests.support.graphs import Sheet, matmul, wrong
from tests.support.stored import compiled, load, path_of
from tests.support.tiny import model, node


@pytest.mark.skipif("avx2" not in machine_features(), reason="needs AVX2")
def test_code_for_narrower_vectors_uses_narrower_vectors() -> None:
    """Units included the leaf header before its vector width was defined, so AVX2 kernels stored 16 lanes for 8."""
    program = compiled("bert_tiny", 1, "cpu:avx2")
    widths = [t.count("#define PD_W 8\n") for n, t in program.sources.items() if n == "pd_cpu.h"]
    assert widths == [1] and not any("#define PD_W" in t for n, t in program.sources.items() if n.startswith("kernels"))
    default = compiled("bert_tiny", 1)
    for shape in ({"B": 1, "L": 1}, {"B": 2, "L": 13}):
        inputs = feeds(load("bert_tiny"), shape)
        a, b = (p.run(inputs)["last_hidden_state"] for p in (program, default))
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)


def test_a_mask_shorter_than_past_and_present_is_refused() -> None:
    """Positions gathered from a symbolic axis had no guard: a short mask was read past its rows without an error."""
    program = compiled("gpt2_past_tiny", 1)
    inputs = feeds(load("gpt2_past_tiny"), {"B": 1, "L": 2, "P": 3, "T": 5})
    program.run(inputs)
    inputs["attention_mask"] = inputs["attention_mask"][:, :4]
    with pytest.raises(InputError, match=r"L \+ P is at most T, here 5 and 4"):
        program.run(inputs)


def test_one_group_reduces_rows_of_different_lengths() -> None:
    """Iterators of one name had one extent in a nest: the row of 9 was summed to 8, like its slice."""
    s = Sheet(x=("A", 9))
    s.let("t", ("A", 9), op("exp", s.at("x", "d0", "d1")))
    s.let("total", ("A",), s.at("t", "d0", "r0"), (9,), "sum")
    s.let("part", ("A",), s.at("t", "d0", Index.of("r0") + 1), (8,), "sum")
    s.let("y", ("A",), op("add", s.at("part", "d0"), op("mul", s.at("total", "d0"), FromIndex("float32", Index.of(9)))))
    assert not wrong(s.graph("y", "total"), {"A": 5})


def two_products(bodies: str, m: int | str = "M") -> Sheet:
    """Build q0 and q1, products of one tensor with two constants, and their readers y0, y1."""
    r = np.random.default_rng(0)
    s = Sheet(a=(m, 5))
    for i in range(2):
        s.constant(f"w{i}", r.standard_normal((5, 8)).astype(np.float32))
        if bodies == "row from index":
            row = op("mul", s.at("a", "d0", "r0"), FromIndex("float32", Index.of("d1")))
            s.let(f"q{i}", (m, 8), op("mul", row, s.at(f"w{i}", "r0", "d1")), (5,), "sum")
        else:
            matmul(s, f"q{i}", "a", f"w{i}")
    if bodies == "later reader":
        s.let("r", (m,), op("exp", s.at("a", "d0", 0)))
    for i in range(2):
        q = s.at(f"q{i}", "d0", "d1")
        if bodies == "row bias":
            s.constant(f"b{i}", r.standard_normal(4).astype(np.float32))
            s.let(f"y{i}", (m, 8), op("add", q, s.at(f"b{i}", "d0")))
        elif bodies == "later reader":
            s.let(f"y{i}", (m, 8), op("add", q, s.at("r", "d0")))
        else:
            s.let(f"y{i}", (m, 8), op("mul", q, FromIndex("float32", Index.of("d1"))))
    return s


def test_merged_readers_keep_constants_of_their_rows_apart() -> None:
    assert not wrong(two_products("row bias", 4).graph("y0", "y1"), {})


def test_merged_readers_do_not_use_the_merged_column_as_a_number() -> None:
    assert not wrong(two_products("column from index").graph("y0", "y1"), {"M": 3})
    assert not wrong(two_products("row from index").graph("q0", "q1"), {"M": 3})


def test_merged_readers_stand_after_everything_they_read() -> None:
    assert not wrong(two_products("later reader").graph("y0", "y1"), {"M": 3})


def padded(s: Sheet, name: str, *index: str) -> Value:
    """Return the element before ``index`` along the last axis, 0 before the first."""
    before = Index.of(index[-1]) - 1
    inside = op("ge", FromIndex("int64", before), const(0, "int64"))
    return op("where", inside, s.at(name, *index[:-1], before), const(0.0, "float32"))


def test_guarded_loads_stay_out_of_register_tiles() -> None:
    """In a padded operand, and a padded reader of a product, lanes and shared loads would read outside."""
    s = Sheet(a=("M", "K"), b=("K", "N"), c=("M", "N"))
    s.let("x", ("M", "N"), op("mul", s.at("a", "d0", "r0"), padded(s, "b", "r0", "d1")), ("K",), "sum")
    s.let("y", ("M", "N"), op("mul", padded(s, "a", "d0", "r0"), s.at("b", "r0", "d1")), ("K",), "sum")
    matmul(s, "z", "a", "b")
    s.let("w", ("M", "N"), op("add", s.at("z", "d0", "d1"), padded(s, "c", "d0", "d1")))
    assert not wrong(s.graph("x", "y", "w"), {"M": 9, "N": 35, "K": 7}, {"M": 1, "N": 1, "K": 1})


def test_dtypes_without_vectors_run_as_scalars() -> None:
    """An operand, an epilogue, a sum and an index have dtypes without lanes."""
    s = Sheet(a=("M", "K"), b=("K", "N"))
    s.let("i", ("K", "N"), cast(op("min", op("abs", s.at("b", "d0", "d1")), const(9.0, "float32")), "int8"))
    left, right = s.at("a", "d0", "r0"), cast(s.at("i", "r0", "d1"), "float32")
    s.let("x", ("M", "N"), op("mul", left, right), ("K",), "sum")
    s.let("y", ("M", "N"), cast(op("tanh", s.at("x", "d0", "d1")), "float64"))
    s.let("z", ("M",), s.at("y", "d0", "r0"), ("N",), "max")
    s.let("u", ("K",), s.at("i", "d0", "r0"), ("N",), "sum")
    s.let("v", ("N",), FromIndex("uint8", Index.of("d0") + 250))
    assert not wrong(s.graph("x", "y", "z", "u", "v"), {"M": 5, "N": 35, "K": 19})


def test_kernels_are_compiled_for_the_lanes_they_were_generated_for() -> None:
    """The header preceded the definition of its width: code for 8 lanes ran with vectors of 16."""
    s = Sheet(x=("A",))
    s.let("y", ("A",), op("exp", s.at("x", "d0")))
    assert not wrong(s.graph("y"), {"A": 9}, target="cpu:avx2")
    plan = plan_graph(s.graph("y"), target="cpu:avx2")
    assert plan.headers["pd_cpu.h"].startswith("#ifndef PD_W\n#define PD_W 8\n")


def test_some_rows_of_an_attention_are_computed_in_parts() -> None:
    """The kernel of an attention runs over all rows; a model that slices its rows used to be rejected."""
    made = models.attention(heads=2, depth=8)
    made.graph.node.append(helper.make_node("Slice", ["o_t", "from", "to", "axis"], ["z"]))
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    for name, value in (("from", 0), ("to", 2), ("axis", 1)):
        made.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    whole = polydyn.compile(models.attention(heads=2, depth=8), threads=1)
    some = polydyn.compile(made, threads=1)
    for b, length in ((1, 1), (2, 5)):
        r = np.random.default_rng(length)
        x = {n: r.standard_normal((b, length, 16)).astype(np.float32) for n in "qkv"}
        x["attention_mask"] = np.ones((b, length), np.int64)
        rows = whole.run(x)["y"].reshape(b, length, 2, 8)[:, :2]
        np.testing.assert_allclose(some.run(x)["z"], rows, rtol=1e-4, atol=1e-5)


def test_a_group_computed_again_keeps_the_subscripts_inside_it() -> None:
    """A recomputed value lost how one node of its group read the other: over an axis that is shorter by 1."""
    sheet = Sheet(x=("N", 1, "L"), w=("N", "L"))
    sheet.let("m", ("N", 1, "L"), op("abs", op("neg", sheet.at("x", "d0", "d1", "d2"))))
    sheet.let("u", ("N", "L"), op("mul", sheet.at("m", "d0", 0, "d1"), sheet.at("w", "d0", "d1")))
    sheet.let("s", (), sheet.at("u", "r0", "r1"), ("N", "L"), "sum")
    assert not wrong(sheet.graph("s"), {"N": 1, "L": 1}, {"N": 3, "L": 2}, {"N": 0, "L": 7}, {"N": 7, "L": 33})


def test_a_product_of_one_row_has_a_schedule_on_cuda() -> None:
    """The row operand of such a product runs only the reduction; the schedule expected a read along rows."""
    plan = plan_program(path_of("shufflenet_tiny"), target="cuda:sm_80")
    assert any(k.name.startswith("contract_") for k in plan.kernels)


def test_a_size_that_only_the_guard_of_a_load_uses_is_declared() -> None:
    """A guard's subscripts were ignored: STFT's kernel used a size that it had not read."""
    sheet = Sheet(x=("S",), z=("P",), w=("L",))
    inside = op("lt", FromIndex("int64", Index.of("d0")), FromIndex("int64", Index.of("P")))
    sheet.let("y", ("L",), op("where", inside, sheet.at("x", "d0"), const(0, "float32")))
    assert not wrong(sheet.graph("y"), {"S": 40, "P": 33, "L": 35}, {"S": 3, "P": 0, "L": 2}, {"S": 7, "P": 7, "L": 7})


def test_a_grouped_convolution_over_a_length_that_others_make() -> None:
    """Lengths that are quotients of quotients, between transposes, left an iterator unbound (wav2vec2)."""
    r = np.random.default_rng(0)
    weights = {"u": (8, 1, 5), "w": (8, 2, 6), "b": (8,), "s": (8, 8)}
    nodes = [
        node("Unsqueeze", "x one", "x1"), node("Conv", "x1 u", "c", strides=[3]), node("Gelu", "c", "g"),
        node("Transpose", "g", "t", perm=[0, 2, 1]), node("MatMul", "t s", "h"),
        node("Transpose", "h", "ht", perm=[0, 2, 1]), node("Conv", "ht w b", "d", group=4, pads=[3, 3]),
        node("Slice", "d zero minus two", "e"), node("Gelu", "e", "f"), node("Transpose", "f", "k", perm=[0, 2, 1]),
        node("Add", "h k", "y"),
    ]  # fmt: skip
    constants = {n: r.standard_normal(s, np.float32) for n, s in weights.items()}
    constants |= {n: np.array([v]) for n, v in {"one": 1, "zero": 0, "minus": -1, "two": 2}.items()}
    made = model(nodes, {"x": ("float32", ["B", "L"])}, ["y"], constants, opset=20)
    made.ir_version = 10
    program, other = polydyn.compile(made, threads=1), onnxruntime.InferenceSession(made.SerializeToString())
    for b, length in ((1, 5), (2, 61), (3, 33)):
        x = {"x": r.standard_normal((b, length), np.float32)}
        np.testing.assert_allclose(program.run(x)["y"], other.run(None, x)[0], 1e-4, 1e-4)


def test_a_negative_number_in_a_type_without_sign_wraps() -> None:
    """A bound of -1 that a model casts to uint8 overflowed in constant folding."""
    nodes = [node("Cast", "minus", "low", to=onnx.TensorProto.UINT8), node("Clip", "x low", "y")]
    made = model(nodes, {"x": ("uint8", ["N"])}, ["y"], {"minus": np.array(-1)})
    assert polydyn.compile(made).run({"x": np.arange(3, dtype=np.uint8)})["y"].tolist() == [255, 255, 255]


@pytest.mark.parametrize("shape", [[2, 3], ["N", 3]])
def test_a_running_sum_along_the_axis_of_the_lanes(shape: list[int | str]) -> None:
    """Taps of one element with different guards, and lanes on the right of a comparison, had no kernel."""
    made = model([node("CumSum", "x axis", "y")], {"x": ("float32", shape)}, ["y"], {"axis": np.array(0)})
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(polydyn.compile(made, threads=1).run({"x": x})["y"], x.cumsum(0))


def test_columns_that_no_vector_loads_are_packed_element_by_element() -> None:
    """The reflected pixels of a convolution with few outputs, after a separate kernel, had no vector form."""
    r = np.random.default_rng(0)
    nodes = [node("Elu", "x", "e"), node("Pad", "e pads", "p", mode="reflect"), node("Conv", "p w", "y")]
    constants = {"w": r.standard_normal((1, 32, 7), np.float32), "pads": np.array([0, 0, 3, 0, 0, 3])}
    made = model(nodes, {"x": ("float32", ["B", 32, "L"])}, ["y"], constants, opset=20)
    made.ir_version = 10
    program, other = polydyn.compile(made, threads=1), onnxruntime.InferenceSession(made.SerializeToString())
    assert "columns are packed element by element" in str(program.manifest["kernels"])
    for b, length in ((1, 4), (2, 17), (3, 70)):
        x = {"x": r.standard_normal((b, 32, length), np.float32)}
        np.testing.assert_allclose(program.run(x)["y"], other.run(None, x)[0], 1e-4, 1e-4)


def test_patches_of_a_resized_picture_have_no_footprint() -> None:
    """Channels moved together with rows of patches, and columns were inside a quotient: an iterator was unbound."""
    r = np.random.default_rng(0)
    nodes = [node("Resize", "x none scales", "z", mode="cubic"), node("Conv", "z w", "y", strides=[4, 4])]
    constants = {"w": r.standard_normal((16, 3, 4, 4), np.float32), "scales": np.array([1, 1, 1, 14 / 15], np.float32)}
    constants["none"] = np.zeros(0, np.float32)
    plan = plan_program(model(nodes, {"x": ("float32", ["N", 3, 28, 30])}, ["y"], constants, opset=20))
    assert any(k.name.startswith("contract_") for k in plan.kernels)


def concatenations() -> onnx.ModelProto:
    """Build concatenations that are outputs. One part of each is at the same offset of a stored tensor of the same
    size.

    They are RGB to BGR, a detection head, a part after a product and a reshape, the parts of a tensor in their own
    order.
    """
    nodes = [
        node("Mul", "x two", "s"), node("Split", "s", "r g b", axis=1), node("Concat", "b g r", "bgr", axis=1),
        node("Sigmoid", "p", "c"), node("Split", "c parts", "xy wh rest", axis=2), node("Mul", "xy two", "a"),
        node("Mul", "wh wh", "d"), node("Concat", "a d rest", "boxes", axis=2),
        node("MatMul", "v w", "m"), node("Reshape", "m flat", "q"), node("Sigmoid", "q", "t"),
        node("Split", "t", "low high", axis=0), node("Mul", "low two", "low2"),
        node("Concat", "low2 high", "halves", axis=0),
        node("Softmax", "p", "u", axis=-1), node("Split", "u parts", "u0 u1 u2", axis=2),
        node("Concat", "u0 u1 u2", "again", axis=2), node("Concat", "u u", "twice", axis=2),
    ]  # fmt: skip
    inputs = {"x": ("float32", [1, 3, "H", "W"]), "p": ("float32", ["B", 5, 7]), "v": ("float32", [1, 8])}
    constants = {"two": np.float32(2), "parts": np.array([2, 2, 3]), "flat": np.array([-1])}
    constants["w"] = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    return model(nodes, inputs, ["bgr", "boxes", "halves", "twice", "again"], constants, 13)


def test_a_tensor_is_no_concatenation_of_its_size() -> None:
    """A copy of one part was taken for a copy of the whole, so the tensor received the memory of the concatenation,
    which others wrote: wrong in every call, or sometimes on two threads.
    """
    made = concatenations()
    program = polydyn.compile(made, threads=2)
    notes = program.explain(H=4, W=5, B=3).details()
    assert "one memory" not in notes
    session = onnxruntime.InferenceSession(made.SerializeToString())
    for h, w, b in ((4, 5, 3), (1, 1, 1), (2, 0, 0), (31, 33, 7)):
        r = np.random.default_rng(h)
        given = {"x": (1, 3, h, w), "p": (b, 5, 7), "v": (1, 8)}
        values = {n: r.standard_normal(s).astype(np.float32) for n, s in given.items()}
        got = program.run(values)
        for name, expected in zip(program.outputs, session.run(None, values), strict=True):
            np.testing.assert_allclose(got[name], expected, 1e-5, 1e-6, err_msg=name)


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_truths_as_integers_are_reduced(op: str) -> None:
    """The maximum of booleans as int32 was its neutral element: a boolean was a negated mask. The C compiler inverted
    the comparison of a negative number with the minimum integer, which overflows.
    """
    nodes = [node("Equal", "x c", "q"), node("Cast", "q", "i", to=onnx.TensorProto.INT32)]
    m = model([*nodes, node(op, "i a", "y", keepdims=0)], {"x": ("int32", ["N", 5])}, ["y"],
              {"c": np.array(2, np.int32), "a": np.array([-1])})  # fmt: skip
    x = np.array([[1, 2, 2, 0, 2], [0, 0, 1, 0, 0], [2, 2, 2, 2, 2]], np.int32)
    expected = {"ReduceMax": (x == 2).max(-1), "ReduceMin": (x == 2).min(-1), "ReduceSum": (x == 2).sum(-1)}[op]
    assert polydyn.compile(m, threads=1).run({"x": x})["y"].tolist() == expected.tolist()


def test_a_table_of_the_groups_results_is_read_from_memory() -> None:
    """A group that read its own results at data-dependent positions had no proof: planning failed."""
    text = """(int64[L, 3] x, int64[L, 2, 3] p) => (float[L, 3, 3] s, float[L, 3] r) {
        t = Gather (w, x) s = Softmax <axis = 1> (t) q = GatherElements <axis = 1> (t, p)
        r = ReduceSum <keepdims = 0> (q, one)
    }"""
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 19]> g {text}')
    table = np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (("w", table), ("one", np.array([1]))))
    x = np.array([[11, 25, 12], [20, 21, 2]])
    p = np.random.default_rng(1).integers(0, 3, (2, 2, 3))
    got, t = polydyn.compile(made, threads=1).run({"x": x, "p": p}), table[x]
    np.testing.assert_allclose(got["r"], np.take_along_axis(t, p, 1).sum(1), 1e-5)
    np.testing.assert_allclose(got["s"], np.exp(t) / np.exp(t).sum(1, keepdims=True), 1e-5)


def test_a_convolution_of_an_empty_slice_is_padding() -> None:
    """The row operand of such a convolution loads nothing, so it is not a product."""
    text = "(float[B, 3, L] x) => (float[B, 2, M] y) { s = Slice (x, zero, zero, two) y = Conv <pads = [1, 1]> (s, w) }"
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 19]> g {text}')
    constants = {"zero": np.array([0]), "two": np.array([2]), "w": np.ones((2, 3, 2), np.float32)}
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())
    got = polydyn.compile(made, threads=1).run({"x": np.ones((4, 3, 5), np.float32)})["y"]
    np.testing.assert_array_equal(got, np.zeros((4, 2, 1), np.float32))


SHIFT_MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[B,L,K] q) => (float[B,L,K] y)
<int64[1] two = {2}, int64[1] one = {1}, int64[1] end = {9223372036854775807}, int64[6] p = {0,0,1,0,0,0},
 int64[1] zero = {0}, int64 d = {0}> {
  s = Shape(q)
  b = Slice(s, zero, one)
  l = Slice(s, one, two)
  k = Slice(s, two, end)
  k1 = Add(k, one)
  pad = Pad(q, p)
  r = Concat<axis=0>(b, k1, l)
  w = Reshape(pad, r)
  c = Slice(w, one, end, one)
  v = Reshape(c, s)
  t = Trilu<upper=0>(v, d)
  y = Softmax<axis=-1>(t)
}"""
REPETITION_MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[B,2,L] q) => (float[B,2,P] y)
<int64[6] a = {0,0,2,0,0,1}, int64[6] b = {0,0,1,0,0,0}, int64[1] three = {3}, int64[4] e = {1,1,1,3},
 int64[3] r = {0,0,-1}> {
  t = Pad<mode = "wrap">(q, a)
  u = Unsqueeze(t, three)
  v = Expand(u, e)
  w = Reshape(v, r)
  z = Pad(w, b)
  y = MaxPool<dilations = [2], kernel_shape = [2], pads = [1, 0], strides = [3]>(z)
}"""


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (SHIFT_MODEL, ((1, 1, 1), (2, 5, 7), (3, 8, 8), (2, 9, 70))),
        (REPETITION_MODEL, ((1, 2, 7), (2, 2, 9), (1, 2, 30))),
    ],
    ids=["rows of lengths that differ", "a run that an inner loop moves"],
)
def test_loops_whose_parts_cannot_be_split_are_left_whole(text: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Rows whose inner loops differ were run together, and runs were cut by the iterator of an inner loop."""
    made = onnx.parser.parse_model(text)
    program, session = polydyn.compile(made, threads=1), onnxruntime.InferenceSession(made.SerializeToString())
    for shape in shapes:
        x = {"q": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        np.testing.assert_allclose(program.run(x)["y"], session.run(None, x)[0], 1e-5, 1e-6)

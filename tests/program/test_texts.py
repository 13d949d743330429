"""Texts and maps, compared with ONNX Runtime: encoders, labels, ZipMap, operators that move texts; artifacts, sessions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import polydyn
from polydyn.errors import InputError, ModelError, UnsupportedError

ML = "ai.onnx.ml"
NAN = float("nan")


def texts(*values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, object)


def ml(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), domain=ML, **attributes)


def strings(name: str, *values: str) -> onnx.TensorProto:
    return helper.make_tensor(name, T.STRING, [len(values)], [v.encode() for v in values])


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, Any], *constants: onnx.TensorProto,
    version: int = 2,
) -> onnx.ModelProto:  # fmt: skip
    """Build a model. An output's type may be 0: a list of maps."""
    key = helper.make_map_type_proto(T.STRING, helper.make_tensor_type_proto(T.FLOAT, []))
    seq = helper.make_sequence_type_proto(key)
    values = [
        helper.make_value_info(n, seq) if t == 0 else helper.make_tensor_value_info(n, t, None)
        for n, t in outputs.items()
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, *t) for n, t in inputs.items()], values, list(constants)
    )
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid(ML, version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def same(got: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert [list(m) for m in got] == [list(m) for m in expected]
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(list(a.values()), list(b.values()), 1e-5, 1e-6)
        return
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if expected.dtype == object:
        assert got.tolist() == expected.tolist()
    else:
        np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


def compare(m: onnx.ModelProto, *calls: dict[str, Any]) -> polydyn.Program:
    program, session = polydyn.compile(m, threads=1), onnxruntime.InferenceSession(m.SerializeToString())
    for feeds in calls:
        for got, expected in zip(program.run(feeds).values(), session.run(None, feeds), strict=True):
            same(got, expected)
    return program


def pipeline() -> onnx.ModelProto:
    """Build skl2onnx's form of a ColumnTransformer and a classifier: columns of texts and of numbers."""
    nodes = [
        ml("OneHotEncoder", "sex", "o", cats_strings=["f", "é?"], zeros=1),
        ml("LabelEncoder", "port", "p", keys_strings=["A", "B"], values_floats=[1.0, 2.0], default_float=-1.0),
        helper.make_node("Reshape", ["o", "flat"], ["of"]),
        helper.make_node("Concat", ["of", "p", "age"], ["x"], axis=1),
        ml("LinearClassifier", "x", "label scores", classlabels_strings=["no", "yes", "ä"], intercepts=[0.1, 0.2, 0.0],
           coefficients=[0.5, -1.0, 0.3, 0.1, -0.2, 0.4, 0.8, 0.0, 1.0, -0.5, 0.2, 0.1], post_transform="SOFTMAX"),
        ml("ZipMap", "scores", "maps", classlabels_strings=["no", "yes", "ä"]),
    ]  # fmt: skip
    inputs = {"sex": (T.STRING, ["N", 1]), "port": (T.STRING, ["N", 1]), "age": (T.FLOAT, ["N", 1])}
    flat = numpy_helper.from_array(np.array([-1, 2]), "flat")
    return model(nodes, inputs, {"label": T.STRING, "maps": 0}, flat)


def people(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    columns = {"sex": ["f", "m", "é?", ""], "port": ["A", "B", "unheard"]}
    feeds: dict[str, Any] = {k: rng.choice(v, (n, 1)).astype(object) for k, v in columns.items()}
    return feeds | {"age": rng.standard_normal((n, 1)).astype(np.float32)}


def test_a_pipeline_with_texts_and_maps(tmp_path: Path) -> None:
    m = pipeline()
    program = compare(m, people(1), people(9), people(0))
    expected = onnxruntime.InferenceSession(m.SerializeToString())
    feeds = people(7)
    program.save(tmp_path / "p")
    loaded = polydyn.load(tmp_path / "p")
    mine = polydyn.InferenceSession(m.SerializeToString())
    for results in (list(loaded.run(feeds).values()), mine.run(None, feeds)):
        for got, want in zip(results, expected.run(None, feeds), strict=True):
            same(got, want)
    lists = {"sex": [["f"]], "port": np.array([[b"A"]]), "age": np.zeros((1, 1), np.float32)}
    same(
        mine.run(["label"], lists)[0],
        expected.run(["label"], {"sex": texts(["f"]), "port": texts(["A"]), "age": lists["age"]})[0],
    )
    for ours, theirs in ((mine.get_inputs(), expected.get_inputs()), (mine.get_outputs(), expected.get_outputs())):
        assert [(a.name, a.type) for a in ours] == [(a.name, a.type) for a in theirs]
    assert program.inputs["sex"] == "string[N, 1]"


def test_what_texts_refuse() -> None:
    program, feeds = polydyn.compile(pipeline(), threads=1), people(2)
    with pytest.raises(InputError, match="takes texts"):
        program.run(feeds | {"sex": np.zeros((2, 1))})
    with pytest.raises(InputError, match="label"):
        program.run(feeds, {"label": np.empty(2, object)})
    with pytest.raises(InputError, match="axes"):
        program.run(feeds | {"sex": texts("f")})
    with pytest.raises(UnsupportedError, match="bound"):
        program.bind(feeds)
    zipped = model([ml("ZipMap", "x", "y", classlabels_strings=["a", "b"])], {"x": (T.FLOAT, ["N", "C"])}, {"y": 0})
    with pytest.raises(InputError, match="3 scores for 2 classes"):
        polydyn.compile(zipped, threads=1).run({"x": np.zeros((1, 3), np.float32)})


@pytest.mark.parametrize(
    ("node", "match"),
    [
        (helper.make_node("Cast", ["x"], ["y"], "n", to=T.FLOAT), "Cast of texts to numbers"),
        (helper.make_node("Unique", ["x"], ["y"], "n"), "Unique of texts"),
        (helper.make_node("StringNormalizer", ["x"], ["y"], "n"), "StringNormalizer"),
        (ml("Scaler", "x", "y"), "Scaler of texts"),
        (ml("LabelEncoder", "x", "y", keys_int64s=[1], values_int64s=[2]), "keys and input differ"),
        (ml("OneHotEncoder", "x", "y", cats_int64s=[1]), "categories and input differ"),
    ],
)
def test_operators_of_texts_that_are_not_built(node: onnx.NodeProto, match: str) -> None:
    with pytest.raises((UnsupportedError, ModelError), match=match):
        polydyn.compile(model([node], {"x": (T.STRING, ["N"])}, {"y": T.FLOAT}))


def encoders(version: int) -> tuple[list[onnx.NodeProto], dict[str, Any], list[onnx.TensorProto]]:
    """Return LabelEncoders of a version for every pair of types; equal keys, defaults, NaN."""
    x, out = {"s": texts("a", "b", "zz", "", "a"), "i": np.array([3, -1, 0, 3, 5])}, []
    x |= {"f": np.array([NAN, 1.5, 2, -0.0, 0], np.float32)}
    keys: dict[str, Any] = {"s": ["a", "b", "a"], "i": [3, -1, 3], "f": [NAN, 1.5, 0.0]}
    names = {"s": "string", "i": "int64", "f": "float"}
    values: dict[str, Any] = {"s": ["b", "new", "é"], "i": [5, 6, 7], "f": [0.5, 6.0, 7.0]}
    for k in keys:
        for v in values:
            a = {f"keys_{names[k]}s": keys[k], f"values_{names[v]}s": values[v]}
            out.append(ml("LabelEncoder", k, f"{k}{v}", **a))
            default = {"s": "none", "i": 9, "f": 2.5}[v]
            out.append(ml("LabelEncoder", k, f"{k}{v}d", **a, **{f"default_{names[v]}": default}))
    if version == 4:
        double = numpy_helper.from_array(np.array([NAN, 4.0]), "k")
        out.append(ml("LabelEncoder", "d", "ds", keys_tensor=double, values_tensor=strings("v", "p", "q"),
                      default_tensor=strings("e", "none")))  # fmt: skip
        short, one = (numpy_helper.from_array(np.array(v, np.int16), "v") for v in ([4, 5], [9]))
        out.append(ml("LabelEncoder", "s", "st", keys_tensor=strings("k", "a", "b"), values_tensor=short,
                      default_tensor=one))  # fmt: skip
        x["d"] = np.array([NAN, 4.0, 1.0])
    return out, x, []


@pytest.mark.parametrize("version", [2, 4])
def test_label_encoders(version: int) -> None:
    nodes, x, constants = encoders(version)
    kinds = {"s": T.STRING, "i": T.INT64, "f": T.FLOAT, "d": T.DOUBLE, "t": T.INT16}
    inputs = {k: (kinds[k], [k.upper()]) for k in x}
    outputs = {n.output[0]: kinds[n.output[0][1]] for n in nodes}
    compare(model(nodes, inputs, outputs, *constants, version=version), x)


def test_the_first_label_encoder_mappers_and_categories() -> None:
    nodes = [
        ml("LabelEncoder", "s", "a", classes_strings=["a", "b", "a"], default_int64=-7),
        ml("LabelEncoder", "i", "b", classes_strings=["a", "b", "a"]),
        ml("CategoryMapper", "s", "c", cats_strings=["a", "a", "b"], cats_int64s=[7, 8, 2]),
        ml("CategoryMapper", "i", "d", cats_strings=["a", "c", "b"], cats_int64s=[1, 1, 2], default_string="q"),
        ml("OneHotEncoder", "s", "e", cats_strings=["a", "b", "a"]),
        ml("ArrayFeatureExtractor", "t i", "f"),
    ]
    inputs = {"s": (T.STRING, ["N", "M"]), "i": (T.INT64, ["K"])}
    outputs = {"a": T.INT64, "b": T.STRING, "c": T.INT64, "d": T.STRING, "e": T.FLOAT, "f": T.STRING}
    feeds = {"s": texts(["a", "b"], ["z", ""]), "i": np.array([0, 2, 1])}
    compare(model(nodes, inputs, outputs, strings("t", "p", "q", "r"), version=1), feeds)
    strict = model([ml("OneHotEncoder", "s", "y", cats_strings=["a", "b"], zeros=0)], inputs, {"y": T.FLOAT}, version=1)
    program = compare(strict, {"s": texts(["a", "b"]), "i": np.array([0])})
    with pytest.raises(InputError):
        program.run({"s": texts(["a", "c"]), "i": np.array([0])})


def test_operators_that_move_texts() -> None:
    then = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["t"])], "then", [], [helper.make_tensor_value_info("t", T.STRING, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Constant", [], ["u"], value_strings=["no", "yes"])], "else", [],
        [helper.make_tensor_value_info("u", T.STRING, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Concat", ["x", "c"], ["joined"], axis=0),
        helper.make_node("Reshape", ["joined", "rows"], ["r"]),
        helper.make_node("Transpose", ["r"], ["turned"], perm=[1, 0]),
        helper.make_node("Equal", ["x", "one"], ["is"]),
        helper.make_node("Where", ["is", "x", "one"], ["chosen"]),
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("If", ["flag"], ["either"], then_branch=then, else_branch=other),
    ]
    outputs = {"turned": T.STRING, "is": T.BOOL, "chosen": T.STRING, "size": T.INT64, "either": T.STRING}
    rows = numpy_helper.from_array(np.array([-1, 1]), "rows")
    inputs = {"x": (T.STRING, ["N"]), "flag": (T.BOOL, [])}
    m = model(nodes, inputs, outputs | {"x": T.STRING}, strings("c", "p", "a"), strings("one", "a"), rows)
    x = texts("a", "unheard", "é", None, 1.5)
    compare(
        m, {"x": x, "flag": np.array(True)}, {"x": x, "flag": np.array(False)}, {"x": x[:0], "flag": np.array(True)}
    )

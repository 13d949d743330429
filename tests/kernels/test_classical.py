"""Operators of ai.onnx.ml, compared with ONNX Runtime: forests, linear models, scalers and encoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import polydyn
from polydyn.errors import InputError, ModelError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.graph.functions import forests

RNG = np.random.default_rng(0)
ML = "ai.onnx.ml"
CODES = {"float32": 1, "float64": 11, "int32": 6, "int64": 7}
LABELS, SCORES = ("l", 7), ("y", 1)


def one(
    op: str, dtype: str, outputs: list[tuple[str, int]], version: int = 3, **attributes: Any
) -> onnx.ModelProto:  # fmt: skip
    made = helper.make_node(op, ["x"], [n for n, _ in outputs], "n0", domain=ML, **attributes)
    inputs = [helper.make_tensor_value_info("x", CODES[dtype], ["N", 4])]
    graph = helper.make_graph([made], "g", inputs, [helper.make_tensor_value_info(n, t, None) for n, t in outputs])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ML, version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def numbers(n: int, dtype: str, nan: bool = True) -> np.ndarray[Any, Any]:
    """Return multiples of a half, so that some equal thresholds; one float of eight is NaN."""
    x = RNG.integers(-3, 4, (n, 4)).astype(dtype)
    if dtype.startswith("float"):
        x /= 2
        x[RNG.random(x.shape) < nan / 8] = np.nan
    return x


def compare(m: onnx.ModelProto, dtype: str = "float32", nan: bool = True) -> None:
    session, program = onnxruntime.InferenceSession(m.SerializeToString()), polydyn.compile(m, threads=1)
    for n in (1, 7, 33):
        x = numbers(n, dtype, nan)
        for expected, got in zip(session.run(None, {"x": x}), program.run({"x": x}).values(), strict=True):
            assert expected.shape == got.shape and expected.dtype == got.dtype
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert {len(v) for v in program.run({"x": numbers(0, dtype)}).values()} == {0}


# -- forests ---------------------------------------------------------------------------------------------------------


class Trees:
    """Random trees as the attributes of TreeEnsembleClassifier and Regressor."""

    def __init__(self, count: int, depth: int, modes: list[str]) -> None:
        self.modes, self.leaves = modes, list[tuple[int, int]]()
        self.rows: list[list[Any]] = []
        for t in range(count):
            self.grow(t, depth, [0])

    def grow(self, t: int, depth: int, ids: list[int]) -> int:
        own, ids[0] = ids[0], ids[0] + 1
        row = [t, own, 0, "LEAF", 0.0, 0, 0, 0]
        self.rows.append(row)
        if depth == 0 or (own and RNG.random() < 0.2):
            self.leaves.append((t, own))
            return own
        mode, value = f"BRANCH_{RNG.choice(self.modes)}", float(RNG.integers(-2, 3)) / 2
        row[2:5] = int(RNG.integers(4)), mode, value
        row[5:] = self.grow(t, depth - 1, ids), self.grow(t, depth - 1, ids), int(RNG.integers(2))
        return own

    def nodes(self) -> dict[str, Any]:
        names = ["treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids"]
        names.append("missing_value_tracks_true")
        return {f"nodes_{n}": list(c) for n, c in zip(names, zip(*self.rows, strict=True), strict=True)}

    def entries(self, prefix: str, ids: list[int], low: float = 0.0) -> dict[str, Any]:
        rows = [(t, n, c, float(low + RNG.random() / 4)) for t, n in self.leaves for c in ids]
        names = ("treeids", "nodeids", "ids", "weights")
        return {f"{prefix}_{n}": list(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)}


ALL = ["LEQ", "LT", "GTE", "GT", "EQ", "NEQ"]


@pytest.mark.parametrize(
    ("dtype", "ids", "modes", "low", "post"),
    [
        ("float32", [0, 1, 2], ALL, -0.1, {"post_transform": "SOFTMAX"}),
        ("float64", [0, 1, 2], ["LEQ"], 0.0, {"base_values": [0.1, 0.2, 0.3]}),
        ("float32", [0, 2], ["LT", "GTE"], -0.2, {"post_transform": "LOGISTIC"}),
        ("float32", [0], ["LEQ"], -0.1, {"post_transform": "LOGISTIC", "base_values": [0.05]}),
        ("float64", [0], ["LT"], 0.0, {}),
        ("float32", [1], ["LEQ"], -0.1, {"post_transform": "LOGISTIC"}),
    ],
)
def test_forests_that_classify(dtype: str, ids: list[int], modes: list[str], low: float, post: dict[str, Any]) -> None:
    trees, classes = Trees(4, 4, modes), 3 if len(ids) > 1 else 2
    attributes = trees.nodes() | trees.entries("class", ids, low) | post
    labels = [10 + c for c in range(classes)]
    compare(one("TreeEnsembleClassifier", dtype, [LABELS, SCORES], classlabels_int64s=labels, **attributes), dtype)


@pytest.mark.parametrize(
    ("count", "depth", "ids", "post"),
    [
        (3, 3, [0], {"aggregate_function": "AVERAGE", "base_values": [0.5]}),
        (4, 2, [0, 1], {"aggregate_function": "MIN"}),
        (2, 5, [1], {"aggregate_function": "MAX", "n_targets": 2}),
        (3, 0, [0, 1], {"post_transform": "SOFTMAX_ZERO"}),  # trees that are leaves
    ],
)
def test_forests_that_estimate(count: int, depth: int, ids: list[int], post: dict[str, Any]) -> None:
    trees = Trees(count, depth, ["LEQ", "GT"])
    attributes = {"n_targets": len(ids)} | trees.nodes() | trees.entries("target", ids, -0.1) | post
    compare(one("TreeEnsembleRegressor", "float32", [SCORES], **attributes))


def test_of_several_weights_of_a_leaf_the_first_counts_for_one_target() -> None:
    """skl2onnx writes the number of a leaf once for each class."""
    trees = Trees(2, 3, ["LEQ"])
    attributes = {"n_targets": 1} | trees.nodes() | trees.entries("target", [0, 0, 0], -0.1)
    compare(one("TreeEnsembleRegressor", "float32", [SCORES], **attributes))


def test_levels_need_no_checks_and_deep_trees_repeat_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves may have any feature and any children: nothing reads them."""
    trees = Trees(3, 4, ["LEQ"])
    for row in trees.rows:
        if row[3] == "LEAF":
            row[2], row[5], row[6] = -2, -1, -1
    attributes = {"n_targets": 1} | trees.nodes() | trees.entries("target", [0])
    m = one("TreeEnsembleRegressor", "float32", [SCORES], **attributes)
    assert not import_model(m).bounds
    compare(m)
    written = polydyn.compile(m, threads=1)
    monkeypatch.setattr(forests, "LEVELS", 1)
    repeated, x = polydyn.compile(m, threads=1, cache=False), numbers(9, "float32")
    np.testing.assert_array_equal(repeated.run({"x": x})[SCORES[0]], written.run({"x": x})[SCORES[0]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tree_ensemble_with_every_mode(dtype: str) -> None:
    """A chain of nodes, one of each mode; a second tree is a leaf."""
    tensor = lambda values: numpy_helper.from_array(np.array(values, dtype))  # noqa: E731
    modes = numpy_helper.from_array(np.array([0, 1, 2, 3, 4, 5, 6, 0], np.uint8))
    attributes: dict[str, Any] = {
        "nodes_modes": modes, "nodes_featureids": [0, 1, 2, 3, 0, 1, 2, 0],
        "nodes_splits": tensor([-1, -0.5, 1, 1, 0.5, 0, 0, 0]), "nodes_missing_value_tracks_true": [0, 1] * 4,
        "nodes_truenodeids": [0, 1, 2, 3, 4, 5, 6, 8], "nodes_trueleafs": [1] * 8,
        "nodes_falsenodeids": [1, 2, 3, 4, 5, 6, 7, 8], "nodes_falseleafs": [0] * 6 + [1, 1],
        "membership_values": tensor([-0.5, 0.5, np.nan]), "tree_roots": [0, 7], "n_targets": 2,
        "leaf_targetids": [0, 1, 0, 1, 0, 1, 0, 1, 1], "leaf_weights": tensor([1, 2, 3, 4, 5, 6, 7, 8, 0.5]),
    }  # fmt: skip
    m = one("TreeEnsemble", dtype, [("y", CODES[dtype])], 5, aggregate_function=1, **attributes)
    program, x = polydyn.compile(m, threads=1), numbers(64, dtype)
    expected = np.zeros((64, 2))
    expected[:, 1] = 0.5
    for row, total in zip(x, expected, strict=True):
        a, b, c, d = row
        nan = np.isnan
        goes = [a <= -1, b < -0.5 or nan(b), c >= 1, d > 1 or nan(d), a == 0.5, b != 0 or nan(b), c in (-0.5, 0.5)]
        leaf = goes.index(True) if True in goes else 7
        total[leaf % 2] += leaf + 1
    np.testing.assert_array_equal(program.run({"x": x})["y"], expected.astype(dtype))


def test_wrong_trees_are_refused() -> None:
    trees = Trees(2, 3, ["LEQ"])
    good = trees.nodes() | trees.entries("target", [0]) | {"n_targets": 1}
    branch = good["nodes_modes"].index("BRANCH_LEQ")

    def refused(error: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            polydyn.compile(one("TreeEnsembleRegressor", "float32", [SCORES], **(good | changed)))

    features, children = list(good["nodes_featureids"]), list(good["nodes_truenodeids"])
    features[branch], children[branch] = 4, good["nodes_nodeids"][branch]
    refused((ShapeError, ModelError), "feature", nodes_featureids=features)  # type: ignore[arg-type]
    refused(ModelError, "cycle", nodes_truenodeids=children)
    refused(ModelError, "has the target 3 of 1", target_ids=[3] * len(good["target_ids"]))
    refused(UnsupportedError, "aggregate function MEDIAN", aggregate_function="MEDIAN")
    alone = trees.nodes() | trees.entries("class", [0]) | {"classlabels_strings": ["no"]}
    with pytest.raises(UnsupportedError, match="a text for a single class"):
        polydyn.compile(one("TreeEnsembleClassifier", "float32", [("l", 8), SCORES], **alone))


# -- others ----------------------------------------------------------------------------------------------------------

W = [1.0, 2.0, -1.0, 0.5, 0.3, 0.2, -0.7, 0.4, 0.1, -0.2, 0.6, 0.8]


@pytest.mark.parametrize("post", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_linear_classifiers(rows: int, post: str) -> None:
    labels = [4, 5] if rows == 1 else list(range(4, 4 + rows))
    more = {"coefficients": W[: 4 * rows], "intercepts": W[:rows], "classlabels_ints": labels, "post_transform": post}
    compare(one("LinearClassifier", "float32", [LABELS, SCORES], **more), nan=False)


@pytest.mark.parametrize(
    ("op", "dtype", "result", "attributes"),
    [
        ("LinearRegressor", "float32", 1, {"coefficients": W[:8], "intercepts": [0.1, 0.2], "targets": 2}),
        ("Scaler", "int64", 1, {"offset": [1.0, 2.0, 0.0, 1.0], "scale": [0.5, 1.0, 2.0, 3.0]}),
        ("Scaler", "float32", 1, {"offset": [1.0], "scale": [0.5]}),
        ("Normalizer", "float32", 1, {"norm": "MAX"}),
        ("Normalizer", "int64", 1, {"norm": "L1"}),
        ("Normalizer", "float32", 1, {"norm": "L2"}),
        ("Imputer", "int64", 7, {"imputed_value_int64s": [7], "replaced_value_int64": 1}),
        ("Imputer", "float32", 1, {"imputed_value_floats": [7.0, 8.0, 9.0, 1.0], "replaced_value_float": np.nan}),
        ("Binarizer", "float32", 1, {"threshold": 0.5}),
        ("OneHotEncoder", "int64", 1, {"cats_int64s": [-1, 0, 2], "zeros": 1}),
        ("LabelEncoder", "int64", 1, {"keys_int64s": [-1, 0], "values_floats": [0.5, 0.6], "default_float": 9.0}),
        ("LabelEncoder", "float32", 7, {"keys_floats": [-1.0, 0.5], "values_int64s": [5, 6], "default_int64": 9}),
        ("FeatureVectorizer", "float32", 1, {"inputdimensions": [4]}),
    ],
)  # fmt: skip
def test_scalers_and_encoders(op: str, dtype: str, result: int, attributes: dict[str, Any]) -> None:
    compare(one(op, dtype, [("y", result)], **attributes), dtype, nan=op == "Imputer")


@pytest.mark.parametrize("keys", [[3, -1, 4, 7], [3, -1, 4, 10**12], [-(2**63), 2 - 2**63], [2**63 - 1, 2**63 - 4]])
def test_labels_of_integers_that_are_dense_or_not(keys: list[int]) -> None:
    """Dense keys index a table; numbers beside it, and the limits of the type, get the default."""
    values = list(range(10, 10 + len(keys)))
    m = one("LabelEncoder", "int64", [("y", 7)], keys_int64s=keys, values_int64s=values, default_int64=-5)
    x = np.array([[k, max(k - 1, -(2**63)), min(k, 2**63 - 2) + 1, 0] for k in [*keys, -(2**63), 2**63 - 1]])
    expected = onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_array_equal(polydyn.compile(m, threads=1).run({"x": x})["y"], expected)


def test_features_are_taken_by_number() -> None:
    m = one("Binarizer", "float32", [SCORES])
    m.graph.node[0].CopyFrom(helper.make_node("ArrayFeatureExtractor", ["x", "i"], ["y"], domain=ML))
    m.graph.input.append(helper.make_tensor_value_info("i", 7, ["K"]))
    program, x = polydyn.compile(m, threads=1), numbers(3, "float32", nan=False)
    np.testing.assert_array_equal(program.run({"x": x, "i": np.array([3, 1])})["y"], x[:, [3, 1]])
    with pytest.raises(InputError):
        program.run({"x": x, "i": np.array([4])})


# -- support vector machines -----------------------------------------------------------------------------------------


def machine(classes: int, kernel: str, seed: int = 0, **more: Any) -> onnx.ModelProto:
    """Build a classifier with one to three vectors for each class."""
    rng, sizes = np.random.default_rng(seed), [1 + c % 3 for c in range(classes)]
    vectors, pairs = sum(sizes), classes * (classes - 1) // 2
    numbers = {"support_vectors": 4 * vectors, "coefficients": (classes - 1) * vectors, "rho": pairs}
    attributes = {n: (rng.random(k) - 0.5).tolist() for n, k in numbers.items()}
    if more.pop("likely", False):
        attributes |= {"prob_a": (-rng.random(pairs) - 0.5).tolist(), "prob_b": (rng.random(pairs) - 0.5).tolist()}
    labels = {"classlabels_ints": list(range(4, 4 + classes)), "vectors_per_class": sizes}
    params = {"kernel_type": kernel, "kernel_params": [0.5, 0.2, 2.0]}
    return one("SVMClassifier", "float32", [LABELS, SCORES], 1, **attributes, **labels, **params, **more)


@pytest.mark.parametrize(
    ("classes", "kernel", "attributes"),
    [
        (2, "RBF", {"post_transform": "LOGISTIC"}), (2, "LINEAR", {}), (3, "POLY", {"post_transform": "SOFTMAX"}),
        (4, "SIGMOID", {"likely": True}), (2, "RBF", {"likely": True}),
    ],
)  # fmt: skip
def test_support_vector_machines_that_classify(classes: int, kernel: str, attributes: dict[str, Any]) -> None:
    """Probabilities equal ONNX Runtime's iteration, which ends 0.005 / classes before the solution."""
    compare(machine(classes, kernel, **attributes), nan=False)


@pytest.mark.parametrize("count", [0, 3])
def test_support_vector_machines_that_estimate(count: int) -> None:
    weights = W[: count or 4]
    more: dict[str, Any] = {"n_supports": count, "coefficients": weights, "rho": [0.2], "kernel_type": "RBF"}
    more |= {"support_vectors": W[:12]} if count else {"one_class": 1}
    compare(one("SVMRegressor", "float32", [SCORES], 1, kernel_params=[0.3, 0.0, 3.0], **more), nan=False)
    scores = one("SVMClassifier", "float32", [LABELS, SCORES], 1, kernel_params=[0.0, 0.0, 0.0], rho=[0.1],
                 classlabels_ints=[7, 9, 8][:2 + count // 3], coefficients=W[: 8 + 4 * (count // 3)])  # fmt: skip
    compare(scores, nan=False)


def test_the_largest_of_a_row_with_nan() -> None:
    compare(one("Normalizer", "float32", [SCORES], norm="MAX"), nan=True)

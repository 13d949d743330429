"""Operators of ai.onnx.ml that scikit-learn pipelines export: linear models, scalers, encoders, feature columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from polydyn.errors import ModelError
from polydyn.graph.bodies import Body, body
from polydyn.graph.functions.forests import samples
from polydyn.graph.functions.scores import ML, class_outputs, pair, post_transform, set_labels
from polydyn.schedules.expr import Array


def _floats(b: Body, name: str, dtype: str) -> Array:
    return np.asarray(b.attribute(name, ()), dtype).reshape(-1)


def _linear(b: Body, rows: int, dtype: str, x: str) -> str:
    """Return [samples, rows]: products with the coefficients, plus the intercepts. Raises ModelError for a wrong
    number.
    """
    weights, intercepts = _floats(b, "coefficients", dtype), _floats(b, "intercepts", dtype)
    if rows < 1 or weights.size % rows:
        raise ModelError(f"{weights.size} coefficients for {rows} rows", node=b.node.name, rule=b.node.op)
    total = b.op("MatMul", x, b.constant(np.ascontiguousarray(weights.reshape(rows, -1).T), dtype))
    return b.op("Add", total, b.constant(intercepts, dtype)) if intercepts.size else total


@body(f"{ML}::LinearRegressor")
def linear_regressor(b: Body) -> None:
    """Compute ``x W + b`` as float32, transformed."""
    x, dtype = samples(b)
    targets, kind = int(b.attribute("targets", 1)), b.attribute("post_transform", "NONE")
    result = post_transform(
        b, _linear(b, targets, dtype, x), kind if targets > 1 or kind == "PROBIT" else "NONE", dtype
    )
    b.set_output(b.cast(result, "float32") if dtype != "float32" else result)


@body(f"{ML}::LinearClassifier")
def linear_classifier(b: Body) -> None:
    """Compute the label of the largest score, and the scores as float32."""
    x, dtype = samples(b)
    labels = b.attribute("classlabels_ints", ())
    b.ignore("multi_class")
    kind, count = b.attribute("post_transform", "NONE"), len(labels)
    rows = max(np.asarray(b.attribute("intercepts", ())).size, 1)
    scores = _linear(b, rows, dtype, x)
    if rows == 1 and count == 2:
        above = b.op("Greater", scores, b.constant(0.0, dtype))
        set_labels(b, b.op("Squeeze", b.cast(above, "int64"), b.constant([1])), labels)
        if kind == "PROBIT":
            raise b.refuse("PROBIT of one score for two classes")
        low = b.op("Neg", scores) if kind == "LOGISTIC" else b.op("Sub", b.constant(1.0, dtype), scores)
        both = pair(b, low, scores)  # as in ONNX Runtime, LOGISTIC is the only transform of a single score
        both = b.op("Sigmoid", both) if kind == "LOGISTIC" else both
        b.set_output(b.cast(both, "float32") if dtype != "float32" else both, 1)
    elif rows == count:
        class_outputs(b, scores, scores, labels, kind, dtype)
    else:
        raise b.refuse(f"{rows} rows of coefficients for {count} classes")


@body(f"{ML}::Scaler")
def scaler(b: Body) -> None:
    """Compute ``(x - offset) * scale`` as float32."""
    x = b.cast(b.input(0), "float32")
    offset, scale = _floats(b, "offset", "float32"), _floats(b, "scale", "float32")
    b.set_output(b.op("Mul", b.op("Sub", x, b.constant(offset, "float32")), b.constant(scale, "float32")))


@body(f"{ML}::Normalizer")
def normalizer(b: Body) -> None:
    """Divide rows by their norm, as float32.

    As in ONNX Runtime, a row with norm 0 does not change, and NaN is not the maximum.
    """
    x, kind = b.cast(b.input(0), "float32"), b.attribute("norm", "MAX")
    if kind == "MAX":
        number = b.op("Where", b.op("IsNaN", x), b.constant(-np.inf, "float32"), x)
        norm = b.reduce("ReduceMax", number, -1)
    elif kind == "L1":
        norm = b.reduce("ReduceSum", b.op("Abs", x), -1)
    elif kind == "L2":
        norm = b.op("Sqrt", b.reduce("ReduceSum", b.op("Mul", x, x), -1))
    else:
        raise b.refuse(f"the norm {kind}")
    zero = b.op("Equal", norm, b.constant(0.0, "float32"))
    b.set_output(b.op("Where", zero, x, b.op("Div", x, norm)))


@body(f"{ML}::Imputer")
def imputer(b: Body) -> None:
    """Replace one value, or NaN, by a constant per column."""
    dtype = b.tensor(b.input(0)).dtype
    kind = "int64s" if dtype in ("int32", "int64") else "floats"
    values = np.asarray(b.attribute(f"imputed_value_{kind}", ()), dtype)
    replaced = b.attribute(f"replaced_value_{kind[:-1]}", 0)
    b.ignore("imputed_value_int64s", "imputed_value_floats", "replaced_value_int64", "replaced_value_float")
    if not values.size:
        raise ModelError(f"no imputed values for {dtype}", node=b.node.name, rule=b.node.op)
    x = b.input(0)
    nan = isinstance(replaced, float) and np.isnan(replaced)
    is_replaced = b.op("IsNaN", x) if nan else b.op("Equal", x, b.constant(replaced, dtype))
    b.set_output(b.op("Where", is_replaced, b.constant(values if values.size > 1 else values[0], dtype), x))


@body(f"{ML}::Binarizer")
def binarizer(b: Body) -> None:
    """Compute 1 above a threshold, else 0."""
    dtype = b.tensor(b.input(0)).dtype
    b.set_output(b.cast(b.op("Greater", b.input(0), b.constant(b.attribute("threshold", 0.0), dtype)), dtype))


@body(f"{ML}::FeatureVectorizer")
def feature_vectorizer(b: Body) -> None:
    """Join columns as float32. Each operand is cut or zero-padded to its number of columns."""
    parts = []
    for name, wide in zip(b.node.inputs, b.attribute("inputdimensions", ()), strict=True):
        t, x = b.tensor(name), b.cast(name, "float32")
        x = x if len(t.shape) == 2 else b.reshape(x, -1, 1)
        known = t.shape[1].constant if len(t.shape) == 2 else 1
        if known is None or len(t.shape) > 2:
            raise b.refuse("an operand of more than two axes, or with a number of columns that is not constant")
        if wide < known:
            x = b.op("Slice", x, b.constant([0]), b.constant([wide]), b.constant([1]))
        if wide > known:
            x = b.op("Pad", x, b.constant([0, 0, 0, wide - known]))
        parts.append(x)
    b.set_output(b.op("Concat", *parts, axis=1))


@body(f"{ML}::ArrayFeatureExtractor")
def array_feature_extractor(b: Body) -> None:
    """Select elements of the last axis by position. A vector gives a matrix of one row."""
    x, at = b.input(0), b.reshape(b.input(1), -1)
    picked = b.op("Gather", x, at, axis=-1)
    b.set_output(b.op("Unsqueeze", picked, b.constant([0])) if len(b.tensor(x).shape) == 1 else picked)


@body(f"{ML}::OneHotEncoder")
def one_hot_encoder(b: Body) -> None:
    """Compute 1 at the last category that equals a number, along a new last axis.

    With ``zeros=0`` each number must be a category: it indexes a vector of ones.
    """
    categories = np.asarray(b.attribute("cats_int64s", ()), np.int64)
    count = categories.size
    last = np.array([c not in categories[k + 1 :] for k, c in enumerate(categories)], bool)
    x = b.op("Unsqueeze", b.cast(b.input(0), "int64"), b.constant([-1]))
    same = b.op("Equal", x, b.constant(categories))
    same = same if last.all() else b.op("And", same, b.constant(last, "bool"))
    result = b.cast(same, "float32")
    if not b.attribute("zeros", 1):
        at = b.op("Where", same, b.constant(np.arange(count)), b.constant(count))
        one = b.op("Gather", b.constant(np.ones(count), "float32"), b.reduce("ReduceMin", at, -1))
        result = b.op("Mul", result, one)
    b.set_output(result)


def _dense_table(keys: Array, values: Array, default: Any) -> tuple[int, Array] | None:
    """Return the key before the least and the value of every integer from there to the one after the largest.

    None if the keys are not integers, or are few among the integers between them: each is compared then.
    """
    if keys.dtype.kind not in "iu" or not keys.size:
        return None
    least, largest = int(keys.min()) - 1, int(keys.max()) + 1
    limits = np.iinfo(keys.dtype)
    if least < limits.min or largest > limits.max or largest - least > 4 * keys.size + 64:
        return None
    table = np.full(largest - least + 1, default, values.dtype)
    table[keys.astype(np.int64) - least] = values
    return least, table


@body(f"{ML}::LabelEncoder")
def label_encoder(b: Body) -> None:
    """Replace a number by the value of the first equal key. Unknown numbers get a default."""
    kinds = ("int64", "float", "tensor")
    tables: dict[str, Array] = {}
    for part in ("keys", "values"):
        for kind in kinds:
            name = f"{part}_{kind}" + "s" * (kind != "tensor")
            given = b.attribute(name)
            if given is not None and np.size(given):
                dtype = {"int64": "int64", "float": "float32"}.get(kind) or str(np.asarray(given).dtype)
                tables[part] = np.asarray(given, dtype).reshape(-1)
    b.ignore("default_int64", "default_float", "default_tensor")
    if tables.keys() != {"keys", "values"} or tables["keys"].size != tables["values"].size:
        raise ModelError("keys and values differ in number", node=b.node.name, rule=b.node.op)
    _, first = np.unique(tables["keys"], return_index=True)
    keys, values = (tables[part][np.sort(first)] for part in ("keys", "values"))
    dtype, tensor = str(values.dtype), b.attribute("default_tensor")
    plain = b.attribute("default_int64", -1) if dtype == "int64" else b.attribute("default_float", -0.0)
    default = np.asarray(plain if tensor is None or not np.size(tensor) else tensor, dtype).reshape(-1)[0]
    if dense := _dense_table(keys, values, default):
        least, table = dense
        kind, ends = str(keys.dtype), (least, least + table.size - 1)
        inside = b.op("Min", b.op("Max", b.input(0), b.constant(ends[0], kind)), b.constant(ends[1], kind))
        at = b.op("Sub", inside, b.constant(least, kind))
        at = at if kind == "int64" else b.cast(at, "int64")
        b.set_output(b.op("Gather", b.constant(table, dtype), at, axis=0))
        return
    x = b.op("Unsqueeze", b.input(0), b.constant([-1]))
    same = b.op("Equal", x, b.constant(keys, str(keys.dtype)))
    if b.node.opset >= 4 and np.isnan(keys.astype("float64")).any():  # earlier opsets match no NaN
        same = b.op("Or", same, b.op("And", b.op("IsNaN", x), b.constant(np.isnan(keys), "bool")))
    numbered = b.op("Where", same, b.constant(np.arange(1, keys.size + 1)), b.constant(0))
    at = b.reduce("ReduceMax", numbered, -1, keepdims=0)
    b.set_output(b.op("Gather", b.constant(np.concatenate([[default], values]), dtype), at, axis=0))

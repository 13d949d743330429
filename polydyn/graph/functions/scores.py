"""Final steps of classifiers and regressors of ai.onnx.ml: transformed scores, and labels of classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polydyn.graph.bodies import Body

ML = "ai.onnx.ml"
MAX_ZERO_SCORE = 1e-7
"""Largest score that SOFTMAX_ZERO excludes from the exponential."""


def post_transform(b: Body, x: str, kind: str, dtype: str) -> str:
    """Transform [samples, scores] by ONNX Runtime's formulas."""
    if kind == "NONE":
        return x
    if kind == "LOGISTIC":
        return b.op("Sigmoid", x)
    if kind == "SOFTMAX":
        return b.op("Softmax", x, axis=-1)

    def one(v: float) -> str:
        return b.constant(v, dtype)

    if kind == "SOFTMAX_ZERO":
        top = b.reduce("ReduceMax", x, -1)
        small = b.op("LessOrEqual", b.op("Abs", x), one(MAX_ZERO_SCORE))
        scaled = b.op("Mul", x, b.op("Exp", b.op("Neg", top)))
        each = b.op("Where", small, scaled, b.op("Exp", b.op("Sub", x, top)))
        total = b.reduce("ReduceSum", each, -1)
        return b.op("Where", b.op("Equal", total, one(0)), one(0.5), b.op("Div", each, total))
    if kind != "PROBIT":
        raise b.refuse(f"the transform {kind}")
    y = b.op("Sub", b.op("Mul", x, one(2)), one(1))
    log = b.op("Log", b.op("Mul", b.op("Sub", one(1), y), b.op("Add", one(1), y)))
    v = b.op("Add", one(2 / (3.14159 * 0.147)), b.op("Mul", one(0.5), log))
    root = b.op("Sqrt", b.op("Sub", b.op("Mul", v, v), b.op("Mul", one(1 / 0.147), log)))
    size = b.op("Sqrt", b.op("Sub", root, v))
    return b.op("Mul", one(1.41421356), b.op("Where", b.op("Less", y, one(0)), b.op("Neg", size), size))


def pair(b: Body, low: str, high: str) -> str:
    """Join two columns to [samples, 2]."""
    return b.op("Concat", low, high, axis=1)


def class_outputs(b: Body, totals: str, ranked: str, labels: Sequence[object], kind: str, dtype: str) -> None:
    """Output the labels of the maximum of ``ranked``, and the transformed totals as float32; both [samples,
    classes].
    """
    set_labels(b, b.op("ArgMax", ranked, axis=1, keepdims=0), labels)
    set_scores(b, post_transform(b, totals, kind, dtype), dtype)


def one_of_two(
    b: Body, totals: str, labels: Sequence[object], kind: str, only: int, positive: bool, dtype: str
) -> None:
    """Output labels and scores of two classes, of which only class number ``only`` has weights.

    ``positive``: no weight is negative, so the total is a probability. As in ONNX Runtime, the total of the first class
    belongs to the second one, and LOGISTIC is the only transform that changes it.
    """
    s = b.op("Slice", totals, b.constant([only]), b.constant([only + 1]), b.constant([1]))
    above = b.op("Greater", s, b.constant(0.5 if positive else 0.0, dtype))
    set_labels(b, b.op("Squeeze", b.cast(above, "int64"), b.constant([1])), labels)
    if only == 1:
        scores = post_transform(b, totals, kind, dtype)
    elif kind == "LOGISTIC":
        scores = b.op("Sigmoid", pair(b, b.op("Neg", s), s))
    else:
        scores = pair(b, b.op("Sub", b.constant(1.0 if positive else 0.0, dtype), s), s)
    set_scores(b, scores, dtype)


def set_one_class(b: Body, totals: str, labels: Sequence[object], dtype: str) -> None:
    """Output 1 for a positive total, else 0, and the unchanged total."""
    above = b.op("Greater", totals, b.constant(0.0, dtype))
    b.set_output(b.op("Squeeze", b.cast(above, "int64"), b.constant([1])))
    set_scores(b, totals, dtype)


def set_scores(b: Body, scores: str, dtype: str) -> None:
    """Output scores as float32, as the second output."""
    b.set_output(b.cast(scores, "float32") if dtype != "float32" else scores, 1)


def set_labels(b: Body, best: str, labels: Sequence[object]) -> None:
    """Output the labels of class numbers as the first output."""
    b.set_output(b.op("Gather", b.constant(np.array(labels, np.int64)), best, axis=0))

"""Support vector machines of ai.onnx.ml, by ONNX Runtime's formulas.

A classifier has a score for each pair of classes; the class with the most pairs wins. Probabilities of pairs are
combined into those of classes by an iteration (Wu, Lin and Weng, 2004) that ends at an error of 0.005, so its steps
match those of ONNX Runtime.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from polydyn.errors import ModelError
from polydyn.graph.bodies import Body, body
from polydyn.graph.functions.forests import samples
from polydyn.graph.functions.recurrent import Step
from polydyn.graph.functions.scores import ML, pair, post_transform, set_labels, set_scores
from polydyn.graph.importer import ImportedGraph, ModelInput, inner_prefix
from polydyn.schedules.expr import Array

DTYPE = "float32"
MAX_ROUNDS, MAX_ERROR = 100, 0.005
"""Maximum rounds of the iteration, and the error at which it ends, times the number of classes."""
MIN_PROBABILITY = 1e-7
"""Minimum distance of pair probabilities from 0 and 1."""


def _floats(b: Body, name: str) -> Array:
    return np.asarray(b.attribute(name, ()), DTYPE).reshape(-1)


def _rows(b: Body, values: Array, count: int) -> Array:
    """Reshape to [count, columns]. Raises ModelError for a wrong number of values."""
    if count < 1 or values.size % count or not values.size:
        raise ModelError(f"{values.size} numbers for {count} rows", node=b.node.name, rule=b.node.op)
    return values.reshape(count, -1)


def _kernel(b: Body, x: str, vectors: Array, kind: str) -> str:
    """Return [samples, vectors]: the kernel of each sample and each vector."""
    gamma, offset, degree = (*b.attribute("kernel_params", ()), 0.0, 0.0, 0.0)[:3]
    if kind == "RBF":
        apart = b.op("Sub", b.op("Unsqueeze", x, b.constant([1])), b.constant(vectors, DTYPE))
        far = b.reduce("ReduceSum", b.op("Mul", apart, apart), -1, keepdims=0)
        return b.op("Exp", b.op("Mul", far, b.constant(-gamma, DTYPE)))
    total = b.op("MatMul", x, b.constant(np.ascontiguousarray(vectors.T), DTYPE))
    if kind == "LINEAR":
        return total
    total = b.op("Add", b.op("Mul", total, b.constant(gamma, DTYPE)), b.constant(offset, DTYPE))
    if kind == "POLY":
        return b.op("Pow", total, b.constant(degree, DTYPE))
    if kind != "SIGMOID":
        raise b.refuse(f"the kernel {kind}")
    return b.op("Tanh", total)


@body(f"{ML}::SVMRegressor")
def svm_regressor(b: Body) -> None:
    """Compute [samples, 1]: the sum of kernels with the support vectors, or of the features, plus rho."""
    x, _ = samples(b)
    weights, count = _floats(b, "coefficients"), int(b.attribute("n_supports", 0))
    x, kind = b.cast(x, DTYPE), b.attribute("kernel_type", "LINEAR")
    b.ignore("post_transform", "kernel_params", "support_vectors")  # ONNX Runtime applies no transform
    if count:
        x = _kernel(b, x, _rows(b, _floats(b, "support_vectors"), count), kind)
    total = b.op("MatMul", x, b.constant(weights.reshape(-1, 1), DTYPE))
    total = b.op("Add", total, b.constant(_floats(b, "rho")[:1], DTYPE))
    if b.attribute("one_class", 0):
        above = b.op("Greater", total, b.constant(0.0, DTYPE))
        total = b.op("Where", above, b.constant(1.0, DTYPE), b.constant(-1.0, DTYPE))
    b.set_output(total)


@body(f"{ML}::SVMClassifier")
def svm_classifier(b: Body) -> None:
    """Compute the class with the most pairs, or with the largest score without support vectors; scores as float32."""
    x, _ = samples(b)
    x, labels = b.cast(x, DTYPE), b.attribute("classlabels_ints", ())
    sizes = np.asarray(b.attribute("vectors_per_class", ()), np.int64)
    b.ignore("support_vectors", "kernel_type", "kernel_params", "prob_a", "prob_b")
    if sizes.sum() == 0:
        _linear(b, x, labels)
    elif sizes.size != len(labels) or len(labels) < 2:
        raise ModelError(f"vectors of {sizes.size} classes for {len(labels)} labels", node=b.node.name, rule=b.node.op)
    else:
        _pairs(b, x, labels, sizes)


def _linear(b: Body, x: str, labels: tuple[int, ...]) -> None:
    """Score each class by a row of coefficients."""
    weights, kind = _floats(b, "coefficients"), b.attribute("post_transform", "NONE")
    scores = _kernel(b, x, _rows(b, weights, len(labels)), "LINEAR")
    scores = b.op("Add", scores, b.constant(_floats(b, "rho")[:1], DTYPE))
    best = b.op("ArgMax", scores, axis=1, keepdims=0)
    if len(labels) == 2 and not _floats(b, "prob_a").size:  # a score above the threshold selects the second class
        positive = bool((weights >= 0).all())
        top, least = b.reduce("ReduceMax", scores, 1, keepdims=0), b.constant(0.5 if positive else 0.0, DTYPE)
        second = b.op("GreaterOrEqual" if positive else "Greater", top, least)
        best = b.op("Where", second, b.constant(1), best)
    set_labels(b, best, labels)
    set_scores(b, post_transform(b, scores, kind, DTYPE), DTYPE)


def _pairs(b: Body, x: str, labels: tuple[int, ...], sizes: Array) -> None:
    """Score each pair of classes."""
    count, kind = len(labels), b.attribute("post_transform", "NONE")
    vectors = _rows(b, _floats(b, "support_vectors"), int(sizes.sum()))
    weights = _rows(b, _floats(b, "coefficients"), count - 1)
    duels, ends = list(combinations(range(count), 2)), np.concatenate([[0], np.cumsum(sizes)])
    rho = _floats(b, "rho")[: len(duels)]
    if weights.shape[1] != vectors.shape[0] or rho.size < len(duels):
        raise ModelError("coefficients or rho differ in number from the vectors", node=b.node.name, rule=b.node.op)
    table = np.zeros((vectors.shape[0], len(duels)), DTYPE)
    first, second = (np.zeros((len(duels), count), DTYPE) for _ in range(2))
    for k, (i, j) in enumerate(duels):
        own, other = slice(ends[i], ends[i + 1]), slice(ends[j], ends[j + 1])
        table[own, k], table[other, k] = weights[j - 1, own], weights[i, other]
        first[k, i], second[k, j] = 1, 1
    kernel = _kernel(b, x, vectors, b.attribute("kernel_type", "LINEAR"))
    scores = b.op("Add", b.op("MatMul", kernel, b.constant(table, DTYPE)), b.constant(rho, DTYPE))
    won = b.cast(b.op("Greater", scores, b.constant(0.0, DTYPE)), DTYPE)
    votes = b.op("Add", b.op("MatMul", won, b.constant(first - second, DTYPE)), b.constant(second.sum(0), DTYPE))
    set_labels(b, b.op("ArgMax", votes, axis=1, keepdims=0), labels)
    slopes, offsets = _floats(b, "prob_a"), _floats(b, "prob_b")
    if slopes.size:
        line = b.op("Add", b.op("Mul", scores, b.constant(slopes, DTYPE)), b.constant(offsets, DTYPE))
        one = b.op("Sub", b.constant(1.0, DTYPE), b.op("Sigmoid", line))
        of_pairs = b.op("Clip", one, b.constant(MIN_PROBABILITY, DTYPE), b.constant(1 - MIN_PROBABILITY, DTYPE))
        scores = post_transform(b, _of_classes(b, of_pairs, duels, count), kind, DTYPE)
    elif count > 2:
        scores = post_transform(b, scores, kind, DTYPE)
    elif kind == "NONE":
        scores = pair(b, b.op("Neg", scores), scores)
    elif kind == "PROBIT":
        raise b.refuse("PROBIT of one score for two classes")
    elif kind == "LOGISTIC":
        scores = b.op("Sigmoid", pair(b, b.op("Neg", scores), scores))
    else:  # as in ONNX Runtime, no other transform changes a single score
        scores = pair(b, b.op("Sub", b.constant(1.0, DTYPE), scores), scores)
    set_scores(b, scores, DTYPE)


def _of_classes(b: Body, of_pairs: str, duels: list[tuple[int, int]], count: int) -> str:
    """Combine [samples, pairs], the probability of the first class of each pair, into [samples, classes]."""
    up, down = (np.zeros((len(duels), count * count), DTYPE) for _ in range(2))
    for k, (i, j) in enumerate(duels):
        up[k, i * count + j], down[k, j * count + i] = 1, 1
    flat = b.op("Add", b.op("MatMul", of_pairs, b.constant(up - down, DTYPE)), b.constant(down.sum(0), DTYPE))
    r = b.reshape(flat, -1, count, count)
    turned = b.op("Transpose", r, perm=(0, 2, 1))
    squares = b.reduce("ReduceSum", b.op("Mul", turned, turned), -1)
    q = b.op("Sub", b.op("Mul", b.constant(np.eye(count), DTYPE), squares), b.op("Mul", turned, r))
    n = b.size(of_pairs, 0)
    start = b.op("Expand", b.constant(1 / count, DTYPE), b.shape(n, count))
    done = b.op("Expand", b.constant(False, "bool"), b.shape(n, 1))
    graph = _round(b, q, count)
    return b.ops("Loop", 2, b.constant(MAX_ROUNDS), b.constant(True, "bool"), start, done, body=graph)[0]


def _round(b: Body, q: str, count: int) -> ImportedGraph:
    """Return one round of the iteration, for the samples that are not done."""
    s = Step(f"{inner_prefix(b.node)}round.", DTYPE)
    p, done = f"{s.prefix}p", f"{s.prefix}done"

    def whole(value: object, dtype: str) -> str:
        s.constants[name := f"{s.prefix}whole_{len(s.constants)}"] = np.asarray(value, dtype)
        return name

    last, one = whole([-1], "int64"), s.number(1)
    weighed = s.op("ReduceSum", s.op("Mul", q, s.op("Unsqueeze", p, whole([1], "int64"))), last, keepdims=0)
    total = s.op("ReduceSum", s.op("Mul", p, weighed), last)
    error = s.op("ReduceMax", s.op("Abs", s.op("Sub", weighed, total)), last)
    now = s.op("Or", done, s.op("Less", error, s.number(MAX_ERROR / count)))
    new, rows = p, s.ops("Split", count, q, axis=1, num_outputs=count)
    for i in range(count):
        unit = np.zeros((1, count), DTYPE)
        unit[0, i] = 1
        row = s.op("Squeeze", rows[i], whole([1], "int64"))
        own = s.op("ReduceSum", s.op("Mul", row, whole(unit, DTYPE)), last)
        at = s.op("ReduceSum", s.op("Mul", weighed, whole(unit, DTYPE)), last)
        step = s.op("Div", s.op("Sub", total, at), own)
        scale = s.op("Add", one, step)
        twice = s.op("Add", s.op("Mul", step, own), s.op("Mul", s.number(2), at))
        total = s.op("Div", s.op("Div", s.op("Add", total, s.op("Mul", step, twice)), scale), scale)
        weighed = s.op("Div", s.op("Add", weighed, s.op("Mul", step, row)), scale)
        new = s.op("Div", s.op("Add", new, s.op("Mul", step, whole(unit, DTYPE))), scale)
    result = s.op("Where", now, p, new)
    left = s.op("ReduceMax", s.op("Cast", s.op("Not", now), to=6), keepdims=0)
    inputs = (ModelInput(f"{s.prefix}i", "int64", ()), ModelInput(f"{s.prefix}more", "bool", ()))
    states = (ModelInput(p, DTYPE, None), ModelInput(done, "bool", None))
    outputs = (s.op("Cast", left, to=9), result, now)
    return ImportedGraph("round", (*inputs, *states), outputs, tuple(s.nodes), s.constants)

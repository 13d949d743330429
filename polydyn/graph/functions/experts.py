"""Mixtures of experts of com.microsoft: all experts compute all rows; a row weighs the outputs of k of them."""

from __future__ import annotations

from polydyn.graph.bodies import Body, body
from polydyn.graph.functions.attention import MICROSOFT


@body(f"{MICROSOFT}::MoE")
def mixture(b: Body) -> None:
    """Compute the weighted sum of two-layer networks. Experts that a row does not use count 0."""
    if b.attribute("use_sparse_mixer", 0):
        raise b.refuse("use_sparse_mixer")
    if b.input(6) or b.input(7):
        raise b.refuse("fc3", "write fc1 and fc3 as one fc1 with swiglu_fusion=1")
    x = b.input(0)
    rank = len(b.tensor(x).shape)
    rows = b.reshape(x, 1, -1, b.size(x, rank - 1))
    hidden = _activated(b, _layer(b, rows, b.input(2), b.input(3)))
    outputs = _layer(b, hidden, b.input(4), b.input(5))
    weights = b.op("Unsqueeze", b.op("Transpose", _weights(b), perm=(1, 0)), b.constant([2]))
    zero = b.like(0, x)
    used = b.op("Where", b.op("Greater", weights, zero), b.op("Mul", outputs, weights), zero)
    b.set_output(b.op("Reshape", b.reduce("ReduceSum", used, 0, keepdims=0), b.op("Shape", x)))


def _layer(b: Body, x: str, weight: str, bias: str) -> str:
    """Return [experts, rows, outputs]: ``x W^T + bias`` of each expert."""
    total = b.op("MatMul", x, b.op("Transpose", weight, perm=(0, 2, 1)))
    return b.op("Add", total, b.op("Unsqueeze", bias, b.constant([1]))) if bias else total


def _activated(b: Body, x: str) -> str:
    """Return the activation of the first layer's outputs. SwiGLU multiplies each even one by the next odd one."""
    kind, like = b.attribute("activation_type", "relu"), b.input(0)
    fusion, limit = b.attribute("swiglu_fusion", 0), b.attribute("swiglu_limit")
    alpha, beta = b.attribute("activation_alpha", 1.0), b.attribute("activation_beta", 0.0)
    if kind == "swiglu":
        if fusion != 1 or b.attribute("swiglu_limit_after_activation", 0):
            raise b.refuse(f"swiglu_fusion={fusion}", "write interleaved pairs, swiglu_fusion=1")
        first, step = [b.constant([i]) for i in range(2)], b.constant([2])
        end, last = b.constant([2**62]), b.constant([2])
        gate, line = (b.op("Slice", x, i, end, last, step) for i in first)
        if limit is not None:
            gate = b.op("Min", gate, b.like(limit, like))
            line = b.op("Clip", line, b.like(-limit, like), b.like(limit, like))
        line = b.op("Add", line, b.like(beta, like)) if beta else line
        sigmoid = b.op("Sigmoid", b.op("Mul", gate, b.like(alpha, like)))
        return b.op("Mul", b.op("Mul", gate, sigmoid), line)
    if kind == "silu":
        return b.op("Mul", x, b.op("Sigmoid", x))
    if kind not in ("relu", "gelu", "identity"):
        raise b.refuse(f"activation_type={kind}")
    return x if kind == "identity" else b.op("Gelu", x, approximate="tanh") if kind == "gelu" else b.op("Relu", x)


def _weights(b: Body) -> str:
    """Return [rows, experts]: the probabilities of the k most likely experts, 0 for others.

    As in ONNX Runtime, the later one of two equal experts is used: TopK prefers the first, so their order is reversed.
    """
    router, one = b.input(1), b.constant([1])
    back = [b.constant([i]) for i in (-1, -(2**62), -1)]
    turned = b.op("Slice", b.op("Softmax", router, axis=1), back[0], back[1], one, back[2])
    values, places = b.ops("TopK", 2, turned, b.constant([b.attribute("k", 1)]), axis=1)
    if b.attribute("normalize_routing_weights", 0):
        values = b.op("Div", values, b.reduce("ReduceSum", values, 1))
    hot = b.op("OneHot", places, b.size(router, 1), b.constant([0, 1], b.tensor(router).dtype), axis=2)
    chosen = b.reduce("ReduceSum", b.op("Mul", hot, b.op("Unsqueeze", values, b.constant([2]))), 1, keepdims=0)
    return b.op("Slice", chosen, back[0], back[1], one, back[2])

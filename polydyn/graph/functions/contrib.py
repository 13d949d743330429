"""Fused operators of com.microsoft that optimizers and exporters write: products, activations, norms, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polydyn.graph.bodies import Body, body
from polydyn.graph.functions.attention import MICROSOFT

# -- products and activations ----------------------------------------------------------------------------------------


@body(f"{MICROSOFT}::FusedMatMul", f"{MICROSOFT}::TransposeMatMul")
def fused_matmul(b: Body) -> None:
    """Compute ``alpha * A B``, with each operand optionally transposed."""
    if b.attribute("transBatchA", 0) or b.attribute("transBatchB", 0):
        raise b.refuse("transBatchA or transBatchB")
    names = []
    for position, key in enumerate(("transA", "transB")):
        x = b.input(position)
        rank = len(b.tensor(x).shape)
        turn = b.attribute(key, 0) and rank > 1
        names.append(b.op("Transpose", x, perm=(*range(rank - 2), rank - 1, rank - 2)) if turn else x)
    alpha, total = b.attribute("alpha", 1.0), b.op("MatMul", *names)
    b.set_output(total if alpha == 1 else b.op("Mul", total, b.like(alpha, b.input(0))))


@body(f"{MICROSOFT}::Gelu")
def gelu(b: Body) -> None:
    """Expand to ONNX's Gelu."""
    b.set_output(b.op("Gelu", b.input(0)))


@body(f"{MICROSOFT}::BiasGelu")
def bias_gelu(b: Body) -> None:
    """Compute ``Gelu(x + bias)``."""
    b.set_output(b.op("Gelu", b.op("Add", b.input(0), b.input(1))))


@body(f"{MICROSOFT}::FastGelu")
def fast_gelu(b: Body) -> None:
    """Compute the tanh approximation of Gelu, of x plus an optional bias."""
    x = b.op("Add", b.input(0), b.input(1)) if b.input(1) else b.input(0)
    b.set_output(b.op("Gelu", x, approximate="tanh"))


@body(f"{MICROSOFT}::QuickGelu")
def quick_gelu(b: Body) -> None:
    """Compute ``x * sigmoid(alpha x)``."""
    x = b.input(0)
    alpha = b.op("Mul", x, b.like(b.attribute("alpha", 1.702), x))
    b.set_output(b.op("Mul", x, b.op("Sigmoid", alpha)))


@body(f"{MICROSOFT}::BiasSplitGelu")
def bias_split_gelu(b: Body) -> None:
    """Multiply the first half of x plus bias by the Gelu of the second half."""
    left, right = b.ops("Split", 2, b.op("Add", b.input(0), b.input(1)), axis=-1, num_outputs=2)
    b.set_output(b.op("Mul", left, b.op("Gelu", right)))


@body(f"{MICROSOFT}::BiasSoftmax")
def bias_softmax(b: Body) -> None:
    """Compute ``Softmax(x + bias)`` along the last axis."""
    rank = len(b.tensor(b.input(0)).shape)
    if b.attribute("axis", 1) % rank != rank - 1:
        raise b.refuse(f"axis {b.attribute('axis', 1)} of {rank}")
    b.ignore("is_inner_broadcast")
    b.set_output(b.op("Softmax", b.op("Add", b.input(0), b.input(1)), axis=-1))


ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Clip": (),
}  # fmt: skip
"""Maps an activation of FusedConv or FusedGemm to the attributes for its parameters."""


def activated(b: Body, x: str, like: str, kind: str, parameters: Any) -> str:
    """Add an activation after a product."""
    if not kind:
        return x
    if kind not in ACTIVATIONS:
        raise b.refuse(f"activation {kind}")
    if kind == "Clip":
        return b.op("Clip", x, *(b.like(float(p), like) for p in parameters))
    return b.op(kind, x, **dict(zip(ACTIVATIONS[kind], map(float, parameters), strict=False)))


@body(f"{MICROSOFT}::FusedConv")
def fused_conv(b: Body) -> None:
    """Expand to a convolution, plus Z if present, and an activation."""
    attributes = b.given("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    x = b.op("Conv", *filter(None, (b.input(0), b.input(1), b.input(2))), **attributes)
    x = b.op("Add", x, b.input(3)) if b.input(3) else x
    b.set_output(activated(b, x, b.input(0), b.attribute("activation", ""), b.attribute("activation_params", ())))


@body(f"{MICROSOFT}::FusedGemm")
def fused_gemm(b: Body) -> None:
    """Expand to a Gemm and an activation."""
    attributes = b.given("alpha", "beta", "transA", "transB")
    x = b.op("Gemm", *filter(None, b.node.inputs), **attributes)
    parameters = [b.attribute(f"activation_{k}") for k in ("alpha", "beta", "gamma")]
    kind = b.attribute("activation", "")
    b.set_output(activated(b, x, b.input(0), kind, [p for p in parameters if p is not None]))


# -- norms -----------------------------------------------------------------------------------------------------------


@body(f"{MICROSOFT}::SkipLayerNormalization")
def skip_layer_norm(b: Body) -> None:
    """Compute LayerNormalization of input + skip + bias. The sum is the fourth output."""
    x, skip, gamma, beta, bias = (b.input(i) for i in range(5))
    total = b.op("Add", x, skip)
    total = b.op("Add", total, bias) if bias else total
    zero = beta or b.op("Expand", b.like(0, x), b.op("Shape", gamma))
    epsilon = b.attribute("epsilon", 1e-5)
    if b.output(1) or b.output(2):
        for position, name in enumerate(b.ops("LayerNormalization", 3, total, gamma, zero, axis=-1, epsilon=epsilon)):
            b.set_output(name, position)
    else:
        b.set_output(b.op("LayerNormalization", total, gamma, zero, axis=-1, epsilon=epsilon))
    b.set_output(total, 3)


@body(f"{MICROSOFT}::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_norm(b: Body) -> None:
    """Compute RMSNormalization of input + skip + bias. The third output is the inverse root, the fourth the sum."""
    x, skip, gamma, bias = (b.input(i) for i in range(4))
    if b.output(1):
        raise b.refuse("the output mean", "no mean is computed: ONNX Runtime leaves it undefined")
    total = b.op("Add", x, skip)
    total = b.op("Add", total, bias) if bias else total
    epsilon = b.attribute("epsilon", 1e-5)
    b.set_output(b.op("RMSNormalization", total, gamma, opset=23, axis=-1, epsilon=epsilon))
    if b.output(2):
        b.set_output(_inverse_root(b, total, b.tensor(x).dtype, (-1,), epsilon), 2)
    b.set_output(total, 3)


@body("SimplifiedLayerNormalization", f"{MICROSOFT}::SimplifiedLayerNormalization")
def simplified_layer_norm(b: Body) -> None:
    """Expand to RMSNormalization. The second output is the inverse root."""
    x, scale = b.input(0), b.input(1)
    axis, epsilon = b.attribute("axis", -1), b.attribute("epsilon", 1e-5)
    if b.attribute("stash_type", 1) != 1:
        raise b.refuse("a stash_type other than float32")
    b.set_output(b.op("RMSNormalization", x, scale, opset=23, axis=axis, epsilon=epsilon))
    if b.output(1):
        rank = len(b.tensor(x).shape)
        b.set_output(_inverse_root(b, x, b.tensor(x).dtype, range(axis % rank, rank), epsilon), 1)


def _inverse_root(b: Body, x: str, dtype: str, axes: Iterable[int], epsilon: float) -> str:
    """Return ``1 / sqrt(mean of squares + epsilon)`` over axes, in float32 or wider. ``dtype``: that of ``x``."""
    wide = b.cast(x, "float64" if dtype == "float64" else "float32")
    mean = b.reduce("ReduceMean", b.op("Mul", wide, wide), *axes)
    root = b.op("Sqrt", b.op("Add", mean, b.op("CastLike", b.constant(epsilon, "float32"), mean)))
    return b.op("Reciprocal", root)


@body(f"{MICROSOFT}::EmbedLayerNormalization")
def embed_layer_norm(b: Body) -> None:
    """Compute LayerNormalization of the sum of word, position and segment embeddings, and the sums of the mask."""
    b.attribute("mask_index_type", 0)
    total = _embedded(b, lambda position, rows: b.op("Gather", b.input(position), rows), b.input(8))
    b.set_output(b.op("LayerNormalization", total, b.input(5), b.input(6), axis=-1, epsilon=_epsilon(b)))
    b.set_output(total, 2)


@body(f"{MICROSOFT}::QEmbedLayerNormalization")
def quantized_embed_layer_norm(b: Body) -> None:
    """Compute EmbedLayerNormalization of dequantized tables. Only the rows that it reads are dequantized."""

    def read(position: int, rows: str) -> str:
        x = b.op("Gather", b.input(position), rows) if rows else b.input(position)
        zero = b.input(position + 11)
        return b.op("DequantizeLinear", x, b.input(position + 6), *([zero] if zero else []))

    total = _embedded(b, read, "")
    b.set_output(b.op("LayerNormalization", total, read(5, ""), read(6, ""), axis=-1, epsilon=_epsilon(b)))


def _epsilon(b: Body) -> Any:
    return b.attribute("epsilon", 1e-12)


def _embedded(b: Body, read: Callable[[int, str], str], where: str) -> str:
    """Return the sum of the embeddings, and set the sums of the mask. ``read``: the rows of the table at an input.

    ``where``: positions, or ``""`` for 0, 1, 2 ...
    """
    ids, segments, mask = b.input(0), b.input(1), b.input(7)
    if not where:
        length = b.op("Squeeze", b.size(ids, 1), b.constant([0]))
        where = b.op("Range", b.constant(0), length, b.constant(1))
    total = b.op("Add", read(2, ids), read(3, where))
    if segments:
        total = b.op("Add", total, read(4, segments))
    if b.output(1):
        sums = b.cast(mask, "int32") if mask else b.op("Expand", b.constant(0, "int32"), b.op("Shape", ids))
        b.set_output(b.reduce("ReduceSum", sums, 1, keepdims=0), 1)
    return total


@body(f"{MICROSOFT}::GridSample")
def grid_sample(b: Body) -> None:
    """Expand to ONNX's GridSample of opset 16, which has the same names of modes."""
    attributes = b.given("align_corners", "mode", "padding_mode")
    b.set_output(b.ops("GridSample", 1, b.input(0), b.input(1), opset=16, **attributes)[0])


@body(f"{MICROSOFT}::CDist")
def distances(b: Body) -> None:
    """Compute the distance of every row of A to every row of B, squared by default."""
    metric = b.attribute("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise b.refuse(f"metric={metric}", "ONNX Runtime knows sqeuclidean and euclidean")
    rows, columns = b.op("Unsqueeze", b.input(0), b.constant([1])), b.op("Unsqueeze", b.input(1), b.constant([0]))
    squares = b.reduce("ReduceSumSquare", b.op("Sub", rows, columns), -1, keepdims=0)
    b.set_output(squares if metric == "sqeuclidean" else b.op("Sqrt", squares))

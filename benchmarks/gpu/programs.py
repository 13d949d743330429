"""Programs that are checked on a device: one group of each kind at the edges of tiles, and whole small models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.gpu import weights
from benchmarks.gpu.halves import BOUND, of_type
from polydyn.testing.inputs import shapes

KINDS = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8,
}  # fmt: skip
LIMITS = {"float32": 1e-4, "float16": 4e-3}
"""Tolerated error of the norm; the reference rounds float16 at every node, sums are float32 in both."""
BOUNDS = LIMITS | {"bfloat16": 3e-2, "tf32": 2e-3, "int8": 0.0, "float8": 1e-2}
"""Tolerated errors, including types that only products and attention are tested in."""
EDGES = (1, 7, 63, 64, 65, 129)
HALVES = {
    "bert_tiny": ("float16", "bfloat16"), "gpt2_tiny": ("float16", "bfloat16"), "gpt2_past_tiny": ("float16",),
    "llama_tiny": ("float16",), "t5_tiny": ("bfloat16",), "vit_tiny": ("float16",), "resnet_tiny": ("float16",),
}  # fmt: skip
"""Models that are packed in 16 bits too."""
MODELS = (*HALVES, "albert_tiny", "alexnet_tiny", "googlenet_tiny", "shufflenet_tiny", "squeezenet_tiny", "vit_hw_tiny")
"""Models that are packed, without densenet: its 400 kernels, which resemble resnet's, take a minute to compile."""


@dataclass(frozen=True)
class Case:
    """A program and the shapes at which it is run.

    ``kind`` selects the stages of a case. ``rival``: torch's computation of the same (``rivals``), or empty if the case
    is only checked. ``reference``: the model whose outputs are correct, by default the same one; ``limit``: tolerated
    error of the norm, by default the limit of ``dtype``.
    """

    name: str
    kind: str
    model: onnx.ModelProto
    shapes: Sequence[Mapping[str, int]]
    dtype: str = "float32"
    checked: int = field(default=10**6)
    """Number of shapes with inputs and correct outputs; further shapes are only timed."""
    rival: str = ""
    reference: onnx.ModelProto | None = None
    limit: float | None = None


def model(nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, tuple[str, Sequence[Any]]], **constants: Any) -> Any:
    """Build a model with one output, ``y``; ``inputs`` maps a name to dtype and dims."""
    graph = helper.make_graph(
        list(nodes), "g", [helper.make_tensor_value_info(n, KINDS[t], list(d)) for n, (t, d) in inputs.items()],
        [onnx.ValueInfoProto(name="y")], [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def node(op: str, *inputs: str, to: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [to], name=f"{op}_{to}", **attributes)


def inner_convolution(
    w: np.ndarray[Any, Any], side: Sequence[int | str], stride: int = 1, groups: int = 1
) -> onnx.ModelProto:
    """Build a padded convolution as inside a network: image and result are channels-last.

    ``side``: size of the image.
    """
    nodes = [node("Transpose", "x", to="t", perm=[0, 3, 1, 2]),
             node("Conv", "t", "w", to="u", pads=[w.shape[2] // 2] * 4, strides=[stride] * 2, group=groups),
             node("Transpose", "u", perm=[0, 2, 3, 1])]  # fmt: skip
    return model(nodes, {"x": (str(w.dtype), ["B", *side, w.shape[1] * groups])}, w=w)


def mean_of_pixels(channels: int) -> onnx.ModelProto:
    """Build a mean over a channels-last image."""
    nodes = [node("Transpose", "x", to="t", perm=[0, 3, 1, 2]), node("GlobalAveragePool", "t")]
    return model(nodes, {"x": ("float16", ["B", "H", "W", channels])})


def groups(quick: bool) -> Iterator[Case]:
    """Yield one group of each kind, at the edges of tiles."""
    edges = EDGES[1::3] if quick else EDGES
    square = [{"M": a, "N": b, "K": c} for a, b, c in zip(edges, reversed(edges), [*edges[1:], 200], strict=True)]
    matrices = {t: {"a": (t, ["M", "K"]), "b": (t, ["K", "N"])} for t in LIMITS}
    biased = [node("MatMul", "a", "b", to="t"), node("Add", "t", "c", to="u"), node("Relu", "u")]
    for t in LIMITS:
        yield Case(f"gemm_{t}", "kernels", model([node("MatMul", "a", "b")], matrices[t]), square, t)
        yield Case(f"gemm_bias_{t}", "kernels", model(biased, matrices[t] | {"c": (t, ["N"])}), square, t)
    yield from tensor_cores(edges)
    rows = [{"M": m, "N": n} for m, n in zip(edges, reversed(edges), strict=True)] + [{"M": 3, "N": 5000}]
    for t in LIMITS:
        x = {"x": (t, ["M", "N"])}
        yield Case(f"softmax_{t}", "kernels", model([node("Softmax", "x", axis=-1)], x), rows, t)
        yield Case(f"column_sum_{t}", "kernels", model([node("ReduceSum", "x", "axis")], x, axis=[0]), rows, t)
    vectors = {"x": ("float32", ["M", "N"]), "s": ("float32", ["N"]), "b": ("float32", ["N"])}
    normal = model([node("LayerNormalization", "x", "s", "b", axis=-1)], vectors)
    yield Case("layernorm", "kernels", normal, rows)
    broadcast = [node("Mul", "x", "s", to="t"), node("Erf", "t", to="u"), node("Add", "u", "b")]
    yield Case("broadcast", "kernels", model(broadcast, vectors), rows)
    image = {"x": ("float32", ["B", 3, "H", "W"]), "w": ("float32", [8, 3, 3, 3])}
    conv = model([node("Conv", "x", "w", pads=[1, 1, 1, 1], strides=[2, 2])], image)
    yield Case("convolution", "kernels", conv, [{"B": 1, "H": 9, "W": 12}, {"B": 2, "H": 31, "W": 17}])
    if not quick:
        inner = inner_convolution(weights.convolution(64, 64, 3), ("H", "W"), 2)
        edges_of_images = [{"B": b, "H": h, "W": w} for b, h, w in ((1, 1, 1), (2, 31, 17), (3, 64, 57), (5, 120, 118))]
        yield Case("convolution_inside", "kernels", inner, edges_of_images, "float16")
        depthwise = inner_convolution(weights.convolution(1, 48, 3), ("H", "W"), 2, groups=48)
        yield Case("depthwise", "kernels", depthwise, edges_of_images, "float16")
        yield Case("mean_of_pixels", "kernels", mean_of_pixels(48), edges_of_images, "float16")
    table = {"x": ("float32", [50, "N"]), "i": ("int64", ["M"])}
    yield Case("gather", "kernels", model([node("Gather", "x", "i", axis=0)], table), rows)
    yield from narrow(square)
    yield from attention(quick)


def narrow(square: Sequence[Mapping[str, int]]) -> Iterator[Case]:
    """Yield products on the tensor cores' other types."""
    product = [node("MatMul", "a", "b")]
    for t, bound in (("bfloat16", "bfloat16"), ("float32", "tf32")):
        made = model(product, {"a": (t, ["M", "K"]), "b": (t, ["K", "N"])})
        yield Case(f"gemm_{bound}", "kernels", made, square, bound)
    whole = [node("MatMulInteger", "a", "b")]
    for a in ("int8", "uint8"):
        made = model(whole, {"a": (a, ["M", "K"]), "b": ("int8", ["K", "N"])})
        yield Case(f"gemm_{a}_int8", "kernels", made, square, "int8")


def attention(quick: bool) -> Iterator[Case]:
    """Yield attention of two heads of 64, one kernel."""
    nodes = [
        node("Transpose", "k", to="t", perm=[0, 1, 3, 2]), node("MatMul", "q", "t", to="s"),
        node("Mul", "s", "c", to="u"), node("Softmax", "u", to="w", axis=-1), node("MatMul", "w", "v"),
    ]  # fmt: skip
    lengths = ((1, 1, 1), (2, 65, 129)) if quick else ((1, 1, 1), (1, 64, 64), (2, 65, 129), (1, 7, 300), (3, 130, 63))
    wanted = [{"B": b, "L": n, "T": t} for b, n, t in lengths]
    for t in (*LIMITS, "bfloat16"):
        dims = {"q": (t, ["B", 2, "L", 64]), "k": (t, ["B", 2, "T", 64]), "v": (t, ["B", 2, "T", 64])}
        made = model(nodes, dims, c=np.asarray(0.125, helper.tensor_dtype_to_np_dtype(KINDS[t])))
        yield Case(f"attention_{t}", "kernels", made, wanted, t)


def tensor_cores(edges: Sequence[int]) -> Iterator[Case]:
    """Yield tf32 and byte products for warps and warpgroups, at the edges of tiles; rows are multiples of 16 bytes."""
    turned = [node("Transpose", "b", to="t", perm=[1, 0]), node("MatMul", "a", "t")]
    sizes = [{"M": a, "N": b, "K": 4 * c} for a, b, c in zip(edges, reversed(edges), (*edges[1:], 41), strict=True)]
    single = model(turned, {"a": ("float32", ["M", "K"]), "b": ("float32", ["N", "K"])})
    yield Case("gemm_tf32_along_k", "kernels", single, [*sizes, {"M": 520, "N": 392, "K": 528}], "tf32")
    quantized = [node("QuantizeLinear", "x", "scale", "zero", to="q"), node("MatMulInteger", "q", "w")]
    w = np.random.default_rng(0).integers(-128, 128, (656, 392), np.int8)
    bytes_ = model(quantized, {"x": ("float32", ["M", 656])}, scale=np.float32(0.02), zero=np.int8(0), w=w)
    yield Case("gemm_int8_weights", "kernels", bytes_, [{"M": m} for m in (*edges, 520)], "int8")


def models(paths: Sequence[Path], quick: bool) -> Iterator[Case]:
    """Yield whole models at two of their shapes; text and ViT also in 16 bits, against the float32 model."""
    for path in paths:
        chosen = [shapes(path.stem)[k] for k in ((1,) if quick else (1, 3))]
        original = onnx.load(path)
        yield Case(path.stem, "models", original, chosen)
        for dtype in HALVES.get(path.stem, ()):
            bound = BOUND[dtype]
            half = of_type(path, dtype)
            yield Case(f"{path.stem}_{dtype}", "models", half, chosen, dtype, reference=original, limit=bound)

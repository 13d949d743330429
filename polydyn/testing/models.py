"""One-operator ONNX models with symbolic sizes, written to files that every contestant can load.

Weights are standard normal divided by the square root of the depth, from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Dims = Sequence[int | str]
OPSET = 20


def model(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Dims | onnx.ValueInfoProto],
    constants: Mapping[str, Array] | None = None,
    **metadata: str,
) -> onnx.ModelProto:
    """Build a model whose output ``y`` is the last node's; inputs are float32 of the dims unless passed as whole."""
    values = [
        v if isinstance(v, onnx.ValueInfoProto) else helper.make_tensor_value_info(n, TensorProto.FLOAT, list(v))
        for n, v in inputs.items()
    ]
    initializers = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), name, values, [helper.make_empty_tensor_value_info("y")], initializers)
    graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    sets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    result = helper.make_model(graph, opset_imports=sets, ir_version=10)
    helper.set_model_props(result, metadata)
    return result


def save(proto: onnx.ModelProto, folder: Path) -> Path:
    """Write ``<name>.onnx`` and return its path."""
    path = folder / f"{proto.graph.name}.onnx"
    onnx.save_model(proto, str(path))
    return path


def _weight(rows: int, columns: int, seed: int = 0) -> Array:
    r = np.random.default_rng(seed)
    weight: Array = (r.standard_normal((rows, columns), np.float32) / np.sqrt(rows)).astype(np.float32)
    return weight


def gemm(n: int, k: int) -> onnx.ModelProto:
    """Build y[M, n] = x[M, k] @ constant."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return model(f"gemm_n{n}_k{k}", nodes, {"x": ["M", k]}, {"w": _weight(k, n)})


def batched_gemm() -> onnx.ModelProto:
    """Build y[B, M, N] = a[B, M, K] @ b[B, K, N], every size symbolic."""
    inputs: dict[str, Dims] = {"a": ["B", "M", "K"], "b": ["B", "K", "N"]}
    return model("batched_gemm", [helper.make_node("MatMul", ["a", "b"], ["y"])], inputs)


def linears(count: int = 24, narrow: int = 768, wide: int = 3072) -> onnx.ModelProto:
    """Build a chain of ``count`` products x -> wide -> narrow -> ...: more weights than any cache holds."""
    sizes = [(narrow, wide), (wide, narrow)]
    constants = {f"w{i}": _weight(*sizes[i % 2], seed=i) for i in range(count)}
    names = ["x", *(f"h{i}" for i in range(1, count)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(count)]
    return model(f"linears_{count}", nodes, {"x": ["M", narrow]}, constants)


def layer_norm(width: int) -> onnx.ModelProto:
    """Build LayerNormalization over the last axis of x[R, width], scale and bias constant."""
    r = np.random.default_rng(0)
    constants = {n: r.standard_normal(width, np.float32) for n in ("scale", "bias")}
    node = helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"], axis=-1)
    return model(f"layer_norm_{width}", [node], {"x": ["R", width]}, constants)


def unary(operator: str, dims: Dims, **attributes: Any) -> onnx.ModelProto:
    """Build one operator of one input."""
    return model(operator.lower(), [helper.make_node(operator, ["x"], ["y"], **attributes)], {"x": dims})


def binary(operator: str, a: Dims, b: Dims, name: str) -> onnx.ModelProto:
    """Build one element-wise operator of two inputs, broadcast according to their dims."""
    return model(name, [helper.make_node(operator, ["a", "b"], ["y"])], {"a": a, "b": b})


def transpose(dims: Dims, perm: Sequence[int], name: str) -> onnx.ModelProto:
    """Build a copy in another order of axes."""
    return model(name, [helper.make_node("Transpose", ["x"], ["y"], perm=list(perm))], {"x": dims})


def _attention_inputs(heads: int, depth: int, mask: int) -> dict[str, Dims | onnx.ValueInfoProto]:
    width = heads * depth
    inputs: dict[str, Dims | onnx.ValueInfoProto] = {n: ["B", "L", width] for n in ("q", "k", "v")}
    return inputs | {"attention_mask": helper.make_tensor_value_info("attention_mask", mask, ["B", "L"])}


def attention(heads: int = 12, depth: int = 64) -> onnx.ModelProto:
    """Build attention as exporters write it.

    Inputs are q, k, v [B, L, heads*depth] and an int64 mask [B, L]; the output is [B, L, heads*depth].
    """

    def node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(operator, list(inputs), [output], **attributes)

    nodes = []
    for name, perm in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
        nodes += [
            node("Reshape", [name, "heads"], f"{name}_r"),
            node("Transpose", [f"{name}_r"], f"{name}_t", perm=perm),
        ]
    nodes += [
        node("Unsqueeze", ["attention_mask", "axes"], "m4"),
        node("Cast", ["m4"], "mf", to=TensorProto.FLOAT),
        node("Sub", ["one", "mf"], "away"),
        node("Mul", ["away", "lowest"], "bias"),
        node("MatMul", ["q_t", "k_t"], "s"),
        node("Div", ["s", "root"], "scaled"),
        node("Add", ["scaled", "bias"], "masked"),
        node("Softmax", ["masked"], "p", axis=-1),
        node("MatMul", ["p", "v_t"], "o"),
        node("Transpose", ["o"], "o_t", perm=(0, 2, 1, 3)),
        node("Reshape", ["o_t", "whole"], "y"),
    ]
    constants = {
        "heads": np.array([0, 0, heads, depth]),
        "whole": np.array([0, 0, heads * depth]),
        "axes": np.array([1, 2]),
        "one": np.float32(1),
        "lowest": np.float32(np.finfo(np.float32).min),
        "root": np.float32(np.sqrt(depth)),
    }
    arrays = {n: np.asarray(a) for n, a in constants.items()}
    inputs = _attention_inputs(heads, depth, TensorProto.INT64)
    return model("attention", nodes, inputs, arrays, heads=str(heads), torch="attention")


def fused_attention(heads: int = 12, depth: int = 64) -> onnx.ModelProto:
    """Build ``attention`` with ONNX Runtime's own MultiHeadAttention; the mask is int32."""
    inputs = _attention_inputs(heads, depth, TensorProto.INT32)
    names = ["q", "k", "v", "", "attention_mask"]
    node = helper.make_node("MultiHeadAttention", names, ["y"], domain="com.microsoft", num_heads=heads)
    return model("fused_attention", [node], inputs)


def image_dims(axes: int) -> tuple[str, ...]:
    """Return the symbolic sizes of images with ``axes`` axes of pixels: N, then the pixel axes."""
    return ("N", *"DHW"[3 - axes :])


def convolution(
    operator: str,
    channels: int,
    outputs: int,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    group: int = 1,
) -> onnx.ModelProto:
    """Build a convolution, pooling or block of x[N, channels, pixels..].

    ``operator``: a ``Conv`` or ``ConvTranspose`` with a bias, ``MaxPool``, ``AveragePool``, or a ``Block`` with
    ``outputs`` channels inside (``inverted_residual``). ``pads``: on both sides of each axis.
    """
    if operator == "Block":
        return inverted_residual(channels, outputs, kernel[0], strides[0])
    shape: dict[str, Any] = {"kernel_shape": list(kernel), "strides": list(strides), "pads": [*pads, *pads]}
    name = f"{operator.lower()}{'x'.join(map(str, kernel))}_s{strides[0]}_c{channels}"
    name += f"_o{outputs}" * (outputs != channels) + f"_g{group}" * (group > 1)
    name += f"_d{dilations[0]}" if dilations else ""
    n, *pixels = image_dims(len(kernel))
    if operator.endswith("Pool"):
        return model(name, [helper.make_node(operator, ["x"], ["y"], **shape)], {"x": [n, channels, *pixels]})
    shape |= {"group": group} | ({"dilations": list(dilations)} if dilations else {})
    node = helper.make_node(operator, ["x", "w", "b"], ["y"], **shape)
    ends = (outputs, channels // group) if operator == "Conv" else (channels, outputs // group)
    r = np.random.default_rng(0)
    w = r.standard_normal((*ends, *kernel), np.float32) / np.float32(ends[1] * np.prod(kernel)) ** 0.5
    constants = {"w": w.astype(np.float32), "b": r.standard_normal(outputs, np.float32)}
    return model(name, [node], {"x": [n, channels, *pixels]}, constants)


def inverted_residual(narrow: int, wide: int, kernel: int, stride: int = 1) -> onnx.ModelProto:
    """Build MobileNet's block of x[N, narrow, H, W]: a 1x1 convolution, a depthwise one, a 1x1 convolution."""
    shape: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w", "b_"], ["c"], group=wide, **shape),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w1"], ["y"]),
    ]
    ends = {"w0": _weight(wide, narrow)[..., None, None], "w1": _weight(narrow, wide)[..., None, None]}
    inputs: dict[str, Dims | onnx.ValueInfoProto] = {"x": ["N", narrow, "H", "W"]}
    return model(f"inverted{kernel}_s{stride}_c{wide}", nodes, inputs, ends | _taps(wide, kernel, "_"))


def _taps(channels: int, kernel: int, suffix: str) -> dict[str, Array]:
    """Return weights ``w`` of a depthwise convolution, and its bias ``b<suffix>``."""
    r = np.random.default_rng(0)
    taps = r.standard_normal((channels, 1, kernel, kernel), np.float32) / kernel
    return {"w": taps.astype(np.float32), f"b{suffix}": r.standard_normal(channels, np.float32)}


def dynamic_linear(n: int, k: int, zero: int = 0) -> onnx.ModelProto:
    """Build y[M, n] = x[M, k] @ constant + constant, as dynamic quantization to 8 bits writes it.

    ``zero``: the zero point of uint8 weights; with 0 the weights are int8.
    """
    node = helper.make_node
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z", "zw"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["s", "sw"], ["m"]),
        node("Mul", ["f", "m"], ["g"]),
        node("Add", ["g", "b"], ["y"]),
    ]
    w = _weight(k, n)
    scale = np.float32(np.abs(w).max() / (255 - zero if zero else 127))
    q: Array = (
        np.clip(np.rint(w / scale) + zero, 0, 255).astype(np.uint8) if zero else np.rint(w / scale).astype(np.int8)
    )
    point = q.dtype.type(zero)
    constants = {"w": q, "zw": point, "sw": scale, "b": np.linspace(-1, 1, n, dtype=np.float32)}
    name = f"linear8_n{n}_k{k}" + (f"_zero{zero}" if zero else "")
    return model(name, nodes, {"x": ["M", k]}, {t: np.asarray(a) for t, a in constants.items()})


def linear_of_nibbles(n: int, k: int, block: int = 32, accuracy: int = 0) -> onnx.ModelProto:
    """Build y[M, n] = x[M, k] @ 4-bit constant, with a scale for each ``block`` steps (MatMulNBits).

    ``accuracy``: ONNX Runtime's level, 4 for sums of bytes.
    """
    r = np.random.default_rng(0)
    packed = r.integers(0, 256, (n, k // block, block // 2)).astype(np.uint8)
    scales: Array = ((r.random((n, k // block)) + 0.5) / 8 / np.sqrt(k)).astype(np.float32)
    attributes: dict[str, Any] = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": accuracy}
    nodes = [helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)]
    return model(f"linear4_n{n}_k{k}_level{accuracy}", nodes, {"x": ["M", k]}, {"w": packed, "s": scales})

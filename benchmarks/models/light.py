"""The architectures of the onnx package's light models, with new random weights.

The package stores them with equal weights, made by ConstantOfShape nodes: they test parsing, not arithmetic. Here each
weight is drawn from a seed at a scale that keeps activations O(1), the batch becomes the symbol N, and H and W become
symbols if the graph pools any remaining size (DenseNet, SqueezeNet). The others contain sizes that only hold for
224 x 224: AlexNet and GoogLeNet flatten to a fixed length, ShuffleNet's channel shuffles contain H and W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Light:
    """``file``: the package's name. ``free``: H and W become symbols. ``channels``: maps every channel count.

    ``gain``: variance of filters times their fan-in, chosen so that the class scores neither saturate nor vanish.
    """

    file: str
    free: bool = False
    channels: Callable[[int], int] = lambda c: c
    gain: float = 2.0


def _divided(by: int) -> Callable[[int], int]:
    """Return a map that divides channel counts, except 3 colours, 1 channel per group, and 10 classes."""
    return lambda c: {1: 1, 3: 3, 1000: 10}.get(c, c // by)


_ALEX = {1: 1, 3: 3, 1000: 10, 96: 4, 48: 2, 256: 8, 384: 12, 192: 6, 4096: 64, 9216: 8 * 36}

# ShuffleNet adds and joins: 24 + 112 = 136, 136 + 136 = 272, 272 + 272 = 544, and four groups divide all but 24.
_SHUFFLE = {1: 1, 3: 3, 1000: 10, 24: 8, 112: 16, 136: 24, 272: 48, 544: 96}
_SHUFFLE |= {6: 2, 28: 4, 34: 6, 68: 12}

LIGHT_MODELS: dict[str, Light] = {
    "alexnet": Light("bvlc_alexnet"),
    "googlenet": Light("inception_v1"),
    "densenet121": Light("densenet121", free=True),
    "squeezenet": Light("squeezenet", free=True, gain=2.5),
    "shufflenet": Light("shufflenet", gain=0.7),
    "alexnet_tiny": Light("bvlc_alexnet", channels=_ALEX.__getitem__),
    "googlenet_tiny": Light("inception_v1", channels=_divided(16)),
    "densenet121_tiny": Light("densenet121", free=True, channels=_divided(16)),
    "squeezenet_tiny": Light("squeezenet", free=True, gain=2.5, channels=_divided(8)),
    "shufflenet_tiny": Light("shufflenet", gain=0.7, channels=_SHUFFLE.__getitem__),
}


def redraw(name: str) -> onnx.ModelProto:
    """Return the light model with drawn weights, symbolic dims and scaled channels; equal on every call."""
    light = LIGHT_MODELS[name]
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    model = onnx.load(folder / f"light_{light.file}.onnx")
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    fills = [n for n in model.graph.node if n.op_type == "ConstantOfShape"]
    nodes = [n for n in model.graph.node if n.op_type != "ConstantOfShape"]
    targets = {n.input[1] for n in nodes if n.op_type == "Reshape"}
    used = {i for n in nodes for i in n.input} - targets
    shapes = {n.output[0]: [int(s) for s in stored[n.input[0]]] for n in fills}
    shapes |= {k: list(v.shape) for k, v in stored.items() if k in used}

    rng = np.random.default_rng(0)
    weights = {}
    for weight, shape in shapes.items():
        role = _role(nodes, weight)
        plain = shape[2:] if role == ("Conv", 1) else []  # a filter's window; everything else counts channels
        scaled = [light.channels(s) for s in shape[: len(shape) - len(plain)]] + plain
        weights[weight] = _draw(role, scaled, light.gain, rng)
    for n in nodes:
        if n.op_type == "Reshape":
            weights[n.input[1]] = _target(stored[n.input[1]], light, constant=n.input[0] in shapes)
        _scale_group(n, light)
    graph = helper.make_graph(
        nodes,
        name,
        [_image_input(nodes, model.graph, light)],
        [_output(o, light) for o in model.graph.output],
        [numpy_helper.from_array(value, key) for key, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=8)


def _role(nodes: list[onnx.NodeProto], name: str) -> tuple[str, int]:
    """Return (operator, input position) of the use of a weight, seen through Unsqueeze and Reshape."""
    for n in nodes:
        if name in n.input:
            if n.op_type in ("Unsqueeze", "Reshape"):
                return _role(nodes, n.output[0])
            return n.op_type, list(n.input).index(name)
    raise ValueError(f"the weight {name!r} is not used")


def _draw(role: tuple[str, int], shape: list[int], gain: float, rng: np.random.Generator) -> Array:
    """Draw a weight by its role: filters and matrices by fan-in, positive scales and variances, small biases."""
    if role == ("Conv", 1):
        drawn = rng.standard_normal(shape) * np.sqrt(gain / np.prod(shape[1:]))
    elif role == ("Gemm", 1):
        drawn = rng.standard_normal(shape) * np.sqrt(gain / shape[-1])
    elif role in (("BatchNormalization", 1), ("BatchNormalization", 4), ("Mul", 1)):
        drawn = rng.uniform(0.5, 1.5, shape)
    else:
        drawn = 0.1 * rng.standard_normal(shape)
    return drawn.astype(np.float32)


def _target(stated: Array, light: Light, *, constant: bool) -> Array:
    """Return a Reshape's target with scaled channels and, for an activation, a free batch."""
    dims = [int(s) for s in stated]
    if constant:
        return np.array([light.channels(s) for s in dims], np.int64)
    if len(dims) == 5:  # a channel shuffle: batch, groups, channels of a group, H, W
        return np.array([-1, dims[1], light.channels(dims[2]), *dims[3:]], np.int64)
    return np.array([-1, light.channels(dims[1]), *dims[2:]], np.int64)


def _scale_group(node: onnx.NodeProto, light: Light) -> None:
    """Scale the groups: depthwise convolutions have as many groups as channels; small group counts stay."""
    for a in node.attribute:
        if a.name == "group" and a.i > 4:
            a.i = light.channels(a.i)


def _image_input(nodes: list[onnx.NodeProto], graph: onnx.GraphProto, light: Light) -> onnx.ValueInfoProto:
    """Return the one input of rank 4 that nodes read and no node writes."""
    read = {i for n in nodes for i in n.input}
    constants = {t.name for t in graph.initializer}
    for value in graph.input:
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name in read - constants and len(dims) == 4:
            symbolic = ["N", dims[1], "H", "W"] if light.free else ["N", *dims[1:]]
            return helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, symbolic)
    raise ValueError(f"no image input in {graph.name!r}")


def _output(value: onnx.ValueInfoProto, light: Light) -> onnx.ValueInfoProto:
    """Return the class scores: batch, classes, and the remaining image axes."""
    dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
    return helper.make_tensor_value_info(
        value.name, value.type.tensor_type.elem_type, ["N", light.channels(dims[1]), *dims[2:]]
    )

"""Fused operators of com.microsoft for images, compared with the operators that they replace: ONNX Runtime has no
kernels for them on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import polydyn
from polydyn.errors import UnsupportedError
from polydyn.graph.expand import import_model

RNG = np.random.default_rng(1)
SIZES = ((1, 1, 1), (2, 7, 3), (3, 8, 9))
WEIGHTS = {"g": RNG.standard_normal(8).astype(np.float32), "b": RNG.standard_normal(8).astype(np.float32),
           "bias": RNG.standard_normal(8).astype(np.float32)}  # fmt: skip


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    domain = "com.microsoft" if op in ("BiasAdd", "NhwcConv", "GroupNorm", "SkipGroupNorm") else ""
    return helper.make_node(op, inputs.split(), output.split(), domain=domain, **attributes)


def model(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, list[Any]], outputs: str, constants: Mapping[str, Any], half: bool
) -> onnx.ModelProto:
    kind = onnx.TensorProto.FLOAT16 if half else onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "images", [helper.make_tensor_value_info(n, kind, s) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(o) for o in outputs.split()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def agrees(fused: onnx.ModelProto, plain: onnx.ModelProto, half: bool = False) -> None:
    """Compare a model of fused operators with a model of ONNX's operators at several sizes."""
    program, session = polydyn.compile(fused, threads=1), onnxruntime.InferenceSession(plain.SerializeToString())
    for n, h, w in SIZES:
        feeds = {x.name: RNG.standard_normal(_shape(x, n, h, w)).astype(np.float32) for x in fused.graph.input}
        got = program.run({k: a.astype(np.float16) if half else a for k, a in feeds.items()})
        feeds = {k: a.astype(np.float16).astype(np.float32) if half else a for k, a in feeds.items()}
        for o, expected in zip(plain.graph.output, session.run(None, feeds), strict=True):
            assert got[o.name].dtype == (np.float16 if half else np.float32) and got[o.name].shape == expected.shape
            np.testing.assert_allclose(got[o.name], expected, rtol=3e-3 if half else 1e-4, atol=3e-3 if half else 1e-4)

    nothing = {x.name: np.zeros(_shape(x, 0, 2, 2), np.float16 if half else np.float32) for x in fused.graph.input}
    assert program.run(nothing)["y"].shape[0] == 0  # ONNX Runtime rejects GroupNormalization of no samples


def _shape(x: onnx.ValueInfoProto, n: int, h: int, w: int) -> list[int]:
    sizes = {"N": n, "H": h, "W": w}
    return [sizes[d.dim_param] if d.dim_param else d.dim_value for d in x.type.tensor_type.shape.dim]


@pytest.mark.parametrize("last", [1, 0])
@pytest.mark.parametrize(("swish", "half"), [(0, False), (1, False), (1, True)])
def test_group_norms_of_either_layout(last: int, swish: int, half: bool) -> None:
    shape: list[Any] = ["N", "H", "W", 8] if last else ["N", 8, "H", "W"]
    settings = {"groups": 4, "epsilon": 1e-3, "activation": swish, **({} if last else {"channels_last": 0})}
    fused = model([node("GroupNorm", "x g b", "y", **settings)], {"x": shape}, "y", WEIGHTS, half)
    plain = [node("Transpose", "x", "t", perm=[0, 3, 1, 2] if last else [0, 1, 2, 3]),
             node("GroupNormalization", "t g b", "u", num_groups=4, epsilon=1e-3),
             node("Sigmoid", "u", "s"), node("Mul", "u s", "m") if swish else node("Identity", "u", "m"),
             node("Transpose", "m", "y", perm=[0, 2, 3, 1] if last else [0, 1, 2, 3])]  # fmt: skip
    agrees(fused, model(plain, {"x": shape}, "y", WEIGHTS, False), half=half)


@pytest.mark.parametrize("skip", [["N", "H", "W", 8], ["N", 8], ["N", 1, 1, 8]], ids=["map", "row", "pixel"])
@pytest.mark.parametrize("bias", [True, False])
def test_group_norm_of_a_sum(skip: list[Any], bias: bool) -> None:
    shapes: dict[str, list[Any]] = {"x": ["N", "H", "W", 8], "s": skip}
    inputs = "x g b s bias" if bias else "x g b s"
    fused = model([node("SkipGroupNorm", inputs, "y total", groups=2)], shapes, "y total", WEIGHTS, False)
    row = {"axes": np.array([1, 2]), "zero": np.zeros(8, np.float32)}
    plain = [node("Unsqueeze", "s axes", "s4") if len(skip) == 2 else node("Identity", "s", "s4"),
             node("Add", "x s4", "a"), node("Add", f"a {'bias' if bias else 'zero'}", "total"),
             node("Transpose", "total", "t", perm=[0, 3, 1, 2]), node("GroupNormalization", "t g b", "u", num_groups=2),
             node("Transpose", "u", "y", perm=[0, 2, 3, 1])]  # fmt: skip
    agrees(fused, model(plain, shapes, "y total", WEIGHTS | row, False))


def test_convolutions_and_sums_of_maps_with_channels_last() -> None:
    shapes: dict[str, list[Any]] = {"x": ["N", "H", "W", 4], "s": ["N", "H", "W", 8]}
    weight = RNG.standard_normal((8, 3, 3, 2)).astype(np.float32)
    settings = {"pads": [1, 1, 1, 1], "group": 2, "kernel_shape": [3, 3]}
    fused = [node("NhwcConv", "x w b", "c", **settings), node("BiasAdd", "c bias s", "y")]
    plain = [node("Transpose", "x", "t", perm=[0, 3, 1, 2]), node("Conv", "t w b", "u", **settings),
             node("Transpose", "u", "c", perm=[0, 2, 3, 1]), node("Add", "c bias", "a"),
             node("Add", "a s", "y")]  # fmt: skip
    agrees(model(fused, shapes, "y", WEIGHTS | {"w": weight}, False),
           model(plain, shapes, "y", WEIGHTS | {"w": weight.transpose(0, 3, 1, 2)}, False))  # fmt: skip


def test_an_unknown_activation_is_rejected() -> None:
    fused = model(
        [node("GroupNorm", "x g b", "y", groups=4, activation=2)], {"x": ["N", "H", "W", 8]}, "y", WEIGHTS, False
    )
    with pytest.raises(UnsupportedError, match=r"(?s)activation=2 is not supported.*remedy: 0 is none, 1 is Swish"):
        import_model(fused)

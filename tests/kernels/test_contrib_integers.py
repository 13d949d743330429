"""Operators of com.microsoft on integers: compiled at several sizes and compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polydyn.errors import UnsupportedError
from polydyn.graph.expand import import_model
from tests.support.contrib import RNG, Array, agrees, floats, model_of
from tests.support.marks import slow

SCALE = np.array(0.05, np.float32)


def scaled(scale: float, zero: int, dtype: str = "uint8") -> tuple[Array, Array]:
    return np.array(scale, np.float32), np.array(zero, dtype)


def byte(*shape: int) -> Array:
    return RNG.integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize("axis", [None, 1, -1])
@pytest.mark.parametrize("dtype", [slow("int8"), "int16", "uint16"])
def test_own_quantization(dtype: str, axis: int | None) -> None:
    sizes = () if axis is None else (8,)
    given = {"scale": np.asarray(np.abs(floats(*sizes)) + np.float32(0.01)), "zero": np.full(sizes, 5, dtype)}
    chosen = {} if axis is None else {"axis": axis}
    rows = ({"x": floats(n, 8)} for n in (0, 1, 7))
    agrees(model_of("QuantizeLinear", {"x": ("float32", ("B", 8)), **given}, **chosen), *rows)
    numbers = ({"x": np.arange(n * 8).astype(dtype).reshape(n, 8)} for n in (0, 1, 7))
    agrees(model_of("DequantizeLinear", {"x": (dtype, ("B", 8)), **given}, **chosen), *numbers)


@pytest.mark.parametrize("masked", ["", slow("lengths"), "keys"])
@pytest.mark.parametrize("past", [slow(False), True])
def test_quantized_attention(masked: str, past: bool) -> None:
    dims = {"": None, "lengths": ("int32", ("B",)), "keys": ("int32", ("B", "T"))}
    (sx, zx), (sw, zw) = scaled(0.01, 120), scaled(0.005, 130)
    given: dict[str, Any] = {
        "x": ("uint8", ("B", "L", 8)), "w": byte(8, 24), "b": floats(24), "sx": sx, "sw": sw, "m": dims[masked],
        "zx": zx, "zw": zw, "p": ("float32", (2, "B", 2, "P", 4)) if past else None,
    }  # fmt: skip
    outputs = ("y", "present") if past else ("y",)
    model = model_of("QAttention", given, outputs, num_heads=2, unidirectional=int(masked != "lengths"))
    for n, length, before in ((1, 1, 0), (2, 7, 3), (3, 17, 1)):
        keys = length + (before if past else 0)
        feeds = {"x": byte(n, length, 8)} | ({"p": floats(2, n, 2, before, 4)} if past else {})
        if masked == "lengths":
            feeds["m"] = RNG.integers(1, keys + 1, n).astype(np.int32)
        elif masked:
            feeds["m"] = RNG.integers(0, 2, (n, keys)).astype(np.int32)
        agrees(model, feeds)


@pytest.mark.parametrize("segments", [True, slow(False)])
def test_quantized_embeddings(segments: bool) -> None:
    tables: dict[str, Any] = {"words": (30, 8), "places": (40, 8), "types": (2, 8), "gamma": (8,), "beta": (8,)}
    left_out = set() if segments else {"segments", "types", "types_scale", "types_zero"}
    given: dict[str, Any] = {"ids": ("int32", ("B", "L")), "segments": ("int32", ("B", "L"))}
    given |= {n: byte(*s) for n, s in tables.items()} | {"mask": ("int32", ("B", "L"))}
    given |= {f"{n}_scale": scaled(0.01, 0)[0] for n in tables} | {f"{n}_zero": scaled(1, 125)[1] for n in tables}
    given = {n: None if n in left_out else x for n, x in given.items()}
    model = model_of("QEmbedLayerNormalization", given, ("y", "sums"), epsilon=1e-5)
    for n, length in ((1, 1), (2, 7), (3, 33)):
        feeds = {"ids": RNG.integers(0, 30, (n, length)), "mask": np.arange(length) < np.arange(1, n + 1)[:, None]}
        feeds |= {"segments": RNG.integers(0, 2, (n, length))} if segments else {}
        agrees(model, {k: v.astype(np.int32) for k, v in feeds.items()})


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
def test_quantized_arithmetic(op: str) -> None:
    (sa, za), (sb, zb), (sc, zc) = scaled(0.1, 120), scaled(0.07, 3), scaled(0.2, 128)
    given = {
        "a": ("uint8", ("B", 8)), "sa": sa, "za": za, "b": ("uint8", ("B", 8)), "sb": sb, "zb": zb, "sc": sc, "zc": zc,
    }  # fmt: skip
    agrees(model_of(op, given), *({"a": byte(n, 8), "b": byte(n, 8)} for n in (0, 1, 7, 33)), steps=1)


@pytest.mark.parametrize(("op", "attributes"), [
    ("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.2}), ("QLinearSoftmax", {"axis": -1, "opset": 13}),
    ("QLinearGlobalAveragePool", {}), ("QLinearAveragePool", {"kernel_shape": [2, 2]}),
])  # fmt: skip
def test_quantized_functions(op: str, attributes: dict[str, Any]) -> None:
    (sa, za), (sy, zy) = scaled(0.1, 120), scaled(0.01 if "S" in op[7:] else 0.1, 3)
    dims: tuple[int | str, ...] = ("B", 3, 4, 5) if "Pool" in op else ("B", 8)
    model = model_of(op, {"x": ("uint8", dims), "sx": sa, "zx": za, "sy": sy, "zy": zy}, **attributes)
    agrees(model, *({"x": byte(n, *dims[1:])} for n in (1, 7)), steps=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("last", "group", "bias"), [(1, 1, True), (1, 2, False), (0, 2, True)])
def test_quantized_convolutions_of_either_layout(last: int, group: int, bias: bool) -> None:
    # weights of 7 bits, as in test_quantized_products
    weight = RNG.integers(-64, 64, (6, 4 // group, 3, 2)).astype(np.int8)
    dims: tuple[int | str, ...] = ("B", "H", "W", 4) if last else ("B", 4, "H", "W")
    (sx, zx), (sy, zy) = scaled(0.02, 100), scaled(0.1, 3)
    given: dict[str, Any] = {
        "x": ("uint8", dims), "sx": sx, "zx": zx, "w": weight, "sw": np.abs(floats(6)) / 50 + np.float32(0.01),
        "zw": np.zeros(6, np.int8), "sy": sy, "zy": zy,
        "bias": RNG.integers(-900, 900, 6).astype(np.int32) if bias else None,
    }  # fmt: skip
    model = model_of("QLinearConv", given, channels_last=last, group=group, pads=[1, 0, 1, 1], strides=[2, 1])
    sizes = ((1, 1, 1), (2, 7, 3), (3, 4, 33))
    agrees(model, *({"x": byte(*((b, h, w, 4) if last else (b, 4, h, w)))} for b, h, w in sizes), steps=1)


def test_maxima_of_windows_with_channels_last() -> None:
    settings = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1], "ceil_mode": 1}
    model = model_of("NhwcMaxPool", {"x": ("uint8", ("B", "H", "W", 3))}, **settings)
    agrees(model, *({"x": byte(b, h, w, 3)} for b, h, w in ((1, 2, 2), (2, 7, 3), (3, 4, 33))))


def test_quantized_concatenation() -> None:
    (sa, za), (sb, zb), (sy, zy) = scaled(0.1, 120), scaled(0.07, 3), scaled(0.2, 128)
    given = {
        "sy": sy, "zy": zy, "a": ("uint8", ("B", 3)), "sa": sa, "za": za, "b": ("uint8", ("B", 4)), "sb": sb, "zb": zb,
    }  # fmt: skip
    agrees(model_of("QLinearConcat", given, axis=1), *({"a": byte(n, 3), "b": byte(n, 4)} for n in (1, 7)), steps=1)


def test_quantized_products() -> None:
    # weights of 7 bits: without VNNI, ONNX Runtime adds pairs of products in 16 bits, which saturate
    a, w = ("uint8", ("B", 8)), RNG.integers(-64, 64, (8, 5)).astype(np.int8)
    (sa, za), (sb, zb) = scaled(0.1, 120), scaled(0.07, 3, "int8")
    given: dict[str, Any] = {"a": a, "w": w, "sa": sa, "sb": sb, "za": za, "zb": zb, "bias": floats(5)}
    calls = [{"a": byte(n, 8)} for n in (1, 7, 33)]
    agrees(model_of("MatMulIntegerToFloat", given), *calls)
    given = {"a": ("float32", ("B", 8)), "w": w, "sb": sb, "zb": zb, "bias": floats(5)}
    agrees(model_of("DynamicQuantizeMatMul", given), *({"a": floats(n, 8)} for n in (1, 7, 33)))
    c = RNG.integers(-100, 100, 5).astype(np.int32)
    given = {"a": a, "sa": sa, "za": za, "w": w, "sb": sb, "zb": zb, "c": c}
    agrees(model_of("QGemm", given), *calls)
    agrees(model_of("QGemm", {**given, "sy": scaled(1.0, 0)[0], "zy": np.array(100, np.uint8)}), *calls, steps=1)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_products_of_rows_that_are_quantized_by_their_extremes(dtype: str) -> None:
    """Weights of 6 bits: ONNX Runtime's sums of two products saturate at 16 bits on AVX2."""
    low = -64 if dtype == "int8" else 0
    for shape, scales, bias in (((8, 5), (1,), True), ((8, 5), (5,), True), ((3, 8, 5), (3, 1, 5), False)):
        w, zeros = (RNG.integers(low, 64, s).astype(dtype) for s in (shape, scales))
        given = {"a": ("float32", ("A", "B", 8)), "w": w, "s": np.abs(floats(*scales)) + 0.01, "z": zeros}
        model = model_of("DynamicQuantizeMatMul", given | ({"bias": floats(5)} if bias else {}))
        agrees(model, *({"a": floats(3, n, 8)} for n in (0, 1, 7)), tolerance=1e-4)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("k", "block"), [(32, 32), (48, 32), (64, 16)])
def test_products_with_weights_of_four_bits(zeros: bool, k: int, block: int) -> None:
    n, blocks = 5, -(-k // block)
    given = {
        "a": ("float32", ("B", "L", k)), "w": byte(n, blocks, block // 2),
        "s": np.abs(floats(n * blocks)) * 0.1, "z": byte(n * -(-blocks // 2)) if zeros else None,
    }  # fmt: skip
    model = model_of("MatMulNBits", given, K=k, N=n, bits=4, block_size=block)
    agrees(model, *({"a": floats(b, m, k)} for b, m in ((1, 1), (2, 7))), tolerance=1e-4)


def test_an_attribute_that_nobody_reads_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="the attribute shape=3"):
        import_model(model_of("QuickGelu", {"x": ("float32", ("B",))}, shape=3))

"""Cases of quantized operators and of classical models (ai.onnx.ml)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.single.case import MICROSOFT, ML, Case, Net, Sizes, cases
from benchmarks.single.elementwise import FLAT, node

SCALE = np.float32(0.05)
ROWS: Sizes = ((128,), (509,))
TWO = {"domain": MICROSOFT}
IMAGES: Sizes = ((1, 28, 28), (4, 31, 29))


def _zero(n: Net) -> Any:
    return np.asarray(3, n.kind)


def _bytes(n: Net, *shape: int) -> Any:
    info = np.iinfo(n.kind)
    return n.numbers.integers(info.min, info.max, shape).astype(n.kind)


def _qdq(n: Net, x: Any, kind: Any = np.uint8) -> Any:
    zero = np.asarray(128 if kind is np.uint8 else 0, kind)
    return n.DequantizeLinear(n.QuantizeLinear(x, SCALE, zero), SCALE, zero)


def linear() -> Iterator[Case]:
    """Quantization itself, and QDQ around operators."""
    q = np.uint8(3), np.int8(3)
    for name, zero in zip(("u8", "i8"), q, strict=True):
        yield from cases(f"QuantizeLinear {name}", "T R,L", lambda n, x, z=zero: n.QuantizeLinear(x, SCALE, z), FLAT)
        yield from cases("DequantizeLinear", "T R,L", lambda n, x: n.DequantizeLinear(x, SCALE, _zero(n)), FLAT, name)
    yield from cases(
        "QuantizeLinear channels",
        "T N,64,H,W",
        lambda n, x: n.QuantizeLinear(x, np.full(64, SCALE), np.zeros(64, np.int8), axis=1),
        IMAGES,
    )
    yield from cases(
        "DequantizeLinear channels",
        "T 768,L",
        lambda n, x: n.DequantizeLinear(x, np.full(768, SCALE), np.zeros(768, np.int8), axis=0),
        ((768,), (3001,)),
        "i8",
    )
    yield from cases("DynamicQuantizeLinear", "T R,L", partial(node, "DynamicQuantizeLinear", outputs=3), FLAT)
    yield from cases("QDQ pair", "T R,L", _qdq, FLAT)
    yield from cases("QDQ Add", "T R,L; T R,L", lambda n, a, b: _qdq(n, n.Add(_qdq(n, a), _qdq(n, b))), FLAT[:2])
    yield from cases(
        "QDQ MatMul",
        "T R,256",
        lambda n, x: n.MatMul(
            _qdq(n, x), n.DequantizeLinear(n.numbers.integers(-127, 127, (256, 256)).astype(np.int8), SCALE)
        ),
        ROWS,
    )
    yield from cases(
        "QDQ Conv",
        "T N,64,H,W",
        lambda n, x: _qdq(
            n,
            n.Conv(
                _qdq(n, x),
                n.DequantizeLinear(n.numbers.integers(-127, 127, (64, 64, 3, 3)).astype(np.int8), np.float32(0.002)),
                pads=[1] * 4,
            ),
        ),
        IMAGES,
    )
    yield from cases(
        "QDQ depthwise",
        "T N,64,H,W",
        lambda n, x: _qdq(
            n,
            n.Conv(
                _qdq(n, x),
                n.DequantizeLinear(n.numbers.integers(-127, 127, (64, 1, 3, 3)).astype(np.int8), np.float32(0.002)),
                pads=[1] * 4,
                group=64,
            ),
        ),
        IMAGES,
    )
    yield from cases(
        "QDQ MaxPool",
        "T N,64,H,W",
        lambda n, x: _qdq(n, n.MaxPool(_qdq(n, x), kernel_shape=[2, 2], strides=[2, 2])),
        IMAGES,
    )


def byte_products() -> Iterator[Case]:
    """Products of bytes."""
    yield from cases(
        "MatMulInteger",
        "T R,256",
        lambda n, x: n.MatMulInteger(x, n.numbers.integers(-127, 127, (256, 256)).astype(np.int8), _zero(n)),
        ROWS,
        "u8 i8",
    )
    yield from cases(
        "ConvInteger",
        "u8 N,64,H,W",
        lambda n, x: n.ConvInteger(
            x, n.numbers.integers(0, 255, (64, 64, 3, 3)).astype(np.uint8), np.uint8(3), np.uint8(128), pads=[1] * 4
        ),
        IMAGES,
    )
    yield from cases(
        "QLinearMatMul",
        "T R,256",
        lambda n, x: n.QLinearMatMul(
            x, SCALE, _zero(n), _bytes(n, 256, 256), np.float32(0.01), _zero(n), np.float32(0.9), _zero(n)
        ),
        ROWS,
        "u8 i8",
    )
    yield from cases(
        "QLinearConv",
        "u8 N,64,H,W",
        lambda n, x: n.QLinearConv(
            x,
            SCALE,
            np.uint8(3),
            n.numbers.integers(-127, 127, (64, 64, 3, 3)).astype(np.int8),
            np.float32(0.01),
            np.int8(0),
            np.float32(0.9),
            np.uint8(128),
            pads=[1] * 4,
        ),
        IMAGES,
    )


def microsoft() -> Iterator[Case]:
    """Quantized operators of ONNX Runtime's own domain."""
    for op in ("QLinearAdd", "QLinearMul"):
        yield from cases(
            op,
            "T R,L; T R,L",
            lambda n, a, b, op=op: node(
                op, n, a, SCALE, _zero(n), b, SCALE, _zero(n), np.float32(0.2), _zero(n), **TWO
            ),
            FLAT,
            "u8 i8",
        )
    for op, extra in (("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.1})):
        yield from cases(
            op,
            "T R,L",
            lambda n, x, op=op, e=extra: node(op, n, x, SCALE, _zero(n), np.float32(0.01), _zero(n), **TWO, **e),
            FLAT,
            "u8 i8",
        )
    yield from cases(
        "QLinearSoftmax",
        "T R,L",
        lambda n, x: n.QLinearSoftmax(
            x, SCALE, _zero(n), np.float32(1 / 256), np.asarray(0, n.kind), axis=-1, opset=13, **TWO
        ),
        FLAT,
        "u8",
    )
    yield from cases(
        "QLinearGlobalAveragePool",
        "T N,64,H,W",
        lambda n, x: n.QLinearGlobalAveragePool(x, SCALE, _zero(n), SCALE, _zero(n), **TWO),
        IMAGES,
        "u8",
    )
    yield from cases(
        "QLinearAveragePool",
        "T N,64,H,W",
        lambda n, x: n.QLinearAveragePool(
            x, SCALE, _zero(n), SCALE, _zero(n), kernel_shape=[3, 3], strides=[2, 2], **TWO
        ),
        IMAGES,
        "u8",
    )
    yield from cases(
        "QLinearConcat",
        "T N,64,H,W; T N,32,H,W",
        lambda n, a, b: n.QLinearConcat(
            np.float32(0.1), _zero(n), a, SCALE, _zero(n), b, np.float32(0.07), _zero(n), axis=1, **TWO
        ),
        IMAGES,
        "u8",
    )
    yield from cases(
        "QLinearWhere",
        "b R,L; T R,L; T R,L",
        lambda n, c, a, b: n.QLinearWhere(
            c, a, SCALE, _zero(n), b, np.float32(0.07), _zero(n), np.float32(0.1), _zero(n), **TWO
        ),
        FLAT,
        "u8",
    )


def microsoft_products() -> Iterator[Case]:
    """Products of ONNX Runtime's own domain."""
    yield from cases(
        "QGemm",
        "T R,256",
        lambda n, x: n.QGemm(
            x, SCALE, _zero(n), _bytes(n, 256, 256), np.float32(0.01), _zero(n), None, np.float32(0.9), _zero(n), **TWO
        ),
        ROWS,
        "u8",
    )
    yield from cases(
        "DynamicQuantizeMatMul",
        "T R,256",
        lambda n, x: n.DynamicQuantizeMatMul(
            x, n.numbers.integers(0, 255, (256, 256)).astype(np.uint8), SCALE, np.uint8(128), **TWO
        ),
        ROWS,
    )
    yield from cases(
        "MatMulIntegerToFloat",
        "u8 R,256",
        lambda n, x: n.MatMulIntegerToFloat(
            x, n.numbers.integers(-127, 127, (256, 256)).astype(np.int8), SCALE, SCALE, np.uint8(3), np.int8(0), **TWO
        ),
        ROWS,
    )
    yield from cases(
        "MatMulNBits",
        "T R,256",
        lambda n, x: n.MatMulNBits(
            x,
            n.numbers.integers(0, 255, (256, 8, 16)).astype(np.uint8),
            np.abs(n.weight(256, 8, kind="f32")).ravel(),
            K=256,
            N=256,
            bits=4,
            block_size=32,
            **TWO,
        ),
        ((1,), (128,), (509,)),
    )


def microsoft_rest() -> Iterator[Case]:
    """Other operators of ONNX Runtime's own domain that have numbers of 8 or 4 bits."""
    yield from cases(
        "Microsoft's QuantizeLinear", "T R,L", lambda n, x: n.QuantizeLinear(x, SCALE, np.uint8(3), **TWO), FLAT[:2]
    )
    yield from cases(
        "Microsoft's DequantizeLinear",
        "T R,L",
        lambda n, x: n.DequantizeLinear(x, SCALE, _zero(n), **TWO),
        FLAT[:2],
        "u8",
    )
    yield from cases(
        "QAttention",
        "u8 B,L,256",
        lambda n, x: n.QAttention(
            x,
            n.numbers.integers(0, 255, (256, 768)).astype(np.uint8),
            n.weight(768, kind="f32"),
            SCALE,
            np.float32(0.01),
            None,
            np.uint8(128),
            np.uint8(128),
            num_heads=4,
            **TWO,
        ),
        ((1, 128), (4, 61)),
    )
    yield from cases(
        "GatherBlockQuantized",
        "i64<3000 B,L",
        lambda n, i: n.GatherBlockQuantized(
            n.numbers.integers(0, 255, (3000, 256)).astype(np.uint8),
            i,
            np.abs(n.weight(3000, 8, kind="f32")),
            bits=8,
            block_size=32,
            quantize_axis=1,
            gather_axis=0,
            **TWO,
        ),
        ((8, 128), (3, 61)),
    )


def trees(count: int = 20, depth: int = 6) -> dict[str, Any]:
    """Return the attributes of a forest of full binary trees with random thresholds (seed 0)."""
    rng = np.random.default_rng(0)
    inner, total = 2**depth - 1, 2 ** (depth + 1) - 1
    ids = np.tile(np.arange(total), count)
    leaf = ids >= inner
    ends = np.tile(np.arange(inner, total), count)
    owner = np.repeat(np.arange(count), len(ends) // count)
    table: dict[str, Any] = {
        "nodes_treeids": np.repeat(np.arange(count), total),
        "nodes_nodeids": ids,
        "nodes_featureids": np.where(leaf, 0, rng.integers(0, 20, ids.size)),
        "nodes_values": np.where(leaf, 0, rng.standard_normal(ids.size)).astype(np.float32),
        "nodes_modes": np.where(leaf, "LEAF", "BRANCH_LEQ"),
        "nodes_truenodeids": np.where(leaf, 0, 2 * ids + 1),
        "nodes_falsenodeids": np.where(leaf, 0, 2 * ids + 2),
        "target_treeids": owner,
        "target_nodeids": ends,
        "target_ids": 0 * ends,
        "target_weights": rng.standard_normal(ends.size).astype(np.float32),
    }
    return {k: v.tolist() for k, v in table.items()} | {"n_targets": 1}


def classical() -> Iterator[Case]:
    """Models of ai.onnx.ml."""
    numbers = np.random.default_rng(0).standard_normal(600).astype(np.float32).tolist()
    rows: Sizes = ((1000,), (20001,))
    attributes: dict[str, dict[str, Any]] = {
        "Scaler": {"offset": numbers[:20], "scale": numbers[20:40]},
        "Normalizer": {"norm": "L2"},
        "Binarizer": {"threshold": 0.1},
        "Imputer": {"imputed_value_floats": numbers[:20], "replaced_value_float": float("nan")},
        "LinearRegressor": {"coefficients": numbers[:20], "intercepts": [0.5], "targets": 1},
        "SVMRegressor": {
            "coefficients": numbers[:20],
            "support_vectors": numbers[100:500],
            "n_supports": 20,
            "kernel_type": "RBF",
            "kernel_params": [0.1, 0.0, 3.0],
            "rho": [0.2],
        },
        "TreeEnsembleRegressor": trees(),
    }
    for op, a in attributes.items():
        yield from cases(op, "f32 R,20", partial(node, op, domain=ML, **a), rows)
    yield from cases(
        "LinearClassifier",
        "f32 R,20",
        partial(
            node,
            "LinearClassifier",
            domain=ML,
            outputs=2,
            coefficients=numbers[:60],
            intercepts=numbers[:3],
            classlabels_ints=[0, 1, 2],
            post_transform="SOFTMAX",
        ),
        rows,
    )
    forest = {k.replace("target_", "class_"): v for k, v in trees().items() if k != "n_targets"}
    yield from cases(
        "TreeEnsembleClassifier",
        "f32 R,20",
        partial(node, "TreeEnsembleClassifier", domain=ML, outputs=2, classlabels_int64s=[0, 1], **forest),
        rows,
    )
    yield from cases(
        "FeatureVectorizer",
        "f32 R,20; f32 R,12",
        partial(node, "FeatureVectorizer", domain=ML, inputdimensions=[20, 12]),
        rows,
    )
    yield from cases(
        "OneHotEncoder", "i64<50 R", partial(node, "OneHotEncoder", domain=ML, cats_int64s=list(range(50))), rows
    )
    yield from cases(
        "LabelEncoder",
        "i64<500 R",
        partial(node, "LabelEncoder", domain=ML, keys_int64s=list(range(500)), values_int64s=list(range(500, 0, -1))),
        rows,
    )
    yield from cases(
        "ArrayFeatureExtractor", "f32 R,20", lambda n, x: n.ArrayFeatureExtractor(x, [3, 5, 7], domain=ML), rows
    )


def every() -> Iterator[Case]:
    """Yield all cases of this module."""
    yield from linear()
    yield from byte_products()
    yield from microsoft()
    yield from microsoft_products()
    yield from microsoft_rest()
    yield from classical()

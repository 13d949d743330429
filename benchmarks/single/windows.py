"""Cases over windows of pixels: convolutions, pools, resizing and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.single.case import MICROSOFT, Case, Net, Sizes, cases
from benchmarks.single.elementwise import node

IMAGES: Sizes = ((1, 56, 56), (4, 61, 59))
CONVOLUTIONS: dict[str, tuple[int, int, tuple[int, ...], dict[str, Any], Sizes]] = {
    "3x3": (64, 64, (3, 3), {"pads": [1] * 4}, IMAGES),
    "3x3 stride 2": (64, 128, (3, 3), {"pads": [1] * 4, "strides": [2, 2]}, IMAGES),
    "1x1": (64, 256, (1, 1), {}, IMAGES),
    "1x1 stride 2": (64, 128, (1, 1), {"strides": [2, 2]}, IMAGES),
    "7x7 stem": (3, 64, (7, 7), {"pads": [3] * 4, "strides": [2, 2]}, ((1, 224, 224), (2, 193, 257))),
    "patches 16": (3, 768, (16, 16), {"strides": [16, 16]}, ((1, 224, 224), (2, 192, 256))),
    "3x3 dilation 2": (64, 64, (3, 3), {"pads": [2] * 4, "dilations": [2, 2]}, IMAGES),
    "3x3 dilation 12": (64, 64, (3, 3), {"pads": [12] * 4, "dilations": [12, 12]}, IMAGES),
    "5x5": (32, 32, (5, 5), {"pads": [2] * 4}, IMAGES),
    "1x7": (64, 64, (1, 7), {"pads": [0, 3, 0, 3]}, IMAGES),
    "depthwise 3x3": (64, 64, (3, 3), {"pads": [1] * 4, "group": 64}, IMAGES),
    "depthwise 3x3 stride 2": (64, 64, (3, 3), {"pads": [1] * 4, "strides": [2, 2], "group": 64}, IMAGES),
    "depthwise 7x7": (64, 64, (7, 7), {"pads": [3] * 4, "group": 64}, IMAGES),
    "depthwise 3x3 dilation 2": (64, 64, (3, 3), {"pads": [2] * 4, "dilations": [2, 2], "group": 64}, IMAGES),
    "groups of 4": (64, 64, (3, 3), {"pads": [1] * 4, "group": 16}, IMAGES),
    "groups of 32": (64, 64, (3, 3), {"pads": [1] * 4, "group": 2}, IMAGES),
    "one channel": (1, 8, (3, 3), {"pads": [1] * 4}, IMAGES),
    "three results": (64, 3, (3, 3), {"pads": [1] * 4}, IMAGES),
    "1d 3": (128, 128, (3,), {"pads": [1, 1]}, ((1, 1500), (4, 301))),
    "1d 10 stride 5": (1, 256, (10,), {"strides": [5]}, ((1, 16000), (2, 5001))),
    "1d depthwise 31": (128, 128, (31,), {"pads": [15, 15], "group": 128}, ((1, 500), (4, 301))),
    "1d dilation 8": (64, 64, (3,), {"pads": [16, 0], "dilations": [8]}, ((1, 4000), (4, 501))),
    "3d 3": (16, 32, (3, 3, 3), {"pads": [1] * 6}, ((1, 16, 28, 28), (2, 7, 31, 29))),
    "3d depthwise 3": (32, 32, (3, 3, 3), {"pads": [1] * 6, "group": 32}, ((1, 16, 28, 28), (2, 7, 31, 29))),
    "3d 3x1x1": (32, 32, (3, 1, 1), {"pads": [1, 0, 0, 1, 0, 0]}, ((1, 16, 28, 28), (2, 7, 31, 29))),
}
"""Channels, results, kernel, attributes and sizes."""
TRANSPOSED: dict[str, tuple[int, int, tuple[int, ...], dict[str, Any], Sizes]] = {
    "2x2 stride 2": (64, 32, (2, 2), {"strides": [2, 2]}, IMAGES),
    "3x3 stride 2": (64, 32, (3, 3), {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]}, IMAGES),
    "4x4 stride 2": (64, 32, (4, 4), {"strides": [2, 2], "pads": [1] * 4}, IMAGES),
    "3x3": (64, 32, (3, 3), {"pads": [1] * 4}, IMAGES),
    "depthwise 4x4 stride 2": (64, 64, (4, 4), {"strides": [2, 2], "pads": [1] * 4, "group": 64}, IMAGES),
    "1d 16 stride 8": (128, 64, (16,), {"strides": [8], "pads": [4, 4]}, ((1, 300), (3, 101))),
    "3d 2 stride 2": (32, 16, (2, 2, 2), {"strides": [2, 2, 2]}, ((1, 8, 14, 14), (2, 7, 15, 13))),
}
POOLS: dict[str, tuple[int, dict[str, Any]]] = {
    "2x2 stride 2": (2, {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "3x3 stride 2": (2, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "3x3": (2, {"kernel_shape": [3, 3], "pads": [1] * 4}),
    "3x3 stride 2 ceil": (2, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "5x5": (2, {"kernel_shape": [5, 5], "pads": [2] * 4}),
    "13x13": (2, {"kernel_shape": [13, 13], "pads": [6] * 4}),
    "3x3 dilation 2": (2, {"kernel_shape": [3, 3], "dilations": [2, 2], "pads": [2] * 4}),
    "1d 3 stride 2": (1, {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    "3d 2 stride 2": (3, {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}),
}
PIXELS = {1: "L", 2: "H,W", 3: "D,H,W"}
LATTICES: dict[int, Sizes] = {1: ((4, 3000), (8, 301)), 2: IMAGES, 3: ((1, 16, 28, 28), (2, 7, 31, 29))}


def convolutions() -> Iterator[Case]:
    """Convolutions, transposed ones, and what surrounds them."""
    for op, table in (("Conv", CONVOLUTIONS), ("ConvTranspose", TRANSPOSED)):
        for name, (channels, results, kernel, attributes, sizes) in table.items():
            group = attributes.get("group", 1)
            shape = (results, channels // group) if op == "Conv" else (channels, results // group)

            def build(
                n: Net, x: str, s: Any = (*shape, *kernel), r: int = results, a: Any = attributes, op: str = op
            ) -> Any:
                return node(op, n, x, n.weight(*s), n.weight(r), **a)

            types = "f32 f16 f64" if name in ("3x3", "1x1", "depthwise 3x3", "2x2 stride 2") else "f32"
            yield from cases(f"{op} {name}", f"T N,{channels},{PIXELS[len(kernel)]}", build, sizes, types)
    yield from cases("Conv weights given", "T N,16,H,W; T 32,16,3,3", partial(node, "Conv", pads=[1] * 4), IMAGES)
    yield from cases(
        "Conv, norm, relu",
        "T N,64,H,W",
        lambda n, x: n.Relu(
            n.BatchNormalization(
                n.Conv(x, n.weight(64, 64, 3, 3), pads=[1] * 4),
                *(np.abs(n.weight(64)) + n.kind.type(0.5) for _ in range(4)),
            )
        ),
        IMAGES,
    )
    yield from cases(
        "squeeze and excite",
        "T N,64,H,W",
        lambda n, x: n.Mul(
            x, n.Sigmoid(n.Conv(n.Relu(n.Conv(n.GlobalAveragePool(x), n.weight(16, 64, 1, 1))), n.weight(64, 16, 1, 1)))
        ),
        IMAGES,
    )
    yield from cases(
        "BatchNormalization",
        "T N,64,H,W",
        lambda n, x: n.BatchNormalization(x, *(np.abs(n.weight(64)) + n.kind.type(0.5) for _ in range(4))),
        IMAGES,
        "f32 f16 f64",
    )
    yield from cases(
        "FusedConv",
        "T N,64,H,W",
        lambda n, x: n.FusedConv(
            x, n.weight(64, 64, 3, 3), n.weight(64), activation="Relu", pads=[1] * 4, domain=MICROSOFT
        ),
        IMAGES,
    )
    yield from cases(
        "DeformConv",
        "T N,16,H,W; T N,18,H,W",
        lambda n, x, o: n.DeformConv(x, n.weight(16, 16, 3, 3), o, pads=[1] * 4),
        IMAGES,
    )
    yield from cases("Col2Im", "T N,144,900", lambda n, x: n.Col2Im(x, [32, 32], [3, 3]), ((1,), (5,)))


def pools() -> Iterator[Case]:
    """Pools of each kind."""
    for op in ("MaxPool", "AveragePool", "LpPool"):
        for name, (rank, attributes) in POOLS.items():
            if op == "LpPool" and name not in ("3x3", "2x2 stride 2"):
                continue
            types = "f32 f16 f64 i8 u8" if (op, name) == ("MaxPool", "3x3 stride 2") else "f32"
            yield from cases(
                f"{op} {name}", f"T N,64,{PIXELS[rank]}", partial(node, op, **attributes), LATTICES[rank], types
            )
    yield from cases(
        "AveragePool 3x3 padding counts",
        "T N,64,H,W",
        partial(node, "AveragePool", kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
        IMAGES,
    )
    yield from cases(
        "MaxPool with places",
        "T N,64,H,W",
        partial(node, "MaxPool", kernel_shape=[2, 2], strides=[2, 2], outputs=2),
        IMAGES,
    )
    yield from cases(
        "MaxUnpool",
        "T N,64,H,W",
        lambda n, x: n.MaxUnpool(
            *n.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2], outputs=2), kernel_shape=[2, 2], strides=[2, 2]
        ),
        ((1, 56, 56), (4, 62, 58)),
    )
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        yield from cases(op, "T N,64,H,W", partial(node, op), IMAGES, "f32 f16 f64")
    yield from cases("GlobalLpPool", "T N,64,H,W", partial(node, "GlobalLpPool"), IMAGES, opset=20)
    yield from cases("LRN", "T N,64,H,W", partial(node, "LRN", size=5), IMAGES)


def sampling() -> Iterator[Case]:
    """Resizing and sampling."""
    scales = {"2": 2.0, "1.5": 1.5, "0.5": 0.5}
    for mode in ("nearest", "linear", "cubic"):
        for name, s in scales.items():
            types = "f32 f16 f64 u8" if name == "2" and mode != "cubic" else "f32"
            yield from cases(
                f"Resize {mode} {name}",
                "T N,32,H,W",
                lambda n, x, m=mode, s=s: n.Resize(x, None, np.float32([1, 1, s, s]), mode=m),
                IMAGES,
                types,
            )
    yield from cases(
        "Resize linear to size, corners",
        "T N,32,H,W",
        lambda n, x: n.Resize(
            x,
            None,
            None,
            n.Concat(n.Slice(n.Shape(x), [0], [2]), [113, 97], axis=0),
            mode="linear",
            coordinate_transformation_mode="align_corners",
        ),
        IMAGES,
    )
    yield from cases(
        "Resize nearest asymmetric floor",
        "T N,32,H,W",
        lambda n, x: n.Resize(
            x, None, np.float32([1, 1, 2, 2]), coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        ),
        IMAGES,
    )
    yield from cases(
        "Resize antialias",
        "T N,3,H,W",
        lambda n, x: n.Resize(x, None, np.float32([1, 1, 0.4, 0.4]), mode="linear", antialias=1),
        ((1, 224, 224), (2, 193, 257)),
    )
    yield from cases(
        "Resize linear 3d",
        "T N,8,D,H,W",
        lambda n, x: n.Resize(x, None, np.float32([1, 1, 2, 2, 2]), mode="linear"),
        ((1, 8, 28, 28),),
    )
    yield from cases(
        "Resize linear 1d",
        "T N,64,L",
        lambda n, x: n.Resize(x, None, np.float32([1, 1, 2]), mode="linear"),
        ((1, 3000), (7, 301)),
    )
    yield from cases(
        "Upsample", "T N,32,H,W", lambda n, x: n.Upsample(x, np.float32([1, 1, 2, 2]), mode="nearest"), IMAGES, opset=9
    )


def samples() -> Iterator[Case]:
    """Samples at given places."""
    for mode in ("linear", "nearest", "cubic"):
        for edge in ("zeros", "border", "reflection"):
            if mode == "linear" or edge == "zeros":
                yield from cases(
                    f"GridSample {mode} {edge}",
                    "T N,16,H,W; T~ N,H,W,2",
                    partial(node, "GridSample", mode=mode, padding_mode=edge),
                    IMAGES,
                    "f32 f64" if edge == "zeros" and mode == "linear" else "f32",
                )
    yield from cases(
        "Microsoft's GridSample", "T N,16,H,W; T~ N,H,W,2", partial(node, "GridSample", domain=MICROSOFT), IMAGES
    )
    yield from cases("GridSample 3d", "T N,4,D,H,W; T~ N,D,H,W,3", partial(node, "GridSample"), ((1, 8, 28, 28),))
    yield from cases(
        "AffineGrid",
        "T~ N,2,3",
        lambda n, x: n.AffineGrid(x, n.Concat(n.Slice(n.Shape(x), [0], [1]), [3, 120, 100], axis=0)),
        ((4,),),
    )
    for mode in ("avg", "max"):
        yield from cases(
            f"RoiAlign {mode}",
            "T 2,64,H,W; f32+ R,4; i64<2 R",
            lambda n, x, r, b, m=mode: n.RoiAlign(
                x,
                n.Concat(
                    n.Slice(r, [0], [2], [1]),
                    n.Add(n.Slice(r, [0], [2], [1]), n.Mul(n.Slice(r, [2], [4], [1]), 9.0)),
                    axis=1,
                ),
                b,
                mode=m,
                output_height=7,
                output_width=7,
                sampling_ratio=2,
            ),
            ((56, 56, 50), (31, 29, 201)),
            opset=16,
        )


def every() -> Iterator[Case]:
    """Yield all cases of this module."""
    yield from convolutions()
    yield from pools()
    yield from sampling()
    yield from samples()

"""Cases that move elements: transposes, slices, pads, gathers, scatters, sorts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.single.case import Case, Sizes, cases
from benchmarks.single.elementwise import FLAT, node

IMAGES: Sizes = ((1, 56, 56), (4, 61, 59), (32, 14, 14))
TYPES = "f32 f16 f64 i64 u8"
TRANSPOSES: dict[str, tuple[str, tuple[int, ...], Sizes]] = {
    "1 0": ("R,L", (1, 0), ((1000, 1000), (768, 3072), (50000, 7), (7, 50000))),
    "0 2 1": ("B,R,L", (0, 2, 1), ((4, 256, 300), (64, 61, 33), (3000, 3, 49))),
    "0 2 1 3": ("B,L,12,64", (0, 2, 1, 3), ((1, 512), (4, 128), (3, 61))),
    "0 3 1 2": ("N,H,W,3", (0, 3, 1, 2), ((1, 224, 224), (4, 193, 257))),
    "0 2 3 1": ("N,64,H,W", (0, 2, 3, 1), IMAGES),
    "2 1 0": ("A,B,C", (2, 1, 0), ((64, 64, 64), (200, 7, 61))),
    "0 1 3 2": ("B,12,L,64", (0, 1, 3, 2), ((1, 512), (4, 128), (3, 61))),
    "0 1 3 2 4 5": ("B,8,7,8,7,C", (0, 1, 3, 2, 4, 5), ((1, 96), (4, 33))),
}


def layouts() -> Iterator[Case]:
    """Transposes, reshapes and their idioms."""
    for name, (dims, perm, sizes) in TRANSPOSES.items():
        types = TYPES if name in ("1 0", "0 2 1 3") else "f32 f16 u8"
        yield from cases(f"Transpose {name}", f"T {dims}", partial(node, "Transpose", perm=perm), sizes, types)
    yield from cases("Reshape", "T R,64", lambda n, x: n.Reshape(x, [-1, 16]), ((4000,), (60001,)), "f32 u8")
    for op in ("Flatten", "Squeeze", "Unsqueeze"):
        axes = () if op == "Flatten" else ([1],)
        yield from cases(op, "T R,1,64", lambda n, x, op=op, axes=axes: node(op, n, x, *axes), ((60001,),))
    for mode in ("DCR", "CRD"):
        build = partial(node, "DepthToSpace", blocksize=2, mode=mode)
        yield from cases(f"DepthToSpace {mode}", "T N,64,H,W", build, IMAGES, "f32 f16 u8")
    yield from cases(
        "SpaceToDepth", "T N,64,H,W", partial(node, "SpaceToDepth", blocksize=2), ((1, 56, 56), (4, 62, 58)), "f32 u8"
    )
    yield from cases(
        "pixel shuffle",
        "T N,64,H,W",
        lambda n, x: n.Reshape(
            n.Transpose(n.Reshape(x, [0, 16, 2, 2, 64, 64]), perm=[0, 1, 4, 2, 5, 3]), [0, 16, 128, 128]
        ),
        ((1, 64, 64), (3, 64, 64)),
    )
    yield from cases(
        "windows of 7",
        "T N,56,56,96",
        lambda n, x: n.Reshape(n.Transpose(n.Reshape(x, [-1, 8, 7, 8, 7, 96]), perm=[0, 1, 3, 2, 4, 5]), [-1, 49, 96]),
        ((1,), (3,)),
    )
    yield from cases(
        "windows back",
        "T N,49,96",
        lambda n, x: n.Reshape(
            n.Transpose(n.Reshape(x, [-1, 8, 8, 7, 7, 96]), perm=[0, 1, 3, 2, 4, 5]), [-1, 56, 56, 96]
        ),
        ((64,), (192,)),
    )
    yield from cases(
        "channel shuffle",
        "T N,116,28,28",
        lambda n, x: n.Reshape(n.Transpose(n.Reshape(x, [0, 2, 58, 28, 28]), perm=[0, 2, 1, 3, 4]), [0, 116, 28, 28]),
        ((1,), (5,)),
    )
    yield from cases(
        "Split 3", "T R,2304", partial(node, "Split", outputs=3, num_outputs=3, axis=1), ((128,), (509,)), "f32 f16"
    )
    yield from cases("Split channels", "T N,64,H,W", lambda n, x: n.Split(x, [24, 40], axis=1, outputs=2), IMAGES)
    yield from cases(
        "Concat 0", "T R,L; T S,L", partial(node, "Concat", axis=0), ((300, 768, 500), (999, 501, 7)), TYPES
    )
    yield from cases(
        "Concat 1", "T R,L; T R,M", partial(node, "Concat", axis=1), ((300, 768, 500), (5001, 31, 3)), TYPES
    )
    yield from cases("Concat channels", "T N,64,H,W; T N,32,H,W; T N,16,H,W", partial(node, "Concat", axis=1), IMAGES)
    yield from cases(
        "cache append",
        "T B,12,P,64; T B,12,L,64",
        partial(node, "Concat", axis=2),
        ((1, 1023, 1), (4, 200, 7)),
        "f32 f16",
    )


def slices() -> Iterator[Case]:
    """Slices, pads, tiles and expansions."""
    cuts: dict[str, tuple[str, list[list[int]], Sizes]] = {
        "rows": ("R,768", [[5], [100000], [0]], ((600,), (2001,))),
        "columns": ("R,768", [[64], [320], [1]], ((600,), (2001,))),
        "step 2": ("R,768", [[0], [768], [1], [2]], ((600,), (2001,))),
        "reverse": ("R,768", [[-1], [-1000], [1], [-1]], ((600,), (2001,))),
        "reverse rows": ("R,768", [[-1], [-(2**60)], [0], [-1]], ((600,), (2001,))),
        "pixels": ("N,64,H,W", [[1, 1], [-1, -1], [2, 3]], IMAGES),
        "pixels step 2": ("N,64,H,W", [[0, 0], [2**60] * 2, [2, 3], [2, 2]], IMAGES),
    }
    for name, (dims, operands, sizes) in cuts.items():
        yield from cases(f"Slice {name}", f"T {dims}", lambda n, x, o=operands: n.Slice(x, *o), sizes, TYPES)
    yield from cases(
        "focus",
        "T N,3,H,W",
        lambda n, x: n.Concat(
            *(n.Slice(x, [i, j], [2**60] * 2, [2, 3], [2, 2]) for j in (0, 1) for i in (0, 1)), axis=1
        ),
        ((1, 320, 320), (2, 256, 416)),
    )
    yield from cases(
        "roll",
        "T N,56,56,96",
        lambda n, x: n.Concat(n.Slice(x, [3], [2**60], [1]), n.Slice(x, [0], [3], [1]), axis=1),
        ((1,), (4,)),
    )


def pads() -> Iterator[Case]:
    """Pads, tiles, expansions and generated tensors."""
    for mode in ("constant", "reflect", "edge", "wrap"):
        yield from cases(
            f"Pad {mode}", "T N,32,H,W", lambda n, x, m=mode: n.Pad(x, [0, 0, 2, 1, 0, 0, 1, 3], mode=m), IMAGES, TYPES
        )
    yield from cases("Pad constant columns", "T R,L", lambda n, x: n.Pad(x, [0, 3, 0, 5]), FLAT, "f32 i64")
    yield from cases(
        "Pad reflect columns",
        "T B,L",
        lambda n, x: n.Pad(x, [0, 200, 0, 200], mode="reflect"),
        ((1, 160000), (8, 16001)),
    )
    for name, (dims, repeats) in {
        "rows": ("R,L", [3, 1]),
        "columns": ("R,L", [1, 3]),
        "both": ("R,L", [2, 2]),
        "heads": ("R,1,L", [1, 12, 1]),
    }.items():
        yield from cases(f"Tile {name}", f"T {dims}", lambda n, x, r=repeats: n.Tile(x, r), FLAT, TYPES)
    yield from cases("Expand rows", "T 1,L", lambda n, x: n.Expand(x, [300, 1]), ((768,), (5001,)), TYPES)
    yield from cases("Expand columns", "T R,1", lambda n, x: n.Expand(x, [1, 300]), ((768,), (5001,)), TYPES)
    yield from cases(
        "repeat of heads",
        "T B,8,L,64",
        lambda n, x: n.Reshape(n.Expand(n.Unsqueeze(x, [2]), [1, 1, 4, 1, 1]), [0, 32, -1, 64]),
        ((1, 128), (2, 61)),
        "f32 f16",
    )
    for upper in (0, 1):
        yield from cases(
            f"Trilu {upper}", "T B,L,L", partial(node, "Trilu", upper=upper), ((12, 256), (100, 61)), TYPES
        )
    yield from cases("EyeLike", "T R,L", partial(node, "EyeLike"), FLAT[:2])
    yield from cases("ConstantOfShape", "T R,L", lambda n, x: n.ConstantOfShape(n.Shape(x)), FLAT[:2])
    yield from cases(
        "Range",
        "T L",
        lambda n, x: n.Range(np.int64(0), n.Mul(n.Size(x), np.int64(8)), np.int64(1)),
        ((100000,), (500001,)),
        "u8",
    )
    yield from cases(
        "Range of floats",
        "f32 ; f32 ",
        lambda n, a, b: n.Range(a, n.Add(n.Mul(a, 0.0), 500000.0), n.Add(n.Mul(b, 0.0), 0.5)),
        ((),),
    )
    yield from cases(
        "ReverseSequence",
        "T L,B,64; i64+ B",
        lambda n, x, k: n.ReverseSequence(x, n.Min(k, [10])),
        ((128, 16), (61, 33)),
    )
    yield from cases("CenterCropPad", "T N,64,H,W", lambda n, x: n.CenterCropPad(x, [50, 60], axes=[2, 3]), IMAGES[:2])


def gathers() -> Iterator[Case]:
    """Gathers and scatters."""
    yield from cases("Gather rows", "T 30000,64; i64<30000 B,L", partial(node, "Gather"), ((16, 512), (61, 61)), TYPES)
    yield from cases(
        "Gather columns", "T R,768; i64<768 L", partial(node, "Gather", axis=1), ((500, 300), (3001, 33)), "f32 f16 i64"
    )
    yield from cases("Gather i32", "T 3000,768; i32<3000 B,L", partial(node, "Gather"), ((16, 128), (3, 61)))
    yield from cases(
        "embedding bag",
        "T 30000,64; i64<30000 B,L",
        lambda n, t, i: n.ReduceMean(n.Gather(t, i), [1], keepdims=0),
        ((64, 64), (999, 7)),
    )
    yield from cases(
        "embeddings summed",
        "T 30000,768; T 512,768; i64<30000 B,L; i64<512 B,L",
        lambda n, t, p, i, j: n.Add(n.Gather(t, i), n.Gather(p, j)),
        ((8, 128), (3, 61)),
    )
    for axis, name in ((0, "rows"), (1, "columns")):
        yield from cases(
            f"GatherElements {name}",
            "T R,L; i64! R,L",
            lambda n, x, i, a=axis: n.GatherElements(x, n.Mod(i, np.int64(200)), axis=a),
            ((500, 768), (2001, 301)),
            TYPES,
        )
        yield from cases(
            f"ScatterElements {name}",
            "T R,L; i64! R,L; T R,L",
            lambda n, x, i, u, a=axis: n.ScatterElements(x, n.Mod(i, np.int64(200)) if a == 0 else i, u, axis=a),
            ((500, 768), (2001, 301)),
            "f32 i64",
            exact=axis == 1,
        )
    for how in ("add", "max"):
        yield from cases(
            f"ScatterElements {how}",
            "T R,L; i64<R S,L; T S,L",
            partial(node, "ScatterElements", axis=0, reduction=how),
            ((300, 256, 1000), (2001, 7, 20001)),
            "f32 i64",
        )
        yield from cases(
            f"ScatterND {how}",
            "T R,L; i64<R S,1; T S,L",
            partial(node, "ScatterND", reduction=how),
            ((300, 256, 1000), (2001, 7, 20001)),
        )
    yield from cases(
        "ScatterND rows",
        "T R,L; i64! S,1; T S,L",
        lambda n, x, i, u: n.ScatterND(x, i, u),
        ((3000, 256, 100),),
        TYPES,
        exact=False,
    )


def indexed() -> Iterator[Case]:
    """Gathers by several indices, and one-hot rows."""
    yield from cases(
        "GatherND", "T 100,100,L; i64<100 S,2", partial(node, "GatherND"), ((64, 10000), (7, 50001)), TYPES
    )
    yield from cases(
        "GatherND batched", "T B,100,64; i64<100 B,S,1", partial(node, "GatherND", batch_dims=1), ((16, 500), (61, 33))
    )
    for axis in (-1, 1):
        yield from cases(
            f"OneHot {axis}",
            "i64<1000 R",
            lambda n, x, a=axis: n.OneHot(x, np.int64(1000), n.Cast([0, 1], to=1), axis=a),
            ((1000,), (3001,)),
        )
    yield from cases(
        "one-hot by Equal", "i64<1000 R,1", lambda n, x: n.Cast(n.Equal(x, np.arange(1000)), to=1), ((1000,), (3001,))
    )
    yield from cases(
        "Scatter", "T R,L; i64! R,L; T R,L", partial(node, "Scatter", axis=1), ((500, 768), (2001, 301)), opset=10
    )
    yield from cases(
        "TensorScatter",
        "T B,12,512,64; T B,12,L,64; i64<400 B",
        partial(node, "TensorScatter"),
        ((1, 16), (4, 7)),
        opset=24,
    )


def sorts() -> Iterator[Case]:
    """Sorts, selections of data-dependent size, cumulative sums."""
    for k in (1, 5, 50):
        yield from cases(
            f"TopK {k}",
            "T R,L",
            lambda n, x, k=k: n.TopK(x, [k], outputs=2),
            ((64, 1000), (4, 32000), (999, 77)),
            "f32 f64 i64",
        )
    yield from cases("TopK columns", "T R,L", lambda n, x: n.TopK(x, [5], axis=0, outputs=2), ((1000, 64),))
    yield from cases(
        "argsort",
        "T R,L",
        lambda n, x: n.TopK(x, n.Slice(n.Shape(x), [1], [2]), largest=0, outputs=2)[1],
        ((16, 1000), (256, 61)),
        "f32",
        exact=False,
    )
    for op in ("CumSum", "CumProd"):
        opset = 26 if op == "CumProd" else 22
        for axis, sizes in ((1, ((64, 1000), (4000, 61))), (0, ((1000, 64), (61, 4000)))):
            yield from cases(
                f"{op} {axis}",
                "T R,L",
                lambda n, x, a=axis, op=op: getattr(n, op)(x, np.int64(a)),
                sizes,
                "f32 f64 i64" if op == "CumSum" else "f32",
                opset=opset,
            )
    yield from cases(
        "positions by CumSum", "i64<2 B,L", lambda n, m: n.Mul(n.CumSum(m, np.int64(1)), m), ((16, 4096), (999, 61))
    )
    yield from cases("NonZero", "T R,L", partial(node, "NonZero"), ((512, 512), (3001, 61)), "b f32 i64")
    yield from cases("Compress", "T R,L; b R", partial(node, "Compress", axis=0), ((2000, 256), (50001, 7)))
    yield from cases(
        "boolean mask",
        "T R,64",
        lambda n, x: n.Gather(x, n.Squeeze(n.NonZero(n.Greater(n.ReduceMax(x, [1], keepdims=0), 2.0)), [0])),
        ((4000,), (20001,)),
    )
    yield from cases("Unique", "i64<500 R", partial(node, "Unique", outputs=4), ((10000,), (50001,)))
    yield from cases(
        "NonMaxSuppression",
        "f32~ 1,N,4; f32+ 1,C,N",
        lambda n, b, s: n.NonMaxSuppression(b, s, [100], np.float32([0.5]), np.float32([0.3])),
        ((1000, 4), (300, 20)),
    )
    for op in ("ArgMax", "ArgMin"):
        for axis, sizes in ((1, ((1000, 1000), (4000, 61))), (0, ((1000, 1000), (61, 4000)))):
            yield from cases(f"{op} {axis}", "T R,L", partial(node, op, axis=axis), sizes, "f32 f64 i64 i8")
    yield from cases(
        "last token",
        "T B,L,768; i64<30 B",
        lambda n, x, k: n.GatherND(x, n.Unsqueeze(k, [1]), batch_dims=1),
        ((64, 128), (61, 33)),
    )


def every() -> Iterator[Case]:
    """Yield all cases of this module."""
    yield from layouts()
    yield from slices()
    yield from pads()
    yield from gathers()
    yield from indexed()
    yield from sorts()

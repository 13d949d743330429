"""Cases that reduce or normalise: reductions over each kind of axes, norms, softmax."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.single.case import MICROSOFT, Case, Net, Sizes, cases
from benchmarks.single.elementwise import node

MATRIX: Sizes = ((768, 768), (61, 10007), (30000, 17))
LATTICE: Sizes = ((1, 56, 56), (4, 61, 59))
TEXT: Sizes = ((1, 128), (8, 61), (4, 509))
AXES: dict[str, tuple[str, list[int], Sizes]] = {
    "last": ("R,L", [-1], MATRIX),
    "first": ("R,L", [0], MATRIX),
    "middle": ("B,L,128", [1], ((4, 500), (301, 13))),
    "outer two of three": ("B,L,128", [0, 1], ((4, 500), (301, 13))),
    "pixels": ("N,64,H,W", [2, 3], LATTICE),
    "channels": ("N,64,H,W", [1], LATTICE),
    "all but channels": ("N,64,H,W", [0, 2, 3], LATTICE),
    "first and last": ("B,L,128", [0, 2], ((4, 500), (301, 13))),
    "all": ("R,L", [], MATRIX),
}
COMMON = ("ReduceSum", "ReduceMean", "ReduceMax")
RARE = ("ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")


def reductions() -> Iterator[Case]:
    """Each reduction over each kind of axes."""
    for op in (*COMMON, *RARE):
        for name, (dims, axes, sizes) in AXES.items():
            if op in RARE and name not in ("last", "first", "pixels"):
                continue
            types = "f32 f16 f64 i64" if name in ("last", "first") and op in COMMON else "f32"
            mark = "+" if "Log" in op else ""
            yield from cases(
                f"{op} {name}",
                f"T{mark} {dims}",
                lambda n, x, op=op, a=axes: node(op, n, x, *([a] if a else []), keepdims=int(len(a) % 2)),
                sizes,
                types,
            )
    for op in ("ReduceMax", "ReduceMin"):
        yield from cases(f"{op} last", "T R,L", lambda n, x, op=op: node(op, n, x, [-1]), MATRIX[:2], "i32 i8 u8")
    yield from cases("any of booleans", "b R,L", lambda n, x: n.ReduceMax(x, [-1]), MATRIX[:2], opset=20)
    yield from cases(
        "variance",
        "T R,L",
        lambda n, x: n.ReduceMean(n.Pow(n.Sub(x, n.ReduceMean(x, [-1])), 2.0), [-1]),
        MATRIX,
        "f32 f16 f64",
    )


def written_norm(n: Net, x: str) -> Any:
    """Write layer norm as old exporters do."""
    d = n.Sub(x, n.ReduceMean(x, [-1]))
    root = n.Sqrt(n.Add(n.ReduceMean(n.Pow(d, 2.0), [-1]), 1e-5))
    return n.Add(n.Mul(n.Div(d, root), n.weight(768)), n.weight(768))


def written_rms(n: Net, x: str) -> Any:
    """Write RMS norm as language models have it, computed in float32."""
    y = n.Cast(x, to=1)
    mean = n.ReduceMean(n.Pow(y, np.float32(2)), [-1])
    return n.Mul(n.weight(768), n.CastLike(n.Mul(y, n.Reciprocal(n.Sqrt(n.Add(mean, np.float32(1e-6))))), x))


def written_groups(n: Net, x: str) -> Any:
    """Write group norm as torch's exporter does."""
    y = n.InstanceNormalization(n.Reshape(x, [0, 8, -1]), np.ones(8, n.kind), np.zeros(8, n.kind))
    return n.Add(n.Mul(n.Reshape(y, n.Shape(x)), n.weight(64, 1, 1)), n.weight(64, 1, 1))


def norms() -> Iterator[Case]:
    """Norms, as operators and written out."""
    types = "f32 f16 f64"
    yield from cases("layer norm written out", "T B,L,768", written_norm, TEXT, types)
    yield from cases("RMS norm written out", "T B,L,768", written_rms, TEXT, "f32 f16")
    yield from cases("group norm written out", "T N,64,H,W", written_groups, LATTICE)
    yield from cases(
        "LayerNormalization",
        "T B,L,768",
        lambda n, x: n.LayerNormalization(x, n.weight(768), n.weight(768)),
        TEXT,
        types,
    )
    yield from cases("LayerNormalization ragged", "T R,L; T L; T L", partial(node, "LayerNormalization"), MATRIX)
    yield from cases(
        "RMSNormalization", "T B,L,768", lambda n, x: n.RMSNormalization(x, n.weight(768)), TEXT, types, opset=23
    )
    for op in ("SimplifiedLayerNormalization",):
        yield from cases(op, "T B,L,768", lambda n, x: n.SimplifiedLayerNormalization(x, n.weight(768)), TEXT[:2])


def fused_norms() -> Iterator[Case]:
    """Norms of other domains, and of channels."""
    yield from cases(
        "SkipLayerNormalization",
        "T B,L,768; T B,L,768",
        lambda n, x, s: n.SkipLayerNormalization(x, s, n.weight(768), n.weight(768), n.weight(768), domain=MICROSOFT),
        TEXT,
        "f32 f16",
    )
    yield from cases(
        "SkipSimplifiedLayerNormalization",
        "T B,L,768; T B,L,768",
        lambda n, x, s: n.SkipSimplifiedLayerNormalization(x, s, n.weight(768), domain=MICROSOFT),
        TEXT,
    )
    yield from cases(
        "EmbedLayerNormalization",
        "i32<3000 B,L",
        lambda n, x: n.EmbedLayerNormalization(
            x,
            None,
            n.weight(3000, 768),
            n.weight(512, 768),
            None,
            n.weight(768),
            n.weight(768),
            domain=MICROSOFT,
            outputs=2,
        )[0],
        TEXT[:2],
    )
    yield from cases(
        "GroupNormalization",
        "T N,64,H,W",
        lambda n, x: n.GroupNormalization(x, n.weight(64), n.weight(64), num_groups=8),
        LATTICE,
    )
    yield from cases(
        "InstanceNormalization",
        "T N,64,H,W",
        lambda n, x: n.InstanceNormalization(x, n.weight(64), n.weight(64)),
        LATTICE,
        "f32 f16",
    )
    yield from cases("MeanVarianceNormalization", "T N,64,H,W", partial(node, "MeanVarianceNormalization"), LATTICE)
    yield from cases(
        "channels-first layer norm",
        "T N,96,H,W",
        lambda n, x: n.Transpose(
            n.LayerNormalization(n.Transpose(x, perm=[0, 2, 3, 1]), n.weight(96), n.weight(96)), perm=[0, 3, 1, 2]
        ),
        LATTICE,
    )
    yield from cases("LpNormalization", "T R,L", partial(node, "LpNormalization"), MATRIX, "f32 f64")
    yield from cases(
        "L2 norm written out",
        "T R,L",
        lambda n, x: n.Div(x, n.Expand(n.Clip(n.ReduceL2(x, [-1]), 1e-12), n.Shape(x))),
        MATRIX,
    )


def softmaxes() -> Iterator[Case]:
    """Softmax over each kind of axis, and losses."""
    for op in ("Softmax", "LogSoftmax", "Hardmax"):
        yield from cases(f"{op} last", "T R,L", partial(node, op, axis=-1), MATRIX, "f32 f16 f64")
        yield from cases(f"{op} first", "T R,L", partial(node, op, axis=0), MATRIX)
        yield from cases(f"{op} channels", "T N,21,H,W", partial(node, op, axis=1), LATTICE)
    yield from cases(
        "masked softmax",
        "T B,12,L,L; T B,1,1,L",
        lambda n, x, m: n.Softmax(n.Add(n.Div(x, 8.0), m)),
        ((1, 128), (4, 61)),
        "f32 f16",
    )
    yield from cases(
        "softmax written out",
        "T R,L",
        lambda n, x: n.Div(*(lambda e: (e, n.ReduceSum(e, [-1])))(n.Exp(n.Sub(x, n.ReduceMax(x, [-1]))))),
        MATRIX,
    )
    yield from cases("log-sum-exp", "T R,L", lambda n, x: n.Log(n.ReduceSum(n.Exp(x), [-1])), MATRIX)
    yield from cases(
        "top probabilities", "T R,L", lambda n, x: n.TopK(n.Softmax(x), [5], outputs=2), ((64, 1000), (8, 32001))
    )
    yield from cases(
        "SoftmaxCrossEntropyLoss", "T R,1000; i64<1000 R", partial(node, "SoftmaxCrossEntropyLoss"), ((256,), (1001,))
    )
    yield from cases(
        "NegativeLogLikelihoodLoss", "T R,1000; i64<1000 R", partial(node, "NegativeLogLikelihoodLoss"), ((4096,),)
    )


def every() -> Iterator[Case]:
    """Yield all cases of this module."""
    yield from reductions()
    yield from norms()
    yield from fused_norms()
    yield from softmaxes()

"""Cases of products: matrices, Einsum, attention, recurrences, transforms and distances."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.single.case import MICROSOFT, Case, Net, Sizes, cases
from benchmarks.single.elementwise import node

TEXT: Sizes = ((1, 128), (4, 61))
EINSUMS: dict[str, tuple[str, Sizes]] = {
    "bij,bjk->bik": ("T B,128,64; T B,64,128", ((12,), (61,))),
    "bhid,bhjd->bhij": ("T B,12,L,64; T B,12,L,64", TEXT),
    "bhij,bhjd->bhid": ("T B,12,L,L; T B,12,L,64", TEXT),
    "bqhd,bkhd->bhqk": ("T B,L,12,64; T B,L,12,64", TEXT),
    "ij,kj->ik": ("T R,256; T 300,256", ((128,), (61,))),
    "i,j->ij": ("T R; T L", ((1000, 1000), (61, 7001))),
    "bij->bji": ("T B,R,L", ((12, 128, 128), (3, 501, 77))),
    "bii->bi": ("T B,L,L", ((500, 64), (33, 301))),
    "bij,bij->b": ("T B,R,L; T B,R,L", ((12, 128, 128), (301, 31, 77))),
    "bchw,bkhw->bck": ("T N,32,H,W; T N,48,H,W", ((1, 28, 28), (3, 31, 29))),
}


def matrices() -> Iterator[Case]:
    """Products of matrices in every type."""
    types = "f32 f16 f64 i64 i32"
    yield from cases(
        "MatMul weights 256", "T R,256", lambda n, x: n.MatMul(x, n.weight(256, 256)), ((128,), (509,), (7,)), types
    )
    for k in (768, 3072):
        yield from cases(
            f"MatMul weights {k}", f"T R,{k}", lambda n, x, k=k: n.MatMul(x, n.weight(k, 256)), ((16,), (61,))
        )
    yield from cases(
        "MatMul of one row", "T R,1024", lambda n, x: n.MatMul(x, n.weight(1024, 1024)), ((1,), (3,)), "f32 f16 f64"
    )
    yield from cases(
        "MatMul both given", "T R,K; T K,L", partial(node, "MatMul"), ((128, 256, 128), (61, 77, 301)), types
    )
    yield from cases("MatMul batched", "T B,12,L,64; T B,12,64,L", partial(node, "MatMul"), TEXT, "f32 f16 f64")
    yield from cases("MatMul of a vector", "T R,L; T L", partial(node, "MatMul"), ((1000, 1000), (5001, 61)), "f32 f64")
    yield from cases(
        "MatMul broadcast", "T R,K; T B,K,L", partial(node, "MatMul"), ((64, 64, 12, 64), (31, 77, 5, 301))
    )
    yield from cases(
        "Gemm",
        "T R,256",
        lambda n, x: n.Gemm(x, n.weight(300, 256), n.weight(300), transB=1),
        ((128,), (509,)),
        "f32 f16 f64",
    )
    yield from cases(
        "Gemm of A transposed", "T 256,R; T 256,L", partial(node, "Gemm", transA=1), ((128, 128), (509, 61))
    )
    yield from cases(
        "linear, GELU",
        "T B,L,256",
        lambda n, x: n.Gelu(n.Add(n.MatMul(x, n.weight(256, 1024)), n.weight(1024))),
        TEXT,
        "f32 f16",
        opset=20,
    )
    for op, a in (("FusedMatMul", {"transB": 1, "alpha": 0.125}), ("TransposeMatMul", {"transB": 1})):
        yield from cases(op, "T B,L,64; T B,L,64", partial(node, op, domain=MICROSOFT, **a), ((12, 128), (50, 61)))
    yield from cases(
        "FusedGemm",
        "T R,256",
        lambda n, x: n.FusedGemm(x, n.weight(256, 256), n.weight(256), activation="Relu", domain=MICROSOFT),
        ((128,), (509,)),
    )
    for equation, (inputs, sizes) in EINSUMS.items():
        yield from cases(f"Einsum {equation}", inputs, partial(node, "Einsum", equation=equation), sizes)


def inverses_and_distances() -> Iterator[Case]:
    """Determinants, inverses, and distances between rows."""
    yield from cases("Det", "T B,3,3", partial(node, "Det"), ((1000,), (30001,)))
    yield from cases(
        "Inverse",
        "T B,L,L",
        lambda n, x: n.Inverse(
            n.Add(x, n.Mul(n.EyeLike(n.Squeeze(n.Slice(x, [0], [1], [0]), [0])), 9.0)), domain=MICROSOFT
        ),
        ((1000, 4), (100, 16)),
    )
    for metric in ("euclidean", "sqeuclidean"):
        yield from cases(
            f"CDist {metric}",
            "T R,64; T L,64",
            partial(node, "CDist", metric=metric, domain=MICROSOFT),
            ((300, 300), (61, 1001)),
            "f32 f64",
        )
    yield from cases(
        "distances written out",
        "T R,1,16; T 1,L,16",
        lambda n, a, b: n.ReduceSum(n.Pow(n.Sub(a, b), 2.0), [-1], keepdims=0),
        ((300, 300), (61, 1001)),
    )


def _rotated(n: Net, x: str) -> Any:
    """Return (-second half, first half)."""
    first, second = n.Slice(x, [0], [32], [-1]), n.Slice(x, [32], [2**60], [-1])
    return n.Concat(n.Neg(second), first, axis=-1)


def _attention(n: Net, x: str, mask: str) -> Any:
    """Write attention of 12 heads as exporters do; the mask is int64."""
    q, k, v = (n.Reshape(t, [0, 0, 12, 64]) for t in n.Split(x, axis=-1, num_outputs=3, outputs=3))
    scores = n.Div(n.MatMul(n.Transpose(q, perm=[0, 2, 1, 3]), n.Transpose(k, perm=[0, 2, 3, 1])), 8.0)
    hidden = n.Mul(n.Sub(1.0, n.CastLike(n.Unsqueeze(mask, [1, 2]), x)), -1e4)
    out = n.MatMul(n.Softmax(n.Add(scores, hidden)), n.Transpose(v, perm=[0, 2, 1, 3]))
    return n.Reshape(n.Transpose(out, perm=[0, 2, 1, 3]), [0, 0, 768])


def attentions() -> Iterator[Case]:
    """Attention and what belongs to it."""
    yield from cases("attention written out", "T B,L,2304; i64<2 B,L", _attention, TEXT, "f32 f16")
    for causal in (0, 1):
        yield from cases(
            f"Attention causal {causal}",
            "T B,12,L,64; T B,12,L,64; T B,12,L,64",
            partial(node, "Attention", is_causal=causal),
            TEXT,
            "f32 f16",
            opset=23,
        )
    yield from cases(
        "Attention of one query",
        "T B,12,1,64; T B,12,L,64; T B,12,L,64",
        partial(node, "Attention"),
        ((1, 1024), (8, 301)),
        opset=23,
    )
    yield from cases(
        "MultiHeadAttention",
        "T B,L,768; T B,L,768; T B,L,768",
        partial(node, "MultiHeadAttention", num_heads=12, domain=MICROSOFT),
        TEXT,
    )
    yield from cases(
        "Microsoft's Attention",
        "T B,L,256",
        lambda n, x: n.Attention(x, n.weight(256, 768), n.weight(768), num_heads=4, domain=MICROSOFT),
        TEXT,
    )
    yield from cases(
        "GroupQueryAttention",
        "T 1,L,512; T 1,L,128; T 1,L,128",
        lambda n, q, k, v: n.GroupQueryAttention(
            q,
            k,
            v,
            None,
            None,
            n.Cast(n.Sub(n.Slice(n.Shape(q), [1], [2]), [1]), to=6),
            n.Cast(n.Squeeze(n.Slice(n.Shape(q), [1], [2]), [0]), to=6),
            num_heads=8,
            kv_num_heads=2,
            domain=MICROSOFT,
            outputs=3,
        ),
        ((128,), (301,)),
    )


def positions() -> Iterator[Case]:
    """Rotary and other embeddings of positions, and masks."""
    yield from cases(
        "rotary embedding written out",
        "T B,12,L,64; T 1,1,L,64; T 1,1,L,64",
        lambda n, x, c, s: n.Add(n.Mul(x, c), n.Mul(_rotated(n, x), s)),
        TEXT,
        "f32 f16",
    )
    yield from cases(
        "RotaryEmbedding",
        "T B,12,L,64; T B,L,32; T B,L,32",
        partial(node, "RotaryEmbedding"),
        TEXT,
        "f32 f16",
        opset=23,
    )
    yield from cases(
        "Microsoft's RotaryEmbedding",
        "T B,12,L,64; i64<512 B,L",
        lambda n, x, p: n.RotaryEmbedding(x, p, n.weight(512, 32), n.weight(512, 32), domain=MICROSOFT),
        TEXT,
    )
    yield from cases(
        "causal mask",
        "T B,12,L,L",
        lambda n, x: n.Where(
            n.Cast(n.Trilu(n.Expand(np.ones((1, 1), np.int64), n.Slice(n.Shape(x), [2], [4])), upper=0), to=9), x, -1e4
        ),
        TEXT,
        "f32 f16",
    )
    yield from cases(
        "relative positions",
        "i64 L",
        lambda n, x: n.Gather(
            n.weight(32, 12, kind="f32"),
            n.Clip(n.Add(n.Sub(n.Unsqueeze(x, [0]), n.Unsqueeze(x, [1])), np.int64(16)), np.int64(0), np.int64(31)),
        ),
        ((128,), (301,)),
    )


def gates() -> Iterator[Case]:
    """Activations written out."""
    yield from cases(
        "GELU by Erf",
        "T B,L,3072",
        lambda n, x: n.Mul(n.Mul(x, n.Add(n.Erf(n.Div(x, 1.4142135)), 1.0)), 0.5),
        TEXT,
        "f32 f16 f64",
    )
    yield from cases(
        "GELU by Tanh",
        "T B,L,3072",
        lambda n, x: n.Mul(
            n.Mul(x, 0.5), n.Add(n.Tanh(n.Mul(n.Add(x, n.Mul(n.Pow(x, 3.0), 0.044715)), 0.7978845)), 1.0)
        ),
        TEXT,
        "f32 f16",
    )
    yield from cases(
        "SiLU, gated",
        "T B,L,2048",
        lambda n, x: (lambda g, u: n.Mul(n.Mul(g, n.Sigmoid(g)), u))(*n.Split(x, axis=-1, num_outputs=2, outputs=2)),
        TEXT,
        "f32 f16",
    )
    yield from cases(
        "sinusoidal positions",
        "i64 R",
        lambda n, x: (lambda a: n.Concat(n.Sin(a), n.Cos(a), axis=-1))(
            n.Mul(n.Unsqueeze(n.Cast(x, to=1), [1]), n.weight(160, kind="f32"))
        ),
        ((128,), (4001,)),
    )


def other() -> Iterator[Case]:
    """Recurrences and transforms."""
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        yield from cases(
            op,
            "T L,B,64",
            lambda n, x, op=op, g=gates: node(
                op, n, x, n.weight(1, g * 64, 64), n.weight(1, g * 64, 64), n.weight(1, 2 * g * 64), hidden_size=64
            ),
            ((50, 1), (31, 7)),
        )
    yield from cases(
        "LSTM both ways",
        "T L,B,64",
        lambda n, x: n.LSTM(
            x, n.weight(2, 256, 64), n.weight(2, 256, 64), n.weight(2, 512), hidden_size=64, direction="bidirectional"
        ),
        ((50, 1), (31, 7)),
    )
    for length in (64, 400, 509):
        yield from cases(f"DFT {length}", f"T B,{length},1", lambda n, x: n.DFT(x, axis=1), ((16,), (100,)), opset=19)
    yield from cases("DFT of any length", "T B,L,1", lambda n, x: n.DFT(x, axis=1), ((16, 512), (16, 509)), opset=19)
    yield from cases(
        "STFT",
        "T B,L",
        lambda n, x: n.STFT(x, np.int64(160), np.hanning(400).astype(np.float32), np.int64(400)),
        ((1, 16000), (2, 5001)),
    )
    for op in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        yield from cases(
            op, "i64 R", lambda n, x, op=op: node(op, n, n.Squeeze(n.Slice(n.Shape(x), [0], [1]))), ((100000,),)
        )


def every() -> Iterator[Case]:
    """Yield all cases of this module."""
    yield from matrices()
    yield from inverses_and_distances()
    yield from attentions()
    yield from positions()
    yield from gates()
    yield from other()

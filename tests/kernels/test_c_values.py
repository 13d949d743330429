"""The C printer against numpy: every operation, every dtype, one lane and many, ugly values."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from polydyn.build.compiler import compile_flags, find_compiler
from polydyn.codegen.ir import Body, FlatLoad, For, Store
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.codegen.printers.c import KernelPrinter
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.reference import evaluate_value
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import (
    FLOATS,
    SMALL,
    SMALL_FLOATS,
    SMALL_INTEGERS,
    WIDENED,
    FromIndex,
    Load,
    Op,
    Value,
    cast,
    const,
    load,
    loads,
    op,
    transform,
    walk,
)  # fmt: skip
from polydyn.schedules.index import ZERO, Index
from tests.support.marks import slow
from tests.support.paths import ROOT

LEAF = ROOT / "codegen" / "leaf"
TARGETS = {16: "cpu:avx512", 8: "cpu:avx2", 4: "cpu:baseline"}
DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
STORAGE_TYPES = ("float16", "bfloat16", *SMALL)
N = 157
SIGNED_TYPES = ("int8", "int16", "int32", "int64")
ARITHMETIC = ("add", "sub", "mul", "div", "fmod", "mod", "max", "min", "neg", "abs", "sign")
RELATIONS = ("lt", "le", "eq", "ne", "gt", "ge")
LOGIC = ("and", "or", "xor", "not", "max", "min", *RELATIONS)
EXACT_FUNCTIONS = ("sqrt", "floor", "ceil", "rint", "reciprocal", "isnan", "isinf")
INEXACT_FUNCTIONS = ("exp", "log", "tanh", "erf", "sin", "cos", "sigmoid", "pow", "expm1", "log1p", "erfc", "atan2")


def values(dtype: str, seed: int) -> np.ndarray:
    """Return ugly values first, then random ones, in another order for every seed; 157 elements, a partial last vector.
    """
    r = np.random.default_rng(seed)
    t = numpy_dtype(dtype)
    if dtype in STORAGE_TYPES:
        bits = 8 * t.itemsize if dtype in SMALL_FLOATS[:5] else 16 if t.itemsize == 2 else 2 if dtype[-1] == "2" else 4
        every = np.arange(2**bits) if bits <= 8 else np.linspace(0, 2**16 - 1, 157).astype(int)
        wide = np.uint16 if t.itemsize == 2 else np.uint8
        return np.asarray(r.permutation(np.resize(every, 257 if bits == 8 else 157)).astype(wide)[:N].view(t))
    if dtype == "bool":
        return r.integers(0, 2, 157).astype(bool)
    if dtype in FLOATS:
        tiny, big = float(np.finfo(t).smallest_subnormal), float(np.finfo(t).max)
        ugly = [0.0, -0.0, 1, -1, 0.5, 2.5, -2.5, 3.5, np.nan, np.inf, -np.inf, tiny, -tiny, big, -big, 1e-30, 7, -7]
        a = np.concatenate([np.array(ugly, t), r.standard_normal(157 - len(ugly)).astype(t) * 8])
    else:
        info = np.iinfo(t)
        ugly = [0, 1, info.max, info.min, info.max - 1, info.min + 1, 2, 3, 5, 7]
        ugly += [-1, -2, -3] if info.min else []
        wide = r.integers(max(info.min, -(2**40)), min(info.max, 2**40), 60)
        small = r.integers(-9 if info.min else 0, 10, 157 - 60 - len(ugly))
        a = np.concatenate([np.array(ugly, t), wide.astype(t), small.astype(t)])
    return np.asarray(r.permutation(a))


Case = tuple[str, Value]
Kernels = dict[str, tuple[str, Value, list[str]]]
"""Maps a case to (function, expression, buffers)."""


def leaf(k: int, dtype: str) -> Value:
    """Return element i of buffer number k of that dtype."""
    return load(f"{dtype}_{k}", ("i",), dtype)


def cases() -> Iterator[Case]:
    """Yield (name, expression over ``leaf``)."""
    for t in DTYPES:
        a, b = leaf(0, t), leaf(1, t)
        if t == "bool":
            for name in LOGIC:
                yield f"{name} {t}", op(name, a) if name == "not" else op(name, a, b)
        else:
            for name in ARITHMETIC:
                if name in ("neg", "abs", "sign"):
                    if not (name == "neg" and t.startswith("uint")):
                        yield f"{name} {t}", op(name, a)
                else:
                    yield f"{name} {t}", op(name, a, b)
            for name in RELATIONS:
                yield f"{name} {t}", op(name, a, b)
        for w in ("where", "select"):
            yield f"{w} {t}", op(w, leaf(0, "bool"), a, b)
        for u in DTYPES:
            if not (t in FLOATS and u not in FLOATS and u != "bool"):
                yield f"cast {t} {u}", cast(a, u)
        if t in FLOATS:
            for name in EXACT_FUNCTIONS + INEXACT_FUNCTIONS:
                yield f"{name} {t}", op(name, a, b) if name in ("pow", "atan2") else op(name, a)
        elif t != "bool":
            yield f"pow {t}", op("pow", a, op("mod", op("abs", b), const(7, t)))
            yield f"index {t}", op("add", a, FromIndex(t, Index.of("i") * 3 + "n"))
            yield f"wrap {t}", op("gt", op("add", a, const(1, t)), a)
            yield f"wrap div {t}", op("div", op("mul", a, b), const(2, t))
    words = leaf(0, "int32"), leaf(1, "int32")
    yield "pair int32", op("pair", *words)
    yield "dot2 int32", op("dot2", *words)
    yield "dot2 add int32", op("add", leaf(1, "int32"), op("dot2", *words))
    yield "quad int32", op("quad", *words, *words)
    yield "dot4 int32", op("dot4", *words)
    yield "dot4 add int32", op("add", leaf(1, "int32"), op("dot4", *words))
    small = op("max", op("min", leaf(0, "float32"), const(100, "float32")), const(-100, "float32"))
    for u in ("int8", "int16", "int32", "int64", "float64"):
        yield f"cast float32 {u}", cast(op("where", op("isnan", small), const(0, "float32"), small), u)
    number = op("where", op("isnan", leaf(0, "float32")), const(0, "float32"), leaf(0, "float32"))
    for name, whole in (("clip", number), ("clip rint", op("rint", number))):
        clipped = op("min", op("max", whole, const(0, "float32")), const(255, "float32"))
        yield f"{name} uint8", cast(cast(clipped, "int32"), "uint8")
        yield f"{name} uint8 int32", cast(cast(cast(clipped, "int32"), "uint8"), "int32")
    for t in ("float32", "float64", "int32", "int64"):
        yield f"index as {t}", FromIndex(t, Index.of("i") * 7 // 3 - 5)
    yield "nan constant", op("add", leaf(0, "float32"), const(float("nan"), "float32"))
    yield "inf constant", op("min", leaf(0, "float32"), const(float("-inf"), "float32"))
    yield "denormal constant", op("mul", leaf(0, "float32"), const(1e-44, "float32"))
    for t in SIGNED_TYPES:
        yield f"least {t}", op("max", leaf(0, t), const(int(np.iinfo(t).min), t))
    yield from stored()
    yield from compound()


def stored() -> Iterator[Case]:
    """Yield cases of storage-only types: conversions, and arithmetic between a widening and a rounding."""
    for t in STORAGE_TYPES:
        x = cast(leaf(0, t), WIDENED[t])
        for u in ("float32", "float64", "int32", "bool"):
            if not (t in (*FLOATS, *SMALL_FLOATS) and u == "int32"):
                yield f"cast {t} {u}", cast(leaf(0, t), u)
        if t in SMALL_INTEGERS:
            yield f"cast int64 {t}", cast(leaf(0, "int64"), t)
            yield f"wrap {t}", cast(op("add", x, const(3, x.dtype)), t)
            continue
        if t != "float8_e8m0fnu":
            for u in ("float32", "float64", "float16"):
                yield f"cast {u} {t}", cast(leaf(0, u), t)
            yield f"rounded {t}", op("add", cast(cast(leaf(0, "float32"), t), "float32"), leaf(1, "float32"))
        if t in FLOATS:
            yield f"product {t}", cast(op("mul", x, cast(leaf(1, t), "float32")), t)
            yield f"max {t}", op("max", leaf(0, t), leaf(1, t))
            yield f"lt {t}", op("lt", leaf(0, t), leaf(1, t))
            yield f"where {t}", op("where", leaf(0, "bool"), leaf(0, t), const(1.5, t))


def compound() -> Iterator[Case]:
    """Yield random nested expressions of one numeric dtype, with conditions and casts between."""
    for seed in range(60):
        r = np.random.default_rng(seed)
        t = str(r.choice(["float32", "float32", "int32", "int64", "uint8", "float64", "int8"]))
        pool: list[Value] = [leaf(0, t), leaf(1, t), const(3, t)]
        bools: list[Value] = [leaf(0, "bool")]
        two = ["add", "sub", "mul", "max", "min", "div"] + ([] if t in FLOATS else ["mod", "fmod"])

        def some(choices: list[Value], r: np.random.Generator = r) -> Value:
            return choices[int(r.integers(len(choices)))]

        for _ in range(6):
            kind = r.integers(5)
            if kind <= 1:
                pool.append(op(str(r.choice(two)), some(pool), some(pool)))
            elif kind == 2:
                bools.append(op(str(r.choice(list(RELATIONS))), some(pool), some(pool)))
                bools.append(op(str(r.choice(["and", "or", "xor"])), some(bools), some(bools)))
            elif kind == 3:
                pool.append(op(str(r.choice(["where", "select"])), some(bools), some(pool), some(pool)))
            else:
                pool.append(op("add", some(pool), cast(some(bools), t)))
        yield f"compound {seed} {t}", pool[-1]


def flat(v: Value) -> Value:
    """Return the value with loads at flat addresses."""
    return transform(v, lambda x: FlatLoad(x.dtype, x.buffer, x.index[0]) if isinstance(x, Load) else x)


def kernels(width: int, vector: bool) -> tuple[str, Kernels, list[str]]:
    """Return (C text, kernels, cases without a vector form)."""
    found: Kernels = {}
    refused: list[str] = []
    texts = [f'#define PD_W {width}\n#include "pd_cpu.h"\n']
    for k, (name, v) in enumerate(cases()):
        loop = For("i", ZERO, Index.of("n"), (Store("y", Index.of("i"), flat(v)),))
        body: Body = (loop,)
        if vector:
            made = vectorise_loop(loop, width)
            if isinstance(made, Declined):
                refused.append(name)
                continue
            body = fold(made)
        buffers = list(dict.fromkeys(x.buffer for x in loads(v)))
        dtypes = {"y": v.dtype, **{b: b.rsplit("_", 1)[0] for b in buffers}}
        function = f"k{k}"
        texts.append(KernelPrinter(function, dtypes, ["y"], ["n"], inline_math=bool(k % 2)).kernel(body))
        found[name] = (function, v, buffers)
    return "\n".join(texts), found, refused


def built(width: int, vector: bool, folder: Path) -> tuple[ctypes.CDLL, Kernels, list[str]]:
    text, found, refused = kernels(width, vector)
    source, library = folder / f"v{width}{vector}.c", folder / f"v{width}{vector}.so"
    source.write_text(text)
    flags = [*compile_flags(find_compiler(), TARGETS[width]), "-fvisibility=default"]
    command = [*find_compiler().command, *flags, "-shared", f"-I{LEAF}", str(source), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library)), found, refused


def pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))


def disagreement(name: str, v: Value, got: np.ndarray, want: np.ndarray) -> str:
    if v.dtype in STORAGE_TYPES and v.dtype not in SMALL_INTEGERS:
        a, b = got.astype(np.float32), want.astype(np.float32)
        signs = (np.signbit(a) == np.signbit(b)) | (v.dtype == "float4_e2m1fn")  # there NaN becomes some zero
        bad = ~((a == b) & signs | (np.isnan(a) & np.isnan(b)))
    elif v.dtype not in FLOATS:
        bad = got != want
    else:
        with np.errstate(all="ignore"):
            inexact = name.split()[0] in INEXACT_FUNCTIONS or name.startswith("compound")
            bound = (4e-6 if v.dtype == "float32" else 1e-13) * np.abs(want) if inexact else 0
            close = np.abs(got.astype(np.float64) - want.astype(np.float64)) <= bound
        tiny = np.finfo(v.dtype).tiny
        bad = ~(close | (got == want) | (np.isnan(got) & np.isnan(want)) | (inexact & (np.abs(want) < tiny)
                                                                           & (np.abs(got) <= tiny)))  # fmt: skip
    at = np.flatnonzero(bad)[:3]
    return f"{name}: {[(got[i].item(), want[i].item()) for i in at]} (got, want) at {at.tolist()}" if at.size else ""


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("width", [16, slow(8), slow(4)])
def test_every_operation_means_what_numpy_means(width: int, vector: bool, tmp_path: Path) -> None:
    if TARGETS[width] == "cpu:avx512" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX-512")
    if width != 16 and not vector:
        pytest.skip("scalar code has no width")
    library, found, _ = built(width, vector, tmp_path)
    wrong = []
    for name, (function, v, buffers) in found.items():
        arrays = [values(b.rsplit("_", 1)[0], 10 * int(b.rsplit("_", 1)[1]) + 1) for b in buffers]
        n = N
        got = np.full(n + 1, 77).astype(numpy_dtype(v.dtype))
        sizes = (ctypes.c_int64 * 1)(n)
        getattr(library, function)(pointers([got, *arrays]), sizes, ctypes.c_int64(0), ctypes.c_int64(1), None)
        with np.errstate(all="ignore"):
            env = {"i": np.arange(n), "n": n}
            want = np.broadcast_to(evaluate_value(v, env, dict(zip(buffers, arrays, strict=True))), (n,))
        message = disagreement(name, v, got[:n], want)
        assert got[n] == np.asarray(77).astype(got.dtype), f"{name} wrote beyond its end"
        wrong += [message] if message else []
    assert not wrong, "\n".join(wrong)


def test_vectors_exist_for_the_dtypes_of_models() -> None:
    """Cases without lanes run as scalar code: float64, other integers, non-affine indices."""
    _, _, refused = kernels(16, True)
    served = {"float32", "int32", "int64", "uint8", "int8", "bool"}
    guarded = {name for name, v in cases() if any(isinstance(x, Op) and x.name == "where" for x in walk(v))}
    scalar = {name for name in refused if name not in guarded and set(name.split()[1:]) & {*DTYPES, *SMALL} <= served}
    assert {name for name in scalar if not name.startswith(("compound", "index as"))} == {"index uint8", "index int8"}
    assert "float64" in "\n".join(refused)

"""Products of bytes for the tests of CUDA code generation: groups, operands, and launches that must be exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.kernel import BASE, SHARED_LIMIT, Kernel
from polydyn.gpu.emulator import Counters
from polydyn.schedules.expr import Value, cast, const, load, op
from polydyn.schedules.index import ONE, Index, IndexLike
from polydyn.schedules.model import Array, Group, Statement, row_major, verify_group
from polydyn.schedules.tiling import Roles
from tests.support.cuda_groups import Arrays, launch

V = Index.of
ROLES = Roles((), "i", "j", "k", ())
Types = tuple[str, str]
Trans = tuple[bool, bool]
Choose = Callable[[Sequence[Kernel]], Kernel]


def array(name: str, dtype: str, role: str, *shape: IndexLike, transposed: bool = False) -> Array:
    dims = tuple(map(Index.of, shape))
    strides = row_major(dims[::-1])[::-1] if transposed else row_major(dims)
    return Array(name, dtype, dims, role, strides)


def product(types: Types, trans: Trans = (False, False), zero: bool = False, outputs: str = "PFQ") -> Group:
    """Build sums of products of bytes with the usual epilogues: plus a bias (P), times a scale (F), requantized (Q).

    ``trans``: A is stored as [K, M], B as [N, K]. ``zero``: a zero point is subtracted from A.
    """
    a: Value = cast(load("A", ("i", "k"), types[0]), "int32")
    if zero:
        a = op("sub", a, cast(load("Z", (0,), types[0]), "int32"))
    body = op("mul", a, cast(load("B", ("k", "j"), types[1]), "int32"))
    total = load("D", ("i", "j"), "int32")
    single = cast(total, "float32")
    scaled = op("rint", op("mul", single, const(2.0**-9, "float32")))
    clipped = op("max", op("min", scaled, const(127, "float32")), const(-128, "float32"))
    values = {
        "P": op("add", total, load("C", ("j",), "int32")),
        "F": op("mul", single, load("S", ("j",), "float32")),
        "Q": cast(clipped, "int8"),
    }
    values = {n: values[n] for n in outputs}
    arrays = [
        array("A", types[0], "input", "M", "K", transposed=trans[0]), array("Z", types[0], "input", ONE),
        array("B", types[1], "input", "K", "N", transposed=trans[1]), array("C", "int32", "input", "N"),
        array("S", "float32", "input", "N"), array("D", "int32", "local", "M", "N"),
        *(array(n, v.dtype, "output", "M", "N") for n, v in values.items()),
    ]  # fmt: skip
    ij = (("i", V("M")), ("j", V("N")))
    at = (V("i"), V("j"))
    statements = [
        Statement("INIT", ij, "D", at, const(0, "int32"), None, "init"),
        Statement("ACC", (*ij, ("k", V("K"))), "D", at, body, "sum", "backbone"),
        *(Statement(f"DONE{x}", ij, n, at, v, None, "epilogue") for x, (n, v) in enumerate(values.items())),
    ]
    group = Group("product", ("M", "N", "K"), {x.name: x for x in arrays}, tuple(statements))
    verify_group(group)
    return group


def whole(types: Types, shape: tuple[int, int, int], zero: int = 0) -> tuple[Arrays, Arrays]:
    """Return operands that contain all values of their types, and the expected outputs."""
    rng = np.random.default_rng(sum(shape))
    m, n, k = shape
    a, b = (
        rng.integers(np.iinfo(t).min, np.iinfo(t).max, size, dtype=t, endpoint=True)
        for t, size in zip(map(np.dtype, types), ((m, k), (k, n)), strict=True)
    )
    c, s = rng.integers(-(2**31), 2**31, n, dtype=np.int32), rng.standard_normal(n).astype(np.float32)
    total = (a.astype(np.int32) - np.int32(zero)) @ b.astype(np.int32)
    single = total.astype(np.float32)
    quantized = np.clip(np.rint(single * np.float32(2**-9)), -128, 127).astype(np.int8)
    given = {"A": a, "B": b, "C": c, "S": s, "Z": np.array([zero], a.dtype)}
    return given, {"P": total + c, "F": single * s, "Q": quantized}


def run(
    versions: Sequence[Kernel], types: Types, trans: Trans, shape: tuple[int, int, int],
    choose: Choose | None = None, reverse: bool = False, zero: int = 0, arch: str = BASE, limit: int = SHARED_LIMIT,
) -> tuple[Kernel, Counters]:  # fmt: skip
    """Run the first version that fits, or the one that ``choose`` selects from those, and compare every output.

    All versions of the same kind are compiled together.
    """
    given, want = whole(types, shape, zero)
    memory = {n: np.ascontiguousarray(x) for n, x in given.items()}
    for n, t in zip("AB", trans, strict=True):
        memory[n] = np.ascontiguousarray(memory[n].T) if t else memory[n]
    memory |= {n: np.full(x.shape, 77, x.dtype) for n, x in want.items()}
    want = {n: x for n, x in want.items() if n in versions[0].buffers}
    env = dict(zip("MNK", shape, strict=True))
    fits = [k for k in versions if k.fits(env, limit, 132, arch)]
    first = choose(fits) if choose else fits[0]
    alike = [k for k in versions if kind(k) == kind(first)]
    counters = launch(first, alike, env, lambda n: memory[n], reverse)
    for n, x in want.items():
        assert (memory[n] == x).all(), (first.version, shape, n)
    return first, counters[0]


def kind(k: Kernel) -> tuple[bool, bool]:
    return bool(k.after), k.version.endswith(LONG_SUFFIX)

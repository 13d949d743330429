"""Products of bytes on CUDA: tensor cores, few rows, int32 on CUDA cores. Emulated, they equal numpy bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from cuda_groups import Arrays, launch, with_bugs

from polydyn.codegen.cuda_contract import IMMA_TILES, CudaContractKernel
from polydyn.codegen.cuda_emit import LONG
from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.codegen.cuda_product import CudaTile, ProductGroup, TiledProduct
from polydyn.errors import CodegenError
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.emulator import Counters
from polydyn.gpu.errors import DeviceError
from polydyn.schedules.expr import Value, cast, const, load, op
from polydyn.schedules.index import ONE, Index, IndexLike
from polydyn.schedules.model import Array, Group, Statement, row_major, verify_group
from polydyn.schedules.tiling import Roles

V = Index.of
ROLES = Roles((), "i", "j", "k", ())
SMALL = CudaTile("imma", 64, 64, 64, 32, 32, 3, 2)
SMALL_FMA = CudaTile("fma", 32, 32, 16, 4, 4, 3)
SHAPES = [(1, 1, 1), (7, 31, 5), (63, 65, 64), (64, 64, 63), (65, 63, 65), (1, 129, 0), (72, 136, 401), (96, 48, 464)]
"""1, primes, around the tile, no steps, more steps than the ring holds; the last one allows copies of every width."""
Types = tuple[str, str]
Trans = tuple[bool, bool]


def array(name: str, dtype: str, role: str, *shape: IndexLike, transposed: bool = False) -> Array:
    dims = tuple(map(Index.of, shape))
    strides = row_major(dims[::-1])[::-1] if transposed else row_major(dims)
    return Array(name, dtype, dims, role, strides)


def product(types: Types, trans: Trans = (False, False), zero: bool = False, outputs: str = "PFQ") -> Group:
    """Sums of products of bytes and what models make of them: plus a bias (P), times a scale (F), quantized again (Q).

    ``trans``: A lies in memory as [K, M], B as [N, K]. ``zero``: a zero point is subtracted from A.
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
    """Operands of all values of their types, and what must come out."""
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


def ends(
    types: Types, trans: Trans, tile: CudaTile, zero: bool = False, widths: tuple[int, ...] = (16, 1),
    outputs: str = "P",
) -> tuple[CudaKernel, ...]:
    """The versions with the widest and with the narrowest accesses."""
    of = ProductGroup("bytes", product(types, trans, zero, outputs), ROLES)
    return tuple(TiledProduct(of, tile, width, width == 16).build()[0] for width in widths)


Choose = Callable[[Sequence[CudaKernel]], CudaKernel]


def run(
    versions: Sequence[CudaKernel], types: Types, trans: Trans, shape: tuple[int, int, int],
    choose: Choose | None = None, reverse: bool = False, zero: int = 0,
) -> tuple[CudaKernel, Counters]:  # fmt: skip
    """Runs the first version that fits, or the chosen one of those, and compares every output."""
    given, want = whole(types, shape, zero)
    memory = {n: np.ascontiguousarray(x) for n, x in given.items()}
    for n, t in zip("AB", trans, strict=True):
        memory[n] = np.ascontiguousarray(memory[n].T) if t else memory[n]
    memory |= {n: np.full(x.shape, 77, x.dtype) for n, x in want.items()}
    want = {n: x for n, x in want.items() if n in versions[0].buffers}
    env = dict(zip("MNK", shape, strict=True))
    fits = [k for k in versions if k.fits(env, multiprocessors=132)]
    first = choose(fits) if choose else fits[0]
    alike = [k for k in versions if kind(k) == kind(first)]
    counters = launch(first, alike, env, lambda n: memory[n], reverse)
    for n, x in want.items():
        assert (memory[n] == x).all(), (first.version, shape, n)
    return first, counters[0]


def kind(k: CudaKernel) -> tuple[bool, bool]:
    return bool(k.after), k.version.endswith(LONG)


def exactly(version: str) -> Choose:
    return lambda fits: next(k for k in fits if k.version == version)


MAIN: tuple[Types, Trans] = (("uint8", "int8"), (False, False))
"""What quantized models have: activations times weights [K, N]."""


@pytest.fixture(scope="module")
def main() -> tuple[CudaKernel, ...]:
    made = CudaContractKernel("bytes", product(*MAIN), ROLES).versions((SMALL,))
    return tuple(k for k in made if not k.version.startswith("gemv"))


# -- tensor cores ----------------------------------------------------------------------------------------------------


def test_weights_along_their_columns(main: tuple[CudaKernel, ...]) -> None:
    """Every shape, both orders of warps, no bank conflicts."""
    used = set()
    for shape, reverse in itertools.product(SHAPES, (False, True)):
        k, count = run(main, *MAIN, shape, reverse=reverse)
        used.add(k.version)
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0, (shape, k.version)
        assert (count.mma > 0) == (shape[2] > 0)
    assert {v.split("_")[4] for v in used} == {"16", "1"}


def test_every_width_of_copies(main: tuple[CudaKernel, ...]) -> None:
    """16, 8, 4 bytes at once or single bytes, stores of 16 bytes or of elements: the same numbers, no conflicts."""
    versions = [k.version for k in main if not k.after and not k.version.endswith(LONG)]
    widths = [v.removesuffix("_wide").split("_")[-1] for v in versions]
    assert widths == ["16", "16", "8", "4", "1"] and versions[0].endswith("_wide")
    for v in versions:
        _, count = run(main, *MAIN, SHAPES[-1], exactly(v))
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0, v
        assert (count.cp_async > 0) == (not v.endswith("_1"))


@pytest.mark.parametrize(
    ("types", "trans"),
    [(("int8", "int8"), (False, True)), (("int8", "uint8"), (True, False)), (("uint8", "uint8"), (True, True))],
)
def test_other_signs_and_transpositions(types: Types, trans: Trans) -> None:
    """Rows that memory does not have along the reduction are copied byte by byte, and the version says so."""
    versions = ends(types, trans, SMALL)
    assert [k.version.split("_")[3] for k in versions] == ["1" if trans[0] else "16", "1"]
    for n, shape in enumerate(SHAPES):
        _, count = run(versions, types, trans, shape, reverse=n % 2 == 1)
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0, shape


def test_sums_wrap_as_integers_do() -> None:
    """255 * 255 * 33100 is more than 2**31."""
    types, trans = ("uint8", "uint8"), (False, True)
    versions = ends(types, trans, SMALL, widths=(16,))
    k = 33104
    memory = {"A": np.full((1, k), 255, np.uint8), "B": np.full((16, k), 255, np.uint8), "Z": np.zeros(1, np.uint8),
              "C": np.zeros(16, np.int32), "S": np.ones(16, np.float32), "P": np.zeros((1, 16), np.int32)}  # fmt: skip
    env = {"M": 1, "N": 16, "K": k}
    launch(versions[0], versions, env, lambda n: memory[n])
    assert (memory["P"] == 255 * 255 * k - 2**32).all()


def test_split_reduction(main: tuple[CudaKernel, ...]) -> None:
    """Shares of the sums in the workspace are int32 as well."""
    shape = (65, 80, 24 * 64)
    first = next(k for k in main if k.fits(dict(zip("MNK", shape, strict=True)), multiprocessors=132))
    assert first.version.startswith("split_imma") and first.after
    for reverse in (False, True):
        run((first,), *MAIN, shape, reverse=reverse)


# -- CUDA cores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trans_b", [False, True])
def test_few_rows(trans_b: bool) -> None:
    types, trans = MAIN[0], (False, trans_b)
    versions = CudaContractKernel("bytes", product(types, trans, outputs="PQ"), ROLES).few_rows()
    used = set()
    for m, n, k in ((1, 31, 48), (2, 257, 16), (3, 16, 1040), (8, 65, 32), (7, 1, 0), (1, 64, 131)):
        n, k = (n, k // 16 * 16) if trans_b else (-(-n // 8) * 8, k)
        for reverse in (False, True):
            first, count = run(versions, types, trans, (m, n, k), reverse=reverse)
            used.add(first.version)
            assert count.shared_conflicts == count.mma == 0
    way = "k16" if trans_b else "n8"
    assert used == {f"gemv_2_{way}", f"gemv_8_{way}"}


def test_signs_of_few_rows_are_seen() -> None:
    types, trans = MAIN[0], (False, True)
    versions = CudaContractKernel("bytes", product(types, trans, outputs="P"), ROLES).few_rows()
    first, _ = run(versions, types, trans, (2, 31, 64))
    broken = replace(first, text=first.text.replace("pd_dp4a_u8s8(", "pd_dp4a_s8u8("))
    assert broken.text != first.text
    with pytest.raises(AssertionError):
        run((broken,), types, trans, (2, 31, 64))


def test_a_zero_point_goes_to_cuda_cores_by_name() -> None:
    """Tensor cores multiply bytes as they are stored; what is subtracted first is int32."""
    types, trans = MAIN
    versions = ends(types, trans, SMALL_FMA, True, (4,))
    assert versions[0].version.startswith("fma_")
    for shape in SHAPES:
        _, count = run(versions, types, trans, shape, zero=131)
        assert count.mma == 0
    with pytest.raises(CodegenError, match="imma of int32 is not built"):
        ends(types, trans, SMALL, True)


def test_int32_operands_wrap() -> None:
    types, trans = ("int32", "int32"), (False, False)
    versions = ends(types, trans, SMALL_FMA, widths=(4,))
    for shape in ((7, 31, 5), (33, 31, 50)):
        run(versions, types, trans, shape)


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(CodegenError, match="fma of uint8 is not built"):
        ends(*MAIN, SMALL_FMA)
    with pytest.raises(CodegenError, match="mma of uint8 is not built"):
        ends(*MAIN, replace(SMALL, instruction="mma", bk=32))


# -- what must be seen -----------------------------------------------------------------------------------------------

MMA = "pd_mma_m16n8k32_u8s8("


def instead(before: str, arguments: str, after: str = "") -> str:
    """The instruction with other registers."""
    return f"[](int32_t *d, const uint32_t *a, const uint32_t *b) {{ {before} {MMA}{arguments}); {after} }}("


BROKEN = {
    "signs swapped": (MMA, "pd_mma_m16n8k32_s8u8("),
    "columns taken as unsigned": (MMA, "pd_mma_m16n8k32_u8("),
    "pairs of columns not taken apart": ("pd_byte_columns(", "(void)("),
    "all lanes take the steps of the first": (", ((int32_t)lane));", ", 0);"),
    "read without transposition": ("pd_ldmatrix_x4_trans(", "pd_ldmatrix_x4("),
    "row fragments in another order": (MMA, instead("const uint32_t o[4] = {a[0], a[2], a[1], a[3]};", "d, o, b")),
    "a sum lost": (MMA, instead("int32_t o = d[3];", "d, a, b", "d[3] = o;")),
    "one barrier fewer": ("pd_cp_async_wait<1>();\n    pd_syncthreads();", "pd_cp_async_wait<1>();"),
    "sums staged into a ring in use": ("pd_cp_async_wait<0>();\n  pd_syncthreads();", "pd_cp_async_wait<0>();"),
    "rows copied beyond their end": ("(K + (-64)*b_k + (-16)*tid", "(K + 16 + (-64)*b_k + (-16)*tid"),
    "column guard dropped": (" && (16*e_vec) < N", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken() -> tuple[CudaKernel, ...]:
    return with_bugs(ends(*MAIN, SMALL, widths=(16,), outputs="Q")[0], BROKEN)


@pytest.mark.parametrize("bug", BROKEN)
def test_planted_bugs_are_caught(bug: str, broken: tuple[CudaKernel, ...]) -> None:
    wrong = 0
    for reverse in (False, True):
        try:
            run(broken, *MAIN, (80, 80, 272), lambda fits: fits[list(BROKEN).index(bug)], reverse)
        except (AssertionError, DeviceError):
            wrong += 1
    assert wrong


def test_two_builds_are_the_same(main: tuple[CudaKernel, ...]) -> None:
    """Two runs are, too: ``run`` compares every bit of every output, in both orders of warps."""
    (again,) = ends(*MAIN, SMALL, widths=(16,), outputs="PFQ")
    assert again == next(k for k in main if k.version == again.version)


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_products_of_bytes_compile_without_spills(arch: str) -> None:
    other: tuple[Types, Trans] = ("int8", "int8"), (False, True)
    rows = [CudaContractKernel("rows", product(*x, outputs="F"), ROLES).few_rows()[-1] for x in (MAIN, other)]
    tiles = [ends(*x, IMMA_TILES[0], widths=(16,), outputs="Q")[0] for x in (MAIN, other)]
    for k in (*tiles, *rows):
        use = compile_cuda(k.text, arch).kernels[k.name]
        assert use.spill_stores == use.spill_loads == use.stack == 0, k.version
    wanted = ("cp.async.cg.shared.global", "mma.sync.aligned.m16n8k32", "st.global.v4", "ldmatrix.sync")
    for k, more in zip(tiles, (("prmt.b32", "x4.trans", "u8.s8"), ("s8.s8",)), strict=True):
        text = compile_cuda(k.text, arch, kind="ptx").image.decode(errors="replace")
        assert all(w in text for w in (*wanted, *more)), k.version

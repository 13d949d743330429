"""Byte products on CUDA: tensor cores, GEMV, int32 on CUDA cores. Emulated, they equal numpy bit by bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.product import TiledProduct
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import IMMA_TILES, CudaContractKernel
from polydyn.codegen.kernel import Kernel
from polydyn.errors import CodegenError
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from tests.support.cuda_bytes import ROLES, Choose, Trans, Types, product, run
from tests.support.cuda_groups import launch, with_bugs
from tests.support.marks import slow

SMALL_IMMA = CudaTile("imma", 64, 64, 64, 32, 32, 3, 2)
SMALL_FMA = CudaTile("fma", 32, 32, 16, 4, 4, 3)
SHAPES = [(1, 1, 1), (7, 31, 5), (63, 65, 64), (64, 64, 63), (65, 63, 65), (1, 129, 0), (72, 136, 401), (96, 48, 464)]
"""1, primes, around the tile, no steps, more steps than the ring holds; the last one allows copies of every width."""


def ends(
    types: Types,
    trans: Trans,
    tile: CudaTile,
    zero: bool = False,
    widths: tuple[int, ...] = (16, 1),
    outputs: str = "P",
) -> tuple[Kernel, ...]:
    """Return the versions with the widest and with the narrowest accesses."""
    of = ProductGroup("bytes", product(types, trans, zero, outputs), ROLES)
    return tuple(TiledProduct(of, tile, width, width == 16).build()[0] for width in widths)


def exactly(version: str) -> Choose:
    return lambda fits: next(k for k in fits if k.version == version)


MAIN: tuple[Types, Trans] = (("uint8", "int8"), (False, False))
"""The case of quantized models: activations times weights [K, N]."""


@pytest.fixture(scope="module")
def main() -> tuple[Kernel, ...]:
    made = CudaContractKernel("bytes", product(*MAIN), ROLES).versions((SMALL_IMMA,))
    return tuple(k for k in made if not k.version.startswith("gemv"))


# -- tensor cores ----------------------------------------------------------------------------------------------------


def test_weights_along_their_columns(main: tuple[Kernel, ...]) -> None:
    """Every shape, both orders of warps, no bank conflicts."""
    used = set()
    for shape, reverse in itertools.product(SHAPES, (False, True)):
        k, count = run(main, *MAIN, shape, reverse=reverse)
        used.add(k.version)
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0, (shape, k.version)
        assert (count.mma > 0) == (shape[2] > 0)
    assert {v.split("_")[4] for v in used} == {"16", "1"}


def test_every_width_of_copies(main: tuple[Kernel, ...]) -> None:
    """16, 8, 4 bytes at once or single bytes, stores of 16 bytes or of elements: the same numbers, no conflicts."""
    versions = [k.version for k in main if not k.after and not k.version.endswith(LONG_SUFFIX)]
    widths = [v.removesuffix("_wide").split("_")[-1] for v in versions]
    assert widths == ["16", "16", "8", "4", "1"] and versions[0].endswith("_wide")
    for v in versions:
        _, count = run(main, *MAIN, SHAPES[-1], exactly(v))
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0, v
        assert (count.cp_async > 0) == (not v.endswith("_1"))


@pytest.mark.parametrize(
    ("types", "trans"),
    [slow(("int8", "int8"), (False, True)), (("int8", "uint8"), (True, False)), slow(("uint8", "uint8"), (True, True))],
)
def test_other_signs_and_transpositions(types: Types, trans: Trans) -> None:
    """Rows that are not contiguous along the reduction are copied byte by byte, which the version's name shows."""
    versions = ends(types, trans, SMALL_IMMA)
    assert [k.version.split("_")[3] for k in versions] == ["1" if trans[0] else "16", "1"]
    for n, shape in enumerate(SHAPES):
        _, count = run(versions, types, trans, shape, reverse=n % 2 == 1)
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0, shape


def test_sums_wrap_as_integers_do() -> None:
    """255 * 255 * 33100 is more than 2**31."""
    types, trans = ("uint8", "uint8"), (False, True)
    versions = ends(types, trans, SMALL_IMMA, widths=(16,))
    k = 33104
    memory = {"A": np.full((1, k), 255, np.uint8), "B": np.full((16, k), 255, np.uint8), "Z": np.zeros(1, np.uint8),
              "C": np.zeros(16, np.int32), "S": np.ones(16, np.float32), "P": np.zeros((1, 16), np.int32)}  # fmt: skip
    env = {"M": 1, "N": 16, "K": k}
    launch(versions[0], versions, env, lambda n: memory[n])
    assert (memory["P"] == 255 * 255 * k - 2**32).all()


def test_split_reduction(main: tuple[Kernel, ...]) -> None:
    """Partial sums in the workspace are int32 as well."""
    shape = (65, 80, 24 * 64)
    first = next(k for k in main if k.fits(dict(zip("MNK", shape, strict=True)), workers=132))
    assert first.version.startswith("split_imma") and first.after
    for reverse in (False, True):
        run((first,), *MAIN, shape, reverse=reverse)


# -- CUDA cores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trans_b", [False, True])
def test_few_rows(trans_b: bool) -> None:
    types, trans = MAIN[0], (False, trans_b)
    every = CudaContractKernel("bytes", product(types, trans, outputs="PQ"), ROLES).gemv_kernels()
    versions = [k for k in every if ("counted" in k.version) == trans_b]
    used = set()
    for m, n, k in ((1, 31, 48), (2, 257, 16), (3, 16, 1040), (8, 65, 32), (7, 1, 0), (1, 64, 131)):
        n, k = (n, k // 16 * 16) if trans_b else (-(-n // 8) * 8, k)
        for reverse in (False, True):
            first, count = run(versions, types, trans, (m, n, k), reverse=reverse)
            used.add(first.version)
            assert count.shared_conflicts == count.mma == 0
    way = "k16_counted_8" if trans_b else "n8"
    assert used == {f"gemv_2_{way}", f"gemv_8_{way}"}


def test_signs_of_few_rows_are_seen() -> None:
    types, trans = MAIN[0], (False, True)
    versions = CudaContractKernel("bytes", product(types, trans, outputs="P"), ROLES).gemv_kernels()
    first, _ = run(versions, types, trans, (2, 31, 64))
    broken = replace(first, text=first.text.replace("pd_dp4a_u8s8(", "pd_dp4a_s8u8("))
    assert broken.text != first.text
    with pytest.raises(AssertionError):
        run((broken,), types, trans, (2, 31, 64))


def test_a_zero_point_goes_to_cuda_cores_by_name() -> None:
    """Tensor cores multiply stored bytes; after a subtraction operands are int32."""
    types, trans = MAIN
    versions = ends(types, trans, SMALL_FMA, True, (4,))
    assert versions[0].version.startswith("fma_")
    for shape in SHAPES:
        _, count = run(versions, types, trans, shape, zero=131)
        assert count.mma == 0
    with pytest.raises(CodegenError, match="imma of int32 is not built"):
        ends(types, trans, SMALL_IMMA, True)


def test_int32_operands_wrap() -> None:
    types, trans = ("int32", "int32"), (False, False)
    versions = ends(types, trans, SMALL_FMA, widths=(4,))
    for shape in ((7, 31, 5), (33, 31, 50)):
        run(versions, types, trans, shape)


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(CodegenError, match="fma of uint8 is not built"):
        ends(*MAIN, SMALL_FMA)
    with pytest.raises(CodegenError, match="mma of uint8 is not built"):
        ends(*MAIN, replace(SMALL_IMMA, instruction="mma", bk=32))


# -- what must be seen -----------------------------------------------------------------------------------------------

MMA = "pd_mma_m16n8k32_u8s8("


def instead(before: str, arguments: str, after: str = "") -> str:
    """Return the instruction with other registers."""
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
    "sums staged into a ring in use": ("pd_syncthreads();\n    if ((b_k + 1) <", "if ((b_k + 1) <"),
    "rows copied beyond their end": ("(K + (-64)*b_k + (-16)*tid", "(K + 16 + (-64)*b_k + (-16)*tid"),
    "column guard dropped": (" && (16*e_vec) < N", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken() -> tuple[Kernel, ...]:
    return with_bugs(ends(*MAIN, SMALL_IMMA, widths=(16,), outputs="Q")[0], BROKEN)


@pytest.mark.parametrize("bug", BROKEN)
def test_planted_bugs_are_caught(bug: str, broken: tuple[Kernel, ...]) -> None:
    wrong = 0
    for reverse in (False, True):
        try:
            run(broken, *MAIN, (80, 80, 272), lambda fits: fits[list(BROKEN).index(bug)], reverse)
        except (AssertionError, DeviceError):
            wrong += 1
    assert wrong


def test_two_builds_are_the_same(main: tuple[Kernel, ...]) -> None:
    """Two runs are equal, too: ``run`` compares every bit of every output, in both orders of warps."""
    (again,) = ends(*MAIN, SMALL_IMMA, widths=(16,), outputs="PFQ")
    assert again == next(k for k in main if k.version == again.version)


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("arch", [slow("sm_80"), "sm_90a"])
def test_products_of_bytes_compile_without_spills(arch: str) -> None:
    other: tuple[Types, Trans] = ("int8", "int8"), (False, True)
    rows = [CudaContractKernel("rows", product(*x, outputs="F"), ROLES).gemv_kernels()[-1] for x in (MAIN, other)]
    tiles = [ends(*x, IMMA_TILES[0], widths=(16,), outputs="Q")[0] for x in (MAIN, other)]
    for k in (*tiles, *rows):
        use = compile_cuda(k.text, arch).kernels[k.name]
        assert use.spill_stores == use.spill_loads == use.stack == 0, k.version
    wanted = ("cp.async.cg.shared.global", "mma.sync.aligned.m16n8k32", "st.global.v4", "ldmatrix.sync")
    for k, more in zip(tiles, (("prmt.b32", "x4.trans", "u8.s8"), ("s8.s8",)), strict=True):
        text = compile_cuda(k.text, arch, kind="ptx").image.decode(errors="replace")
        assert all(w in text for w in (*wanted, *more)), k.version


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_narrow_copies_leave_registers_for_pairs() -> None:
    """Many addresses, in addition to the permuted fragments, used to spill on these architectures."""
    k = ends(*MAIN, IMMA_TILES[0], widths=(8,))[0]
    use = compile_cuda(k.text, "sm_86").kernels[k.name]
    assert use.spill_stores == use.spill_loads == use.stack == 0

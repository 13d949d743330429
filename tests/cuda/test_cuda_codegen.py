"""Generated CUDA kernels, executed on the strict CPU emulation and compared with numpy; compiled if nvcc exists."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import MMA_TILES, MORE_FMA_TILES, MORE_TILES, CudaContractKernel
from polydyn.codegen.ir import Alloc, Body, Let
from polydyn.codegen.printers.cuda import shared_bytes
from polydyn.codegen.split import partial_group
from polydyn.errors import CodegenError
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.index import Index
from polydyn.schedules.tree import verify_tree
from polydyn.schedules.tree.gpu import gpu_product
from tests.support.cuda_groups import Arrays, first_fit, placed, plan_of, run, version, with_bugs
from tests.support.marks import slow

node = helper.make_node
erf = np.vectorize(math.erf, otypes=[np.float64])


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(dtype)


def close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], tolerance: float = 2e-6) -> bool:
    a, b = got.astype(np.float64), want.astype(np.float64)
    return a.shape == b.shape and bool(np.abs(a - b).max(initial=0) <= tolerance * max(1.0, np.abs(b).max(initial=0)))


def gemm(dtype: str, trans_a: bool = False, trans_b: bool = False) -> FusionPlan:
    """Plan gelu(A @ B + bias) + residual, either operand perhaps transposed, all dims symbolic."""
    nodes = [
        *([node("Transpose", ["x"], ["a"], perm=[1, 0])] if trans_a else []),
        *([node("Transpose", ["w"], ["b"], perm=[1, 0])] if trans_b else []),
        node("MatMul", ["a" if trans_a else "x", "b" if trans_b else "w"], ["p"]),
        node("Add", ["p", "bias"], ["q"]), node("Gelu", ["q"], ["g"]), node("Add", ["g", "r"], ["y"]),
    ]  # fmt: skip
    a, b = ("K", "M") if trans_a else ("M", "K"), ("N", "K") if trans_b else ("K", "N")
    return plan_of(nodes, {"x": a, "w": b, "bias": ("N",), "r": ("M", "N")}, ["y"], dtype=dtype)


def gemm_case(
    m: int, n: int, k: int, dtype: Any, trans_a: bool = False, trans_b: bool = False
) -> tuple[Arrays, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(m * 10007 + n * 101 + k)
    a, b, bias, r = (normal(rng, *s).astype(dtype) for s in ((m, k), (k, n), (n,), (m, n)))
    q = a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64)
    feeds = {"x": a.T.copy() if trans_a else a, "w": b.T.copy() if trans_b else b, "bias": bias, "r": r}
    return feeds, 0.5 * q * (1 + erf(q / math.sqrt(2))) + r.astype(np.float64)


def chosen(word: str) -> Callable[[PlacedGroup, dict[str, int]], Any]:
    return lambda p, env: version(p, word)


# -- element-wise and rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_element_wise_with_broadcast(dtype: str) -> None:
    """Vectors of 16 bytes if the rows' length allows it, single elements otherwise."""
    nodes = [node("Add", ["x", "b"], ["t"]), node("Add", ["t", "c"], ["u"]), node("Gelu", ["u"], ["y"])]
    plan = plan_of(nodes, {"x": ("M", "N"), "b": ("N",), "c": ("M", 1)}, ["y"], dtype=dtype)
    kernels = placed(plan)
    used = set()

    def fit(p: PlacedGroup, env: dict[str, int]) -> Any:
        used.add(first_fit(p, env).version)
        return first_fit(p, env)

    for shape in ((1, 1), (7, 31), (1, 257), (256, 1), (3, 0), (5, 72), (33, 8)):
        rng = np.random.default_rng(0)
        x, b, c = (normal(rng, *s).astype(dtype) for s in (shape, shape[1:], (shape[0], 1)))
        t = (x.astype(np.float64) + b) + c
        for reverse in (False, True):
            got, _ = run(plan, {"x": x, "b": b, "c": c}, fit, kernels, reverse=reverse)
            assert close(got["y"], 0.5 * t * (1 + erf(t / math.sqrt(2))), 2e-6 if dtype == "float32" else 3e-3), shape
    assert used == {"wide", "thread"}


def test_element_wise_vectors_of_several_types() -> None:
    """A comparison of floats chooses among integers: accesses of 1, 4 and 8 bytes an element; a guarded load stays."""
    nodes = [
        node("Greater", ["x", "z"], ["g"]), node("Where", ["g", "i", "j"], ["y"]), node("Cast", ["g"], ["h"], to=1),
        node("Pad", ["x", "p"], ["q"]), node("Add", ["q", "h"], ["r"]), node("Not", ["g"], ["n"]),
    ]  # fmt: skip
    constants = {"z": np.array(0, np.float32), "p": np.array([0, 0, 0, 0])}
    types = {"x": "float32", "i": "int64", "j": "int64"}
    plan = plan_of(nodes, {"x": ("M", "N"), "i": ("M", "N"), "j": ("N",)}, ["y", "r", "n"], constants, types)
    rng = np.random.default_rng(0)
    for shape in ((3, 8), (2, 7)):
        x, i = normal(rng, *shape), rng.integers(-9, 9, shape)
        feeds = {"x": x, "i": i, "j": i[0].copy()}
        got, _ = run(plan, feeds)
        assert (got["y"] == np.where(x > 0, i, i[0])).all() and (got["n"] == ~(x > 0)).all()
        assert close(got["r"], x + (x > 0))


@pytest.mark.parametrize(("dtype", "pads"), [("float32", [0, 1, 0, 1]), ("uint8", [0, 1, 0, 5])])
def test_rows_of_one_vector(dtype: str, pads: list[int]) -> None:
    """A padded row that is as long as a vector of results: 4 floats, 8 bytes."""
    plan = plan_of([node("Pad", ["x", "p"], ["y"])], {"x": ("M", 2)}, ["y"], {"p": np.array(pads)}, {"x": dtype})
    x = np.arange(1, 7).reshape(3, 2).astype(dtype)
    got, _ = run(plan, {"x": x}, chosen("wide"))
    np.testing.assert_array_equal(got["y"], np.pad(x, [(0, 0), (pads[1], pads[3])]))


def test_transposition_and_integers() -> None:
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0]), node("Add", ["t", "b"], ["s"]), node("Div", ["s", "c"], ["y"]),
    ]  # fmt: skip
    plan = plan_of(nodes, {"x": ("M", "N"), "b": ("N", 1), "c": ("M",)}, ["y"], dtype="int64")
    rng = np.random.default_rng(1)
    x, b, c = rng.integers(-50, 50, (5, 9)), rng.integers(-50, 50, (9, 1)), rng.integers(1, 5, 5)
    got, _ = run(plan, {"x": x, "b": b, "c": c})
    assert (got["y"] == np.trunc((x.T + b) / c).astype(np.int64)).all()


ROWS = {"warp": (1, 31, 257, 32), "block": (1, 31, 257, 1031), "warp_wide": (4, 132, 1028), "block_wide": (8, 1028),
        "lanes_wide": (4, 60, 132, 8)}  # fmt: skip
"""Maps versions of rows to lengths; vector versions need multiples of the vector length."""


@pytest.mark.parametrize("word", [*ROWS, "block recompute"])
def test_softmax_in_every_version(word: str) -> None:
    plan = plan_of([node("Softmax", ["x"], ["y"])], {"x": ("M", "N")}, ["y"])
    kernels = placed(plan)
    for m, n in zip((1, 7, 9, 3), ROWS.get(word, ROWS["block"]), strict=False):
        x = normal(np.random.default_rng(n), m, n)
        x[0, 0] = -np.inf if n > 1 else 0
        e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
        for reverse in (False, True):
            got, (count,) = run(plan, {"x": x}, chosen(word), kernels, reverse)
            assert close(got["y"], e / e.sum(1, keepdims=True)) and count.shared_conflicts == 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layer_norm(dtype: str) -> None:
    nodes = [node("LayerNormalization", ["x", "g", "b"], ["y"], axis=-1, epsilon=1e-5)]
    plan = plan_of(nodes, {"x": ("B", "M", "N"), "g": ("N",), "b": ("N",)}, ["y"], dtype=dtype)
    kernels = placed(plan)
    for word, shape in itertools.product(ROWS, ((1, 1, 1), (2, 3, 31), (1, 9, 304), (3, 1, 8))):
        if shape[-1] % 8 == 0 or "wide" not in word:
            rng = np.random.default_rng(shape[2])
            x, g, b = (normal(rng, *s).astype(dtype) for s in (shape, shape[2:], shape[2:]))
            wide = x.astype(np.float64)
            z = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
            got, _ = run(plan, {"x": x, "g": g, "b": b}, chosen(word), kernels)
            assert close(got["y"], z * g + b, 5e-6 if dtype == "float32" else 2e-3)


SHARING = {
    0: ("columns", {"no barrier": ("pd_syncthreads();", ""), "a warp twice": ("(lane + 32)", "(lane + 64)"),
                    "no surplus lane": ("pd_imin((int32_t)(32*bid + lane), (int32_t)(n0 + (-1)))", "(32*bid + lane)")}),
    1: ("lanes", {"lanes of other rows": ("4LL", "8LL")}),
}  # fmt: skip
"""Maps the axis of a softmax to the version whose rows share a warp or a block, and bugs that are detected."""


@pytest.mark.parametrize("axis", SHARING)
def test_rows_that_share_a_warp_or_a_block(axis: int) -> None:
    """Eight lanes per row of 61; a lane per column, whose rows eight warps take round-robin."""
    word, bugs = SHARING[axis]
    plan = plan_of([node("Softmax", ["x"], ["y"], axis=axis)], {"x": ("M", 61 if axis else "N")}, ["y"])
    (p,) = placed(plan)
    p = replace(p, kernels=(version(p, word), *with_bugs(version(p, word), bugs)))
    shapes = [(m, 61) for m in (1, 33)] if axis else [(1, 1), (70, 33), (9, 64)]

    def right(number: int, shape: tuple[int, int]) -> bool:
        x = normal(np.random.default_rng(1), *shape)
        e = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True, initial=-9))
        want, ok = e / e.sum(axis, keepdims=True), True
        for reverse in (False, True):
            got, (count,) = run(plan, {"x": x}, lambda p, env: p.kernels[number], (p,), reverse)
            ok = ok and close(got["y"], want) and count.shared_conflicts == 0
        return ok

    assert all(right(0, s) for s in shapes)
    for number in range(1, len(p.kernels)):
        with contextlib.suppress(DeviceError):
            assert not right(number, shapes[1]), list(bugs)[number - 1]


def test_rows_too_long_for_shared_memory_are_computed_again() -> None:
    (p,) = placed(plan_of([node("Softmax", ["x"], ["y"])], {"x": ("M", "N")}, ["y"]))
    names = {n: first_fit(p, {"n0": 4, "n1": n}).version for n in (101, 20001, 100001, 100000)}
    assert names == {101: "warp", 20001: "block", 100001: "block recompute", 100000: "lanes_wide"}


@pytest.mark.parametrize("dtype", ["int64", "int8"])
def test_lanes_combine_integers(dtype: str) -> None:
    """A maximum evaluated the other lane's number twice, the second time only in the lanes that took it."""
    rng = np.random.default_rng(4)
    plan = plan_of(
        [node("ReduceMax", ["x", "a"], ["y"], keepdims=0)], {"x": ("M", "N")}, ["y"], {"a": np.array([1])}, dtype
    )
    x = rng.integers(-100, 100, (3, 70)).astype(dtype)
    for word in ("warp", "block"):
        got, _ = run(plan, {"x": x}, lambda p, env, word=word: version(p, word))
        assert np.array_equal(got["y"], x.max(1)), word


@pytest.mark.parametrize(("axis", "op"), [(0, "ReduceSum"), (1, "ReduceSum"), (1, "ReduceMax"), (None, "ReduceMean")])
def test_reductions(axis: int | None, op: str) -> None:
    axes = {} if axis is None else {"a": np.array([axis])}
    plan = plan_of([node(op, ["x", *axes], ["y"], keepdims=0)], {"x": ("M", "N")}, ["y"], axes)
    for m, n in ((1, 1), (37, 5), (4, 300)):
        x = normal(np.random.default_rng(m), m, n)
        want = {"ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMean": np.mean}[op](x.astype(np.float64), axis=axis)
        got, _ = run(plan, {"x": x})
        assert close(got["y"], np.asarray(want), 1e-5)


# -- contractions ----------------------------------------------------------------------------------------------------

SMALL_FMA = CudaTile("fma", 32, 32, 16, 4, 4, 3)
SMALL_TF32 = CudaTile("tf32", 64, 64, 16, 32, 32, 3, 2)
SMALL_MMA = CudaTile("mma", 64, 64, 32, 32, 32, 3, 2)
MIDDLE, _, FEW_ROWS = MORE_TILES
SHAPES = [(1, 1, 1), (7, 31, 5), (63, 65, 64), (64, 64, 32), (65, 63, 33), (72, 136, 200), (1, 129, 0)]


def tiled(plan: FusionPlan, tile: CudaTile) -> tuple[PlacedGroup, ...]:
    """Return the plan's only contraction with a given tile."""
    (group,) = plan.groups
    form = lower_contract(plan, group, 0)
    assert isinstance(form, ContractGroup)
    versions = CudaContractKernel("contract", form.lowered.group, form.roles).versions((tile,))
    kernels = tuple(k for k in versions if not k.version.startswith("gemv"))
    return (PlacedGroup(group, form.lowered, "", kernels),)


@pytest.mark.parametrize(
    ("dtype", "tile", "trans"),
    [slow("float32", SMALL_FMA, (False, False)), ("float32", SMALL_FMA, (True, True)),
     ("float32", SMALL_TF32, (False, False)), slow("float32", SMALL_TF32, (True, True)),
     slow("float16", SMALL_MMA, (False, False)), ("float16", SMALL_MMA, (True, True)),
     slow("float16", SMALL_MMA, (False, True)), slow("float16", SMALL_MMA, (True, False)),
     ("float16", MIDDLE, (False, False)), slow("float16", FEW_ROWS, (False, False)),
     ("float16", FEW_ROWS, (True, True))],
)  # fmt: skip
def test_gemm_with_fused_epilogue(dtype: str, tile: CudaTile, trans: tuple[bool, bool]) -> None:
    """Every width of copies that an address allows, both warp orders, no bank conflicts."""
    plan = gemm(dtype, *trans)
    kernels = tiled(plan, tile)
    used = set()
    for shape in SHAPES:
        feeds, want = gemm_case(*shape, np.dtype(dtype), *trans)

        def every(p: PlacedGroup, env: dict[str, int]) -> Any:
            fits = [k for k in p.kernels if k.fits(env)]
            used.update(k.version for k in fits)
            return fits[0]

        got, (count,) = run(plan, feeds, every, kernels, reverse=shape[0] % 2 == 0)
        assert close(got["y"], want, 2e-6 if tile is SMALL_FMA else 2e-3), shape
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0, shape
        assert (count.mma > 0) == (tile is not SMALL_FMA and shape[2] > 0)
    assert used == {k.version for k in kernels[0].kernels if not k.after}, "too short for a split reduction"


def test_narrow_versions_give_the_same_bits() -> None:
    plan = gemm("float16")
    kernels = tiled(plan, SMALL_MMA)
    feeds, want = gemm_case(72, 72, 136, np.float16)
    names = [k.version for k in kernels[0].kernels if k.version.startswith("mma")]
    versions = [n for n in names if not n.endswith(LONG_SUFFIX)]
    assert [v.split("_")[3] for v in versions] == ["16", "8", "4", "2"]
    results = [run(plan, feeds, chosen(v), kernels)[0]["y"] for v in versions]
    assert all((r == results[0]).all() for r in results) and close(results[0], want, 2e-3)


@pytest.mark.parametrize(
    ("dtype", "tile"), [("float32", MORE_FMA_TILES[1]), slow("float16", SMALL_MMA), ("float16", FEW_ROWS)]
)
def test_split_reduction(dtype: str, tile: CudaTile) -> None:
    """Partial sums in the workspace, added in order by a second launch: equal bits in any order of blocks."""
    plan = gemm(dtype)
    kernels = tiled(plan, tile)
    for shape in ((1, 31, 2 * 8 * tile.bk + 1), (65, 72, 24 * tile.bk), (64, 64, 1000)):
        feeds, want = gemm_case(*shape, np.dtype(dtype))
        results = [run(plan, feeds, first_fit, kernels, reverse)[0]["y"] for reverse in (False, True)]
        assert first_fit(kernels[0], params(kernels[0], shape)).version.startswith("split")
        assert close(results[0], want, 4e-6 if dtype == "float32" else 4e-3) and (results[0] == results[1]).all()
    full = params(kernels[0], (64 * 132 * 2, 64, 4096))
    assert not first_fit(kernels[0], full).after, "enough blocks without"


@pytest.mark.parametrize("dtype", ["float32", "float16", slow("bfloat16")])
@pytest.mark.parametrize("trans_b", [False, True])
def test_few_rows(dtype: str, trans_b: bool) -> None:
    """Vectors along the reduction or along the columns, lanes combined; equal bits in any order of warps."""
    import ml_dtypes

    plan = gemm(dtype, trans_b=trans_b)
    (p,) = placed(plan)
    assert not first_fit(p, params(p, (9, 64, 64))).version.startswith("gemv")
    alone = tuple(k for k in p.kernels if k.version.startswith("gemv") and "counted" not in k.version)
    kernels = (replace(p, kernels=alone),)
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    lanes = 16 // kind.itemsize
    used = set()
    for m, n, k in ((1, 31, 40), (2, 257, 8), (3, 16, 1048), (8, 65, 16), (7, 1, 0), (1, 64, 131)):
        n, k = (n, k // lanes * lanes) if trans_b else (-(-n // lanes) * lanes, k)
        feeds, want = gemm_case(m, n, k, kind, trans_b=trans_b)
        env = params(kernels[0], (m, n, k))
        used.add(first_fit(kernels[0], env).version)
        results = [run(plan, feeds, first_fit, kernels, reverse) for reverse in (False, True)]
        assert close(results[0][0]["y"], want, {4: 2e-6, 2: 4e-3 if dtype == "float16" else 3e-2}[kind.itemsize])
        assert (results[0][0]["y"] == results[1][0]["y"]).all()
        assert results[0][1][0].shared_conflicts == 0
    way = "k" if trans_b else "n"
    assert used == {f"gemv_2_{way}{lanes}", f"gemv_8_{way}{lanes}"}


def test_lanes_that_are_not_combined_are_seen() -> None:
    plan = gemm("float16", trans_b=True)
    (p,) = placed(plan)
    k = first_fit(p, params(p, (2, 32, 512)))
    feeds, want = gemm_case(2, 32, 512, np.float16, trans_b=True)
    for old, new in (("((int32_t)4LL)", "((int32_t)8LL)"), ("  pd_syncthreads();", "")):
        broken = replace(k, text=k.text.replace(old, new))
        assert broken.text != k.text
        right = 0
        for reverse in (False, True):
            got, _ = run(plan, feeds, lambda p, env, b=broken: b, (p,), reverse, compile_all=False)
            right += close(got["y"], want, 4e-3)
        assert right < 2, old


def params(p: PlacedGroup, shape: tuple[int, int, int]) -> dict[str, int]:
    """Return the parameters of a gemm."""
    return {n: i.evaluate(dict(zip("MNK", shape, strict=True))) for n, i in p.lowered.params.items()}


def test_long_indices_where_short_ones_overflow() -> None:
    (p,) = tiled(gemm("float16"), SMALL_MMA)
    short, long = (first_fit(p, params(p, (m, 4096, 64))) for m in (1 << 18, 1 << 20))
    assert long.version == short.version + LONG_SUFFIX
    assert "int64_t b_i" in long.text and "int32_t b_i" in short.text and "(int64_t)" not in short.text
    plan = gemm("float16")
    feeds, want = gemm_case(65, 72, 40, np.float16)
    got, _ = run(plan, feeds, lambda p, env: next(k for k in p.kernels if k.version == long.version), (p,))
    assert close(got["y"], want, 2e-3)


def test_bfloat16_batched() -> None:
    import ml_dtypes

    plan = plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("B", "M", "K"), "w": ("B", "K", "N")}, ["y"],
                   dtype="bfloat16")  # fmt: skip
    rng = np.random.default_rng(3)
    x, w = (normal(rng, *s).astype(ml_dtypes.bfloat16) for s in ((3, 17, 40), (3, 40, 24)))
    got, (count,) = run(plan, {"x": x, "w": w}, kernels=tiled(plan, SMALL_MMA))
    assert close(got["y"], x.astype(np.float64) @ w.astype(np.float64), 8e-3) and count.mma > 0


@pytest.mark.parametrize(("dtype", "channels"), [("float32", 5), ("float16", 32)])
def test_convolution_is_an_implicit_gemm(dtype: str, channels: int) -> None:
    """One launch: padding is in the copies.

    Whole tiles of channels belong to one tap, and filters use 16-byte copies.
    """
    rng = np.random.default_rng(4)
    w, b = (normal(rng, 9, channels, 3, 3) * channels**-0.5).astype(dtype), normal(rng, 9).astype(dtype)
    nodes = [node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]), node("Relu", ["c"], ["y"])]
    plan = plan_of(nodes, {"x": ("B", channels, "H", "W")}, ["y"], {"w": w, "b": b}, dtype)
    x = normal(rng, 2, channels, 7, 11).astype(dtype)
    got, counts = run(plan, {"x": x})
    (last,) = (p.kernels[-1] for p in placed(plan))
    assert len(counts) == 1 and (channels == 5 or ("_2_16" in last.version and "const int64_t q_0" in last.text))
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    want = np.einsum("bchwij,ocij->bohw", windows, w.astype(np.float64)) + b.astype(np.float64)[:, None, None]
    assert close(got["y"], np.maximum(want, 0), 2e-6 if dtype == "float32" else 2e-3)


def test_one_constant_k_tile_keeps_its_pipeline() -> None:
    """With one k tile known at compile time the loop folds away; its copies must still be waited for."""
    rng = np.random.default_rng(5)
    w = normal(rng, 16, 24)
    plan = plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("M", 16)}, ["y"], {"w": w})
    x = normal(rng, 37, 16)
    got, _ = run(plan, {"x": x})
    assert close(got["y"], x.astype(np.float64) @ w)
    (p,) = placed(plan)
    assert not any("128x128" in k.version for k in p.kernels), "24 columns leave most of a 128-column tile empty"


def test_one_tree_for_all_tiles() -> None:
    plan = gemm("float32")
    form = lower_contract(plan, plan.groups[0], 0)
    assert isinstance(form, ContractGroup)
    parts = partial_group(form.lowered.group)
    trees = [gpu_product(parts, form.roles, t.sizes(), split=True).tiled() for t in MMA_TILES]
    assert trees[0] == trees[1] and trees[0].coincident == ("b_s", "b_i", "b_j")
    verify_tree(trees[0].tree, trees[0].statements, trees[0].params)


# -- rejections --------------------------------------------------------------------------------------------------------


def test_what_is_not_built_is_refused_by_name() -> None:
    plan = gemm("float16")
    with pytest.raises(CodegenError, match="fma of float16"):
        tiled(plan, SMALL_FMA)


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("arch", [slow("sm_80"), "sm_90a"])
@pytest.mark.parametrize("dtype", [slow("float32"), "float16"])
def test_contractions_compile_without_spills(dtype: str, arch: str) -> None:
    (p,) = placed(gemm(dtype))
    tile = "fma" if dtype == "float32" else "mma"
    words = (f"{tile}_128", f"{tile}_64x64", "gemv_8", "split")
    words += ("mma_64x128", "mma_16", "split_mma_16") if dtype == "float16" else ()
    for k in (version(p, w) for w in words):
        use = compile_cuda(k.text, arch).kernels[k.name]
        assert use.spill_stores == use.spill_loads == use.stack == 0, k.version
    for word, wanted in ((tile, ("cp.async.cg.shared.global",)), ("gemv", ("ld.global.v4",))):
        k = version(p, word)
        text = compile_cuda(k.text, arch, kind="ptx").image.decode(errors="replace")
        wanted += ("ldmatrix.sync", "mma.sync.aligned.m16n8k16", "st.global.v4") if word == "mma" else ()
        assert all(w in text for w in wanted), k.version


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_row_kernels_compile_without_spills() -> None:
    (p,) = placed(plan_of([node("Softmax", ["x"], ["y"])], {"x": ("M", "N")}, ["y"]))
    for k in p.kernels:
        use = compile_cuda(k.text, "sm_90a").kernels[k.name]
        assert use.spill_stores == 0 and use.registers <= 64


BROKEN = {
    "one barrier fewer": ("pd_cp_async_wait<1>();\n    pd_syncthreads();", "pd_cp_async_wait<1>();"),
    "sums staged into a ring in use": ("pd_syncthreads();\n    if ((b_k + 1) <", "if ((b_k + 1) <"),
    "steps beyond the last": ("b_k < pd_imax((int32_t)((n2/32) + (-2))", "b_k < pd_imax((int32_t)((n2/32) + (-1))"),
    "fragments of the next tile before its copies": ("b_k + 1)/3)", "b_k + 2)/3)"),
    "a row behind the last one": ("pd_imin((int32_t)((-64)*b_i + n0 + (-1))", "pd_imin((int32_t)64"),
    "rows of another warp": (
        "((2048*warp) + (1024*u) + pd_swizzled<32, 4, 8, 4>((int)(lane/4)",
        "((1024*u) + pd_swizzled<32, 4, 8, 4>((int)(lane/4)",
    ),
    "a byte of sixteen": ("pd_cp_async_if<16>(smem + 0", "pd_cp_async<16>(smem + 0"),
    "column guard dropped": (" && (8*e_vec) < n1", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken() -> tuple[FusionPlan, PlacedGroup]:
    plan = gemm("float16")
    (p,) = tiled(plan, SMALL_MMA)
    return plan, replace(p, kernels=with_bugs(version(p, "mma"), BROKEN))


@pytest.mark.parametrize("bug", BROKEN)
def test_the_emulator_refuses_a_broken_kernel(bug: str, broken: tuple[FusionPlan, PlacedGroup]) -> None:
    plan, p = broken
    feeds, want = gemm_case(72, 72, 200, np.float16)
    wrong = 0
    for reverse in (False, True):
        try:
            got, _ = run(plan, feeds, lambda p, env: p.kernels[list(BROKEN).index(bug)], (p,), reverse)
            wrong += not close(got["y"], want, 2e-3)
        except DeviceError:
            wrong += 1
    assert wrong


def test_shared_memory_inside_hundreds_of_names_is_counted() -> None:
    """A convolution of large windows has a name for the offset of each row that a thread copies."""
    body: Body = (Alloc("x", "float32", Index.of(8), "shared", ()), Alloc("y", "float32", Index.of(4), "shared", ()))
    for k in range(400):
        body = (Let(f"v{k}", Index.of(k), body),)
    assert shared_bytes((Alloc("z", "float16", Index.of(8), "shared", body),)) == Index.of(48)

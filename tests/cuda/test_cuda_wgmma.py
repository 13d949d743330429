"""Generated wgmma kernels with TMA and an mbarrier ring, on the strict emulation against numpy."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.wgmma import wgmma_versions
from polydyn.codegen.kernel import TF32, Kernel, with_block
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.place import PlacedGroup
from polydyn.runtime.cuda import tensormap
from polydyn.testing.device.cases import to_tf32_even
from tests.support.cuda_groups import ARCH, first_fit, params_of, placed, plan_of, run, with_bugs
from tests.support.marks import slow

node = helper.make_node
Array = np.ndarray[Any, Any]
KIND = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 3e-6}
TIE = np.float32(1 + 2**-11)
"""Midpoint between two neighbours in tf32."""


def product(dtype: str, trans_b: bool, batched: bool = False) -> FusionPlan:
    """Plan relu(A B + bias) + residual."""
    head = ("B",) if batched else ()
    nodes = [
        *([node("Transpose", ["w"], ["t"], perm=[0, 2, 1] if batched else [1, 0])] if trans_b else []),
        node("MatMul", ["x", "t" if trans_b else "w"], ["p"]), node("Add", ["p", "b"], ["q"]),
        node("Relu", ["q"], ["a"]), node("Add", ["a", "r"], ["y"]),
    ]  # fmt: skip
    w = (*head, "N", "K") if trans_b else (*head, "K", "N")
    shapes = {"x": (*head, "M", "K"), "w": w, "b": ("N",), "r": (*head, "M", "N")}
    return plan_of(nodes, shapes, ["y"], dtype=dtype)


def operand(a: Array) -> Array:
    """Return the multiplied operand: float32 rounded to the nearest tf32, as by TMA."""
    return (to_tf32_even(a).view(np.float32) if a.dtype == np.float32 else a).astype(np.float64)


def case(dtype: str, trans_b: bool, m: int, n: int, k: int, batch: int = 0) -> tuple[dict[str, Array], Array]:
    rng = np.random.default_rng(m + n * 7 + k)
    head = (batch,) if batch else ()
    shapes = ((*head, m, k), (*head, k, n), (n,), (*head, m, n))
    x, w, b, r = (rng.standard_normal(s).astype(KIND[dtype]) for s in shapes)
    if dtype == "float32":
        x.reshape(-1)[::5] = TIE
    want = np.maximum(operand(x) @ operand(w) + b.astype(np.float64), 0) + r.astype(np.float64)
    return {"x": x, "w": w.swapaxes(-1, -2).copy() if trans_b else w, "b": b, "r": r}, want


def wgmma_only(plan: FusionPlan, tf32: bool = True) -> PlacedGroup:
    """Return the versions with wgmma of a plan's only product."""
    (group,) = plan.groups
    form = lower_contract(plan, group, 0)
    assert isinstance(form, ContractGroup)
    made = wgmma_versions(ProductGroup("contract", form.lowered.group, form.roles), tf32)
    return PlacedGroup(group, form.lowered, "", tuple(made))


def hopper(p: PlacedGroup, word: str = "wgmma") -> Kernel:
    return next(k for k in p.kernels if k.version.startswith(word))


def right(plan: FusionPlan, k: Kernel, p: PlacedGroup, feeds: dict[str, Array], want: Array) -> bool:
    """Check that both orders give the reference, the same bits, and no bank conflicts."""
    got = [run(plan, feeds, lambda p, env: k, (p,), reverse) for reverse in (False, True)]
    tolerance = TOLERANCE[str(feeds["x"].dtype)]
    with np.errstate(invalid="ignore"):
        error = np.abs(got[0][0]["y"].astype(np.float64) - want).max(initial=0)
    same = (got[0][0]["y"].view(np.uint16) == got[1][0]["y"].view(np.uint16)).all()
    near = bool(error <= tolerance * max(1.0, np.abs(want).max()))
    counts = got[0][1][0]
    return near and bool(same) and counts.shared_conflicts == 0 and counts.wgmma > 0


HALVES = ((1, 8, 8), (131, 80, 456), (129, 264, 72))
SINGLES = ((1, 1, 4), (7, 31, 20), (127, 129, 28), (128, 128, 32), (129, 127, 36), (131, 80, 164))
"""(M, N, K) of tf32: 1, primes, around the tile, more steps than the ring holds; rows of multiples of 16 bytes."""


@pytest.mark.parametrize(
    ("dtype", "trans_b"), [slow("float16", False), ("float16", True), slow("bfloat16", False), ("float32", True)]
)
def test_every_tile_and_tail(dtype: str, trans_b: bool) -> None:
    plan = product(dtype, trans_b)
    p = wgmma_only(plan)
    names = [k.version for k in p.kernels if k.device.arch == "sm_90a" and not k.version.endswith(LONG_SUFFIX)]
    start, end = ("tf32_", 32) if dtype == "float32" else ("", 64)
    tiles = [f"wgmma_{start}{t}x{end}_4_wide" for t in ("128x256", "128x128", "64x128", "64x64")]
    tiles.append(f"wgmma_{start}128x256x{end}_4_cluster_i_wide")
    assert [n for n in names if n.endswith("wide")] == tiles and f"wgmma_{start}128x128x{end}_5_turns_boxes" in names
    assert {m.dtype for k in p.kernels for m in k.device.maps[:2]} == {TF32 if dtype == "float32" else dtype}
    names = [n for n in names if n in (tiles[0].removesuffix("_wide"), *tiles[1:3])]
    p = replace(p, kernels=tuple(k for k in p.kernels if k.version in names))
    for shape in SINGLES if dtype == "float32" else HALVES:
        feeds, want = case(dtype, trans_b, *shape)
        for k in (k for k in p.kernels if k.version in names):
            if k.fits(params_of(p, dict(zip("MNK", shape, strict=True))), 227 * 1024, 132, "sm_90a"):
                assert right(plan, k, p, feeds, want), (k.version, shape)


def test_columns_that_192_divide() -> None:
    """They have a separate tile if their number is known; more steps than its five slots."""
    for n, tiles in ((320, [256, 128, 64]), (384, [256, 192, 128, 64])):
        constants = {"w": np.random.default_rng(n).standard_normal((456, n)).astype(np.float16)}
        plan = plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("M", 456)}, ["y"], constants, "float16")
        p = wgmma_only(plan)
        assert list(dict.fromkeys(int(k.version.split("x")[1]) for k in p.kernels)) == tiles
    x = np.random.default_rng(0).standard_normal((131, 456)).astype(np.float16)
    want = x.astype(np.float64) @ constants["w"].astype(np.float64)
    k = hopper(p, "wgmma_128x192x64_5_wide")
    assert right(plan, k, replace(p, kernels=(k,)), {"x": x}, want)


def test_shares_of_a_reduction() -> None:
    """The second K slice begins in another slot of the ring than the first, with the first one's parity."""
    plan = product("float16", True)
    (p,) = placed(plan, ARCH)
    k = next(k for k in p.kernels if k.version == "split_wgmma_128x128x64_4_wide")
    start = "(b_k + (-1)*((b_s*((n2 + 63)/64))/shares))"
    kernels = (k, *with_bugs(k, {"parities of the whole reduction": (start, "(b_k)")}))
    feeds, want = case("float16", True, 131, 80, 648)
    assert k.values(params_of(p, {"M": 131, "N": 80, "K": 648}), 132)["shares"] == 2
    good, bad = (partial(right, plan, x, replace(p, kernels=kernels), feeds, want) for x in kernels)
    assert good()
    with contextlib.suppress(DeviceError):
        assert not bad()


@pytest.mark.slow
def test_batched_and_odd_columns() -> None:
    plan = product("float16", False, True)
    p = wgmma_only(plan)
    feeds, want = case("float16", False, 70, 72, 136, 3)
    k = hopper(p)
    assert len(k.device.maps[0].dims) == 3 and right(plan, k, p, feeds, want)
    plan = product("float16", True)
    p = wgmma_only(plan)
    feeds, want = case("float16", True, 65, 77, 264)  # rows of the result are not aligned, operands are
    assert right(plan, next(k for k in p.kernels if k.version == "wgmma_128x128x64_4"), p, feeds, want)


def test_float32_only_when_it_may_be_rounded_and_lies_along_the_reduction() -> None:
    for trans_b, tf32 in ((True, False), (False, True)):
        assert wgmma_only(product("float32", trans_b), tf32).kernels == ()
    assert TF32 == tensormap.TF32, "generator and run time mean the same"


def test_operands_that_nothing_rounds_are_refused() -> None:
    """The hardware would truncate them."""
    plan = product("float32", True)
    p = wgmma_only(plan)
    feeds, _ = case("float32", True, 131, 80, 164)
    k = hopper(p, "wgmma_tf32_128x128")
    narrow = next(k for k in p.kernels if k.version == "wgmma_tf32_128x256x32_4")
    p = replace(p, kernels=(narrow, k))  # as above: compiled once
    plain = with_block(k, maps=tuple(replace(m, dtype="float32") for m in k.device.maps))
    with pytest.raises(DeviceError, match="is not rounded to tf32"):
        run(plan, feeds, lambda p, env: plain, (p,))


def test_only_where_the_device_and_the_pitches_allow_it() -> None:
    (p,) = placed(product("float16", False), ARCH)
    dims = {"M": 4096, "N": 4096, "K": 4096}
    assert first_fit(p, params_of(p, dims)).version.startswith("mma")
    assert first_fit(p, params_of(p, dims), "sm_90a").version == "wgmma_128x256x64_4_wide"
    assert not hopper(p).fits(params_of(p, dims), 99 * 1024, 132, "sm_90a"), "a ring of 192 KB"
    for other in ({"N": 4095}, {"K": 4092}, {"K": 0}):
        assert first_fit(p, params_of(p, {**dims, **other}), "sm_90a").version.startswith("mma")


def test_rows_that_run_backwards_and_coordinates_beyond_32_bits_have_other_kernels() -> None:
    """A tensor map has positive strides, TMA has coordinates of 32 bits."""
    nodes = [node("Slice", ["x", "last", "first", "axis", "back"], ["t"]), node("MatMul", ["t", "w"], ["y"])]
    ends = {"last": [-1], "first": [-(2**62)], "axis": [0], "back": [-1]}
    constants = {n: np.array(a) for n, a in ends.items()}
    turned = plan_of(nodes, {"x": ("M", "K"), "w": ("K", "N")}, ["y"], constants, "float16")
    assert wgmma_only(turned).kernels == ()
    (p,) = placed(product("float16", True), ARCH)
    mapped = [k for k in p.kernels if k.device.maps]
    for far in "MNK":
        for size, wanted in ((2**31, False), (2**31 - 256, True)):
            env = params_of(p, dict.fromkeys("MNK", 64) | {far: size})
            assert any(k.fits(env, 227 * 1024, 132, "sm_90a") for k in mapped) == wanted, (far, size)


STAGED_SUM = "(sum + 4, smem + 65536 + (("
BUGS = {
    "expects too few bytes": ("((int32_t)32768)", "((int32_t)24576)"),
    "consumers' parity": ("((int32_t)((b_k/4) + (-2)*(b_k/8)))", "((int32_t)(1 - (b_k/4) + 2*(b_k/8)))"),
    "producer does not wait": ("pd_mbar_wait((uint64_t *)(smem + 131104", "(void)((uint64_t *)(smem + 131104"),
    "slot released too early": ("(b_k + (-4)*((b_k + 3)/4) + 3)", "(b_k + (-4)*(b_k/4))"),
    "wait too weak": ("pd_wgmma_wait<1>();", "pd_wgmma_wait<2>();"),
    "no final wait": ("      pd_wgmma_wait<0>();\n", ""),
    "no fence before the group": ("pd_wgmma_fence();", ""),
    "no barrier after init": ("  pd_syncthreads();\n  if (tid < 128)", "  if (tid < 128)"),
    "the other warpgroup's rows": ("4096*(tid/128)", "0*(tid/128)"),
    "panels of B": ("((int32_t)8192)),", "((int32_t)4096)),"),
    "rows of another warp": (f"{STAGED_SUM}2048*e_s + 8192*warp", f"{STAGED_SUM}2048*e_s + 8192*(warp^1)"),
    "rows of another slab": (f"{STAGED_SUM}2048*e_s", f"{STAGED_SUM}2048*(e_s^1)"),
    "staged where others still read": ("pd_bar_sync(((int32_t)1), ((int32_t)256));", ""),
}  # fmt: skip


SINGLE_BUGS = {
    "stride of the descriptors": ("pd_desc_k(", "(uint64_t)96 << 32 ^ pd_desc_k("),
    "a step of 16 bits": ("32*f_k", "16*f_k"),
    "wait too weak": ("pd_wgmma_wait<1>();", "pd_wgmma_wait<2>();"),
}


@pytest.fixture(scope="module")
def broken() -> tuple[FusionPlan, PlacedGroup]:
    plan = product("float16", False)
    (p,) = placed(plan, ARCH)
    return plan, replace(p, kernels=with_bugs(hopper(p, "wgmma_128x128x64_4_wide"), BUGS))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, broken: tuple[FusionPlan, PlacedGroup]) -> None:
    plan, p = broken
    feeds, want = case("float16", False, 131, 72, 456)
    with contextlib.suppress(DeviceError):
        assert not right(plan, p.kernels[list(BUGS).index(bug)], p, feeds, want)


@pytest.fixture(scope="module")
def broken_single() -> tuple[FusionPlan, PlacedGroup]:
    plan = product("float32", True)
    p = wgmma_only(plan)
    return plan, replace(p, kernels=with_bugs(hopper(p, "wgmma_tf32_128x128x32_4_wide"), SINGLE_BUGS))


@pytest.mark.parametrize("bug", SINGLE_BUGS)
def test_planted_bugs_in_tf32_are_caught(bug: str, broken_single: tuple[FusionPlan, PlacedGroup]) -> None:
    plan, p = broken_single
    feeds, want = case("float32", True, 131, 72, 164)
    with contextlib.suppress(DeviceError):
        assert not right(plan, p.kernels[list(SINGLE_BUGS).index(bug)], p, feeds, want)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize(("dtype", "trans_b"), [slow("float16", False), ("float16", True), ("float32", True)])
def test_compiles_without_spills_and_stays_asynchronous(dtype: str, trans_b: bool) -> None:
    p = wgmma_only(product(dtype, trans_b))
    for word in ("wgmma_128x256", "wgmma_128x128") if dtype == "float16" else ("wgmma_tf32_128x256",):
        k = hopper(p, word)
        made = compile_cuda(k.text, "sm_90a")
        use = made.kernels[k.name]
        assert use.spill_stores == use.spill_loads == 0 and "C75" not in made.log, "serialized wgmma"
        text = compile_cuda(k.text, "sm_90a", kind="ptx").image.decode(errors="replace")
        assert all(w in text for w in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "st.global.v4"))

"""8-bit floats on CUDA: conversions, products of warps and warpgroups, models that quantize to them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.backends import Options
from polydyn.backends.cuda import Cuda
from polydyn.capability import runs_on
from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.product import TiledProduct
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import CudaContractKernel
from polydyn.codegen.cuda.wgmma import wgmma_versions
from polydyn.codegen.kernel import Kernel
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.gpu.errors import DeviceError
from polydyn.gpu.targets import newest
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from polydyn.schedules.expr import FLOAT8, cast, const, load, op
from polydyn.schedules.model import Group, Statement, verify_group
from tests.support.cuda_bytes import ROLES, Trans, Types, V, array
from tests.support.cuda_groups import ARCH, MULTIPROCESSORS, SHARED_BYTES, launch, with_bugs
from tests.support.cuda_groups import run as run_plan
from tests.support.marks import slow

E4M3, E5M2 = FLOAT8
PAIRS: tuple[Types, ...] = tuple(itertools.product(FLOAT8, FLOAT8))
NT: Trans = (False, True)
SMALL_QMMA = CudaTile("qmma", 64, 64, 64, 32, 32, 3, 2)

# -- conversions -----------------------------------------------------------------------------------------------------

CONVERT = """#include "pd_device.cuh"
PD_KERNEL(narrow, 32, 1)(const float *x, pd_e4m3 *a, pd_e5m2 *b, int64_t n) {
  for (int i = pd_tid(); i < n; i += 32) {
    pd_stg(a + i, pd_f32_to_e4m3(pd_ldg(x + i)));
    pd_stg(b + i, pd_f32_to_e5m2(pd_ldg(x + i)));
  }
}
PD_EXPORT(narrow, 32);
PD_KERNEL(widen, 32, 1)(const pd_e4m3 *a, const pd_e5m2 *b, float *x, float *y, int64_t n) {
  for (int i = pd_tid(); i < n; i += 32) {
    pd_stg(x + i, pd_e4m3_to_f32(pd_ldg(a + i)));
    pd_stg(y + i, pd_e5m2_to_f32(pd_ldg(b + i)));
  }
}
PD_EXPORT(widen, 32);
"""


def numpy_type(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name))


def test_conversions_are_those_of_ml_dtypes() -> None:
    """Every code is widened; every code, every midpoint between two, and their neighbours are rounded."""
    module = EmulatedModule(compile_emulated(CONVERT))
    codes = np.arange(256, dtype=np.uint8)
    wide = [np.empty(256, np.float32) for _ in FLOAT8]
    module.launch("widen", 1, 32, [codes, codes, *wide, np.int64(256)])
    with np.errstate(invalid="ignore", over="ignore"):
        for got, t in zip(wide, FLOAT8, strict=True):
            np.testing.assert_array_equal(got, codes.view(numpy_type(t)).astype(np.float32))
        finite = np.unique(np.concatenate([w[np.isfinite(w)] for w in wide]))
        middles = (finite[1:] + finite[:-1]) / 2
        around = np.concatenate([finite, middles, [1e-30, 460, 464, 480, 61440, 1e38, np.inf, np.nan, -0.0]])
        x = np.concatenate([around, np.nextafter(around, np.inf), np.nextafter(around, -np.inf)]).astype(np.float32)
        x = np.concatenate([x, np.random.default_rng(0).standard_normal(4000).astype(np.float32) * 50])
        narrow = [np.empty(x.size, np.uint8) for _ in FLOAT8]
        module.launch("narrow", 1, 32, [x, *narrow, np.int64(x.size)])
        for got, t in zip(narrow, FLOAT8, strict=True):
            expected = x.astype(numpy_type(t))
            number = ~np.isnan(expected.astype(np.float32))
            np.testing.assert_array_equal(got[number], expected.view(np.uint8)[number])
            assert np.isnan(got[~number].view(numpy_type(t)).astype(np.float32)).all()


# -- products --------------------------------------------------------------------------------------------------------


def product(types: Types, trans: Trans) -> Group:
    """Build sums of products, times a scale of each column (F), and rounded to bytes again (Q)."""
    a, b = cast(load("A", ("i", "k"), types[0]), "float32"), cast(load("B", ("k", "j"), types[1]), "float32")
    total = load("D", ("i", "j"), "float32")
    scaled = op("mul", total, load("S", ("j",), "float32"))
    clipped = op("max", op("min", scaled, const(448.0, "float32")), const(-448.0, "float32"))
    arrays = [
        array("A", types[0], "input", "M", "K", transposed=trans[0]),
        array("B", types[1], "input", "K", "N", transposed=trans[1]), array("S", "float32", "input", "N"),
        array("D", "float32", "local", "M", "N"), array("F", "float32", "output", "M", "N"),
        array("Q", E4M3, "output", "M", "N"),
    ]  # fmt: skip
    ij, at = (("i", V("M")), ("j", V("N"))), (V("i"), V("j"))
    statements = (
        Statement("INIT", ij, "D", at, const(0.0, "float32"), None, "init"),
        Statement("ACC", (*ij, ("k", V("K"))), "D", at, op("mul", a, b), "sum", "backbone"),
        Statement("DONE0", ij, "F", at, scaled, None, "epilogue"),
        Statement("DONE1", ij, "Q", at, cast(clipped, E4M3), None, "epilogue"),
    )
    group = Group("product", ("M", "N", "K"), {x.name: x for x in arrays}, statements)
    verify_group(group)
    return group


def run(
    k: Kernel, versions: tuple[Kernel, ...], types: Types, trans: Trans, shape: tuple[int, int, int], reverse: bool
) -> Counters:
    """Run on integers, whose sums the instruction adds exactly; a fault is a wrong bit."""
    rng, (m, n, steps) = np.random.default_rng(sum(shape)), shape
    a, b = (
        rng.integers(-8, 9, size).astype(numpy_type(t)) for size, t in zip(((m, steps), (steps, n)), types, strict=True)
    )
    s = (2.0 ** rng.integers(-3, 1, n)).astype(np.float32)
    total = a.astype(np.float32) @ b.astype(np.float32) * s
    memory = {"A": a.T if trans[0] else a, "B": b.T if trans[1] else b, "S": s}
    memory = {x: np.ascontiguousarray(v) for x, v in memory.items()}
    memory |= {"F": np.full((m, n), np.nan, np.float32), "Q": np.full((m, n), 0x7F, np.uint8)}
    counters = launch(k, versions, dict(zip("MNK", shape, strict=True)), lambda x: memory[x], reverse)
    np.testing.assert_array_equal(memory["F"], total)
    np.testing.assert_array_equal(memory["Q"], np.clip(total, -448, 448).astype(numpy_type(E4M3)).view(np.uint8))
    return counters[0]


@functools.cache
def warps(types: Types, trans: Trans = NT) -> tuple[Kernel, ...]:
    """Return the versions with the widest and with the narrowest copies."""
    of = ProductGroup("_".join((*types, str(int(trans[1])))), product(types, trans), ROLES)
    return tuple(TiledProduct(of, SMALL_QMMA, width, width == 16).build()[0] for width in (16, 1))


@functools.cache
def warpgroups(types: Types, word: str = "") -> Kernel:
    """Return the smallest tile; of several, the last one with a word in its name."""
    of = ProductGroup("_".join(types), product(types, NT), ROLES)
    made = [k for k in wgmma_versions(of) if not k.version.endswith(LONG_SUFFIX)]
    assert {m.dtype for m in made[0].device.maps} == set(types)
    return next(k for k in reversed(made) if word in k.version)


def test_products_of_warps() -> None:
    """Every pair of types, both directions of the columns, tails, and no bank conflicts."""
    cases = [(t, NT) for t in PAIRS] + [((E4M3, E4M3), (False, False))]
    every = tuple(k for case in cases for k in warps(*case))
    assert {k.device.arch for k in every} == {"sm_89"}
    for case, (number, shape), reverse in itertools.product(
        cases, enumerate([(1, 1, 1), (65, 63, 65), (72, 144, 400)]), (False, True)
    ):
        if number == 0 and case[0] != (E4M3, E4M3):
            continue
        k = warps(*case)[0 if number == 2 else 1]
        count = run(k, every, *case, shape, reverse)
        assert count.mma > 0 and count.ldmatrix_conflicts == count.shared_conflicts == 0, (k.version, shape)


@pytest.mark.parametrize("types", PAIRS)
def test_products_of_warpgroups(types: Types) -> None:
    every = tuple(map(warpgroups, PAIRS))
    for shape, reverse in itertools.product(
        [(1, 1, 16), (131, 144, 656)] if types == PAIRS[0] else [(70, 48, 144)], (False, True)
    ):
        count = run(warpgroups(types), every, types, NT, shape, reverse)
        assert count.wgmma > 0 and count.mma == count.shared_conflicts == 0


CLUSTER_BUGS = {
    "the other's half is not waited for": ("((int32_t)32768)", "((int32_t)24576)"),
    "a half for this block only": ("((int32_t)3));", "((int32_t)(1 << c_i)));"),
    "a slot is free when one block has read it": ("((int32_t)4));", "((int32_t)2));"),
    "the same half twice": ("(128*b_j + 64*c_i)", "(128*b_j)"),
    "added before they are there": ("pd_wgmma_wait<0>", "pd_wgmma_wait<1>"),
}  # fmt: skip


def test_products_of_clusters_and_their_planted_bugs() -> None:
    """Three tiles of rows, so one block of a cluster has none; more steps than slots."""
    k = warpgroups((E4M3, E5M2), "cluster")
    every = (k, *with_bugs(k, CLUSTER_BUGS))
    for bug, x in zip(("", *CLUSTER_BUGS), every, strict=True):
        caught = 0
        for reverse in (False, True):
            try:
                run(x, every, (E4M3, E5M2), NT, (300, 208, 784) if not bug else (140, 144, 656), reverse)
            except (AssertionError, DeviceError):
                caught += 1
        assert bool(caught) == bool(bug), bug


def test_sums_are_as_inexact_as_the_hardware() -> None:
    """A large product hides bits more than 14 positions below it (pd_emu.h)."""
    k = warps((E4M3, E4M3))[1]
    a, b = np.zeros((1, 32)), np.ones((32, 1))
    a[0, :3] = 256, 2.0**-6, 2.0**-5
    memory = {"A": a.astype(numpy_type(E4M3)), "B": b.astype(numpy_type(E4M3)), "S": np.ones(1, np.float32)}
    memory |= {"F": np.empty((1, 1), np.float32), "Q": np.empty((1, 1), np.uint8)}
    launch(k, (k,), {"M": 1, "N": 1, "K": 32}, lambda x: memory[x])
    assert memory["F"][0, 0] == 256 + 2.0**-5


def test_sums_of_warpgroups_are_moved_to_float32() -> None:
    """The sum of positive numbers grows while its bits do not: 128 steps lose little, 2048 steps much."""
    k = warpgroups((E4M3, E4M3))
    (kept,) = with_bugs(k, {"sums stay": ("acc[fragment] + part[fragment]", "part[fragment]")})
    kept = replace(kept, text=kept.text.replace("((int32_t)f_k));", "((int32_t)(b_k + f_k)));"))
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(0.5, 1, s).astype(numpy_type(E4M3)) for s in ((16, 2048), (16, 2048)))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    errors = []
    for x in (k, kept):
        memory = {"A": a, "B": b, "S": np.ones(16, np.float32)}
        memory |= {"F": np.empty((16, 16), np.float32), "Q": np.empty((16, 16), np.uint8)}
        launch(x, (k, kept), {"M": 16, "N": 16, "K": 2048}, lambda n, of=memory: of[n])  # type: ignore[misc]
        errors.append(float(np.abs(memory["F"] / want - 1).max()))
    assert errors[0] < 5e-3 < 3e-2 < errors[1]


@pytest.mark.parametrize("kind", ("warps", "warpgroups"))
def test_planted_bugs_are_caught(kind: str) -> None:
    types = (E4M3, E5M2)
    k = warps(types)[0] if kind == "warps" else warpgroups(types)
    name = "pd_mma_m16n8k32_" if kind == "warps" else "pd_wgmma_m64n64k32_"
    wait = (
        ("pd_cp_async_wait<1>", "pd_cp_async_wait<2>") if kind == "warps" else ("pd_wgmma_wait<0>", "pd_wgmma_wait<1>")
    )
    bugs = {
        "types swapped": (f"{name}e4m3e5m2(", f"{name}e5m2e4m3("), "one type": (f"{name}e4m3e5m2(", f"{name}e4m3("),
        "wait too weak": wait,
    }  # fmt: skip
    broken = with_bugs(k, bugs)
    for bug, x in zip(bugs, broken, strict=True):
        caught = 0
        for reverse in (False, True):
            try:
                run(x, broken, types, NT, (131, 80, 656), reverse)
            except (AssertionError, DeviceError):
                caught += 1
        assert caught, bug


def test_who_may_run_what() -> None:
    assert [runs_on("sm_89", d) for d in (80, 86, 89, 90, 100)] == [False, False, True, True, True]
    assert [runs_on("sm_90a", d) for d in (89, 90, 100)] == [False, True, False]
    names = {"cuda:sm_80": "sm_80", "cuda:sm_89": "sm_89", "cuda:sm_100": "sm_89", "cuda": ARCH, "cuda:emulated": ARCH}
    assert {t: newest(t) for t in names} == names
    k, env = warps((E4M3, E4M3))[1], {"M": 1, "N": 1, "K": 1}
    assert k.fits(env, arch="sm_89") and k.fits(env, arch=ARCH) and not k.fits(env, arch="sm_86")


def test_every_device_has_a_version() -> None:
    """The last one widens, requires no alignment, and is right."""
    group = product((E4M3, E4M3), (False, False))
    for arch in ("sm_80", "sm_89"):
        made = CudaContractKernel("float8", group, ROLES, arch).versions()
        assert any("qmma" in k.version for k in made) == (arch == "sm_89")
        assert made[-1].version.startswith("fma") and not made[-1].multiples and made[-1].device.arch == "sm_80"
    last = [k for k in made if not k.version.endswith(LONG_SUFFIX)][-1]
    run(last, (last,), (E4M3, E4M3), (False, False), (33, 31, 35), False)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_compilers_take_them() -> None:
    """Everything stays in registers, and wgmma stays asynchronous."""
    for k, arch in ((warps((E4M3, E5M2))[0], "sm_89"), (warpgroups((E5M2, E4M3)), ARCH),
                    (warpgroups((E4M3, E5M2), "cluster"), ARCH)):  # fmt: skip
        made = compile_cuda(k.text, arch)
        use = made.kernels[k.name]
        assert use.spill_stores == use.spill_loads == use.stack == 0 and "C75" not in made.log


# -- models ----------------------------------------------------------------------------------------------------------


def layer(dtype: str, types: tuple[str, str] = (E4M3, E4M3), k: int = 80, n: int = 48) -> onnx.ModelProto:
    """Build relu(x w + b), both operands quantized to 8-bit floats, the weights by column."""
    rng, node = np.random.default_rng(0), helper.make_node
    codes = {E4M3: TensorProto.FLOAT8E4M3FN, E5M2: TensorProto.FLOAT8E5M2}

    def small(name: str, a: Any, t: str) -> onnx.TensorProto:
        return helper.make_tensor(name, codes[t], a.shape, a.astype(numpy_type(t)).tobytes(), raw=True)

    w = rng.standard_normal((k, n))
    scale = (np.abs(w).max(0) / 448).astype(dtype)
    constants = [
        small("wq", w / scale.astype(np.float32), types[1]), numpy_helper.from_array(scale, "sw"),
        numpy_helper.from_array(np.asarray(0.01, dtype), "sx"), small("zero", np.zeros(()), types[0]),
        numpy_helper.from_array(rng.standard_normal(n).astype(dtype), "b"),
    ]  # fmt: skip
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zero"], ["xq"]), node("DequantizeLinear", ["xq", "sx", "zero"], ["xd"]),
        node("DequantizeLinear", ["wq", "sw"], ["wd"], axis=1), node("MatMul", ["xd", "wd"], ["t"]),
        node("Add", ["t", "b"], ["u"]), node("Relu", ["u"], ["y"]),
    ]  # fmt: skip
    t = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [helper.make_tensor_value_info(name, t, ["M", size]) for name, size in (("x", k), ("y", n))]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])


@pytest.mark.parametrize("dtype", (slow("float32"), "float16"))
def test_quantized_models_reach_them(dtype: str) -> None:
    """Two launches: one that quantizes, one that multiplies bytes, scales, and adds."""
    model = layer(dtype)
    target = Cuda("cuda:sm_90a", Options())
    plan = target.fuse(target.rewrite(import_model(model)))
    placed = tuple(target.place(target.builder(plan)).placed)
    assert [g.kind for g in plan.groups] == ["nest", "contract"]
    kinds = {k.version.partition("_")[0] for k in placed[1].kernels}
    assert {"qmma", "wgmma", "fma", "gemv"} <= kinds
    x = np.random.default_rng(1).standard_normal((70, 80)).astype(dtype)
    expected = evaluate(import_model(model), {"x": x})["y"].astype(np.float32)

    def chosen(p: Any, env: dict[str, int]) -> Kernel:
        fits = (k for k in p.kernels if k.fits(env, SHARED_BYTES, MULTIPROCESSORS, ARCH))
        return next(k for k in fits if p is placed[0] or k.version.startswith("wgmma_128x128"))

    got, _ = run_plan(plan, {"x": x}, chosen, placed, compile_all=False)
    wrong = np.linalg.norm(got["y"].astype(np.float32) - expected) / np.linalg.norm(expected)
    assert wrong < 2e-3, "14 bits of a sum, and one rounding to 16 bits"


def test_other_targets_keep_the_floats() -> None:
    """A CPU folds the weights to float32; unknown scales stay."""
    graph = import_model(layer("float32"))
    assert all("8-bit" not in note for note in Cuda("cuda", Options(without={"float8"})).rewrite(graph).notes)
    assert "8-bit" in "\n".join(Cuda("cuda", Options()).rewrite(graph).notes)
    model = layer("float32")
    (scale,) = (t for t in model.graph.initializer if t.name == "sx")
    model.graph.initializer.remove(scale)
    model.graph.input.append(helper.make_tensor_value_info("sx", TensorProto.FLOAT, []))
    assert all("8-bit" not in note for note in Cuda("cuda", Options()).rewrite(import_model(model)).notes)

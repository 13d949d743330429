"""Products of float32 in two parts on tensor cores, on the strict emulation against numpy."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from polydyn.backends import Options, target_of
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.product import TiledProduct
from polydyn.codegen.cuda.versions import TF32X3_TILES, accesses
from polydyn.codegen.kernel import Kernel
from polydyn.errors import InputError, UnsupportedError
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.place import PlacedGroup
from tests.support.cuda_groups import plan_of, run, with_bugs

node = helper.make_node
SHAPES = ((1, 1, 1), (7, 31, 5), (65, 63, 41), (64, 64, 16))
"""(M, N, K): 1, primes, around the smaller tile."""
BUGS = {
    "a rest left out": ("b_frag + (4*f_j)", "b_frag + (4*f_j + 2)"),
    "the rest of another row": ("a_frag + (8*f_i + 4)", "a_frag + (8*f_i)"),
    "a rest that is not one": ("pd_tf32_rest(", "pd_f32_to_tf32("),
}


def small_product(turned: bool) -> tuple[FusionPlan, PlacedGroup]:
    """Plan A B with B contiguous along the reduction or across it: the smaller tile with its widest and narrowest
    copies.
    """
    nodes = [node("Transpose", ["w"], ["t"], perm=[1, 0])] if turned else []
    shapes = {"x": ("M", "K"), "w": ("N", "K") if turned else ("K", "N")}
    plan = plan_of([*nodes, node("MatMul", ["x", "t" if turned else "w"], ["y"])], shapes, ["y"])
    (group,) = plan.groups
    form = lower_contract(plan, group, 0)
    assert isinstance(form, ContractGroup)
    product = ProductGroup("contract", form.lowered.group, form.roles)
    forms = [TiledProduct(product, TF32X3_TILES[-1], *a) for a in accesses("float32")]
    return plan, PlacedGroup(group, form.lowered, "", tuple(x.build()[0] for x in (forms[0], forms[-1])))


def right(plan: FusionPlan, k: Kernel, p: PlacedGroup, turned: bool, m: int, n: int, depth: int) -> bool:
    """Check that both orders give the same bits, within the bound, without bank conflicts."""
    rng = np.random.default_rng(m + n)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((m, depth), (depth, n)))
    feeds = {"x": x, "w": w.T.copy() if turned else w}
    got = [run(plan, feeds, lambda p, env: k, (p,), reverse) for reverse in (False, True)]
    bound = (3 * 2.0**-22 + 3 * -(-depth // 8) * 2.0**-23) * (np.abs(x).astype(np.float64) @ np.abs(w))
    near = np.abs(got[0][0]["y"] - x.astype(np.float64) @ w) <= bound
    same = got[0][0]["y"].tobytes() == got[1][0]["y"].tobytes()
    return same and bool(near.all()) and got[0][1][0].shared_conflicts == 0


@pytest.fixture(scope="module", params=[False, True], ids=["across", "along"])
def case(request: pytest.FixtureRequest) -> tuple[bool, FusionPlan, PlacedGroup]:
    plan, p = small_product(request.param)
    return request.param, plan, replace(p, kernels=(*p.kernels, *with_bugs(p.kernels[0], BUGS)))


def test_every_tail_is_within_the_bound(case: tuple[bool, FusionPlan, PlacedGroup]) -> None:
    turned, plan, p = case
    for k, shapes in ((p.kernels[0], SHAPES[3:]), (p.kernels[1], SHAPES)):
        assert all(right(plan, k, p, turned, *shape) for shape in shapes), k.version


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, case: tuple[bool, FusionPlan, PlacedGroup]) -> None:
    turned, plan, p = case
    with contextlib.suppress(DeviceError):
        assert not right(plan, p.kernels[2 + list(BUGS).index(bug)], p, turned, *SHAPES[3])


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_the_larger_tile_compiles_without_spills() -> None:
    plan, _ = small_product(False)
    form = lower_contract(plan, plan.groups[0], 0)
    assert isinstance(form, ContractGroup)
    product = ProductGroup("contract", form.lowered.group, form.roles)
    k = TiledProduct(product, TF32X3_TILES[0], *accesses("float32")[0]).build()[0]
    use = compile_cuda(k.text, "sm_80").kernels[k.name]
    assert use.spill_stores == use.spill_loads == 0


def test_only_on_cuda_and_instead_of_tf32() -> None:
    with pytest.raises(UnsupportedError, match="3xtf32 on cpu"):
        target_of("cpu", Options(precision="3xtf32"))
    with pytest.raises(InputError, match="unknown precision '3xtf32'"):
        Options(precision="3xtf32", tf32=True)
    plan, _ = small_product(False)
    builder = target_of("cuda:sm_80", Options(precision="3xtf32")).builder(plan)
    versions = {k.version.split("_")[0] for g in plan.groups for k in next(iter(builder.place(g))).kernels}
    assert versions >= {"tf32x3", "gemv"} and "fma" not in versions

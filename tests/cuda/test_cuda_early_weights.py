"""Weights of warpgroups are prefetched to L2 before a launch waits for the previous one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.compiler import plan_program
from polydyn.fusion.plan import FusedGroup
from polydyn.gpu.errors import DeviceLostError
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.place_cuda import CudaBuilder
from polydyn.program.assemble import build_program
from polydyn.schedules.decision import cheapest
from polydyn.schedules.errors import Declined
from tests.support.tiny import model, node

TARGET, BEGIN = "cuda:emulated", "pd_grid_begin();"
R = np.random.default_rng(5)
W1, W2 = (R.standard_normal((64, 64)).astype(np.float16) for _ in range(2))


def products(second: str) -> onnx.ModelProto:
    """Build ``t = x @ w1``, then ``y = t @ w2``, or ``y = z @ t``."""
    nodes = [node("MatMul", "x v", "t"), node("MatMul", second, "y")]
    ins = {"x": ("float16", [64 if "z" in second else "M", 64])} | (
        {"z": ("float16", ["N", 64])} if "z" in second else {}
    )
    return model(nodes, ins, ["y"], {"v": W1} | ({} if "z" in second else {"w": W2}))


def texts(model: onnx.ModelProto, name: str) -> list[str]:
    """Return the texts of the last launch's kernels with a name, except persistent ones."""
    plan = plan_program(model, target="cuda:sm_90a")
    taken = {c.kernel for c in plan.launches[-1].candidates}
    return [k.text for k in plan.kernels if k.name in taken and name in k.name and "turns" not in k.name]


@pytest.mark.parametrize(("name", "fetch"), [("wgmma", "pd_tma_fetch_2d(&map_b"), ("gemv", "pd_fetch(")])
def test_weights_are_fetched_before_the_wait_and_activations_are_not(name: str, fetch: str) -> None:
    found = texts(products("t w"), name)
    assert found and all(0 < x.find(fetch) < x.find(BEGIN) for x in found)
    computed = texts(products("z t"), name)
    assert computed and not any(fetch in x for x in computed)


@pytest.mark.parametrize("name", ["wgmma_64x64x64_4", "gemv_8_n8"])
def test_fetching_what_a_launch_writes_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    x, z = (R.standard_normal((n, 64)).astype(np.float16) for n in (64, 8))

    def built(second: str) -> polydyn.Program:
        """Compile a program without other versions of its second launch."""
        plan = plan_program(products(second), target=TARGET)
        first, last = plan.launches
        some = tuple(c for c in last.candidates if c.name.startswith(name) and "cluster" not in c.name)
        launches = first, replace(last, candidates=some, decision=cheapest(len(some)))
        return build_program(replace(plan, launches=launches), target=TARGET)

    rows = 64 if "wgmma" in name else 8
    want = (x[:rows].astype(np.float32) @ W1.astype(np.float32)).astype(np.float16).astype(np.float32) @ W2
    np.testing.assert_allclose(built("t w").run({"x": x[:rows]})["y"], want, rtol=2e-2, atol=2e-1)
    whole = CudaBuilder._product

    def claimed(builder: CudaBuilder, group: FusedGroup) -> ContractGroup | Declined:
        form = whole(builder, group)
        return form if isinstance(form, Declined) else replace(form, fixed=True)

    monkeypatch.setattr(CudaBuilder, "_product", claimed)
    with pytest.raises(DeviceLostError, match="memory that a launch or a copy has written is fetched"):
        built("z t").run({"x": x, "z": z})

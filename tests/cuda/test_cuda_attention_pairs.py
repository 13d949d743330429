"""Masks that attention reads in pairs of columns, on the strict emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.cuda.warpgroup_attention import warpgroup_attention
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cuda import CudaBuilder
from tests.cuda.test_cuda_attention import BOUND
from tests.support.cuda_groups import ARCH, Arrays, first_fit, params_of, placed, plan_of, run, with_bugs

node = helper.make_node
DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def masked(dtype: str, mask: str, of_keys: bool) -> FusionPlan:
    """Plan softmax(q k' + mask) v, or where(mask, q k', low) of bools; ``of_keys``: all queries have the same mask."""
    asked = mask == "bool"
    nodes = [
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]), node("MatMul", ["q", "kt"], ["s"]),
        node("Where", ["m", "s", "low"], ["u"]) if asked else node("Add", ["s", "m"], ["u"]),
        node("Softmax", ["u"], ["w"], axis=-1), node("MatMul", ["w", "v"], ["y"]),
    ]  # fmt: skip
    shapes = {n: ("B", 2, "L" if n == "q" else "T", 32) for n in "qkv"}
    dtypes = dict.fromkeys("qkv", dtype) | {"m": mask}
    low = {"low": np.array(-1e4, DTYPES[dtype])} if asked else {}
    return plan_of(nodes, shapes | {"m": ("B", 1, 1 if of_keys else "L", "T")}, ["y"], low, dtypes)


def case(plan: FusionPlan, length: int, keys: int) -> tuple[Arrays, np.ndarray[Any, Any]]:
    """Return inputs, with a third of the keys hidden, and the expected output."""
    rng, feeds = np.random.default_rng(length + keys * 7), {}
    for n in "qkvm":
        t = plan.graph.tensors[n]
        shape = [i.evaluate({"B": 2, "L": length, "T": keys}) for i in t.shape]
        feeds[n] = rng.random(shape) < 0.7 if t.dtype == "bool" else rng.standard_normal(shape).astype(DTYPES[t.dtype])
    feeds["q"] /= 4
    q, k, v, m = (feeds[n].astype(np.float64) for n in "qkvm")
    s = q @ k.swapaxes(-1, -2)
    s = np.where(feeds["m"], s, -1e4) if feeds["m"].dtype == bool else s + m
    e = np.exp(s - s.max(-1, keepdims=True))
    return feeds, (e / e.sum(-1, keepdims=True)) @ v


def of_pairs(p: PlacedGroup, env: object = None) -> Kernel:
    """Return the first version that reads masks in pairs."""
    return next(k for k in p.kernels if k.version.endswith("_pairs"))


@pytest.mark.parametrize(
    ("dtype", "mask", "of_keys"),
    [("float16", "float16", True), ("bfloat16", "bool", False), ("float32", "float32", False)],
)
def test_even_numbers_of_keys_are_read_in_pairs(dtype: str, mask: str, of_keys: bool) -> None:
    """They have the bits of the version that reads columns one by one, which handles odd numbers."""
    plan = masked(dtype, mask, of_keys)
    kernels = placed(plan, rows=("tiles",))
    assert "pd_ldg_wide<2>(" in of_pairs(kernels[0]).text
    for length, keys in ((64, 64), (67, 130), (64, 191)):
        feeds, want = case(plan, length, keys)
        found = []
        for others in (False, True):
            chosen = replace(kernels[0], kernels=tuple(k for k in kernels[0].kernels
                                                       if not (others and k.version.endswith("_pairs"))))  # fmt: skip
            name = first_fit(chosen, params_of(chosen, {"B": 2, "L": length, "T": keys})).version
            assert name.endswith("_pairs") == (keys % 2 == 0 and not others), (name, keys)
            got, (count,) = run(plan, feeds, first_fit, (chosen,))
            assert count.shared_conflicts == 0
            found.append(got["y"])
        assert np.abs(found[0].astype(np.float64) - want).max() <= BOUND[dtype]
        assert found[0].tobytes() == found[1].tobytes()


def test_warpgroups_read_them_too() -> None:
    plan = masked("float16", "bool", False)
    (group,) = plan.groups
    made = CudaBuilder(plan, ARCH).attention_kernel(group)
    assert isinstance(made, tuple)
    p = PlacedGroup(group, made[0], "", tuple(warpgroup_attention(made[2])))
    assert "pd_ldg_wide<2>(" in of_pairs(p).text
    for length, keys in ((128, 128), (130, 258), (128, 257)):
        feeds, want = case(plan, length, keys)
        got, (count,) = run(plan, feeds, lambda p, env: first_fit(p, env, ARCH), (p,))
        assert count.wgmma and np.abs(got["y"].astype(np.float64) - want).max() <= BOUND["float16"]


BUGS = {
    "both columns of the first mask": ("in0[column_of_pair]", "in0[0]"),
    "the next pair": ("pd_ldg_wide<2>(in0 + 0, a2 + (", "pd_ldg_wide<2>(in0 + 0, a2 + (2 + "),
    "two columns are not rounded": ("pd_round_f16x2(", "(void)("),
}


def test_planted_bugs_are_caught() -> None:
    plan = masked("float16", "float16", True)
    (p,) = placed(plan, rows=("tiles",))
    feeds, _ = case(plan, 64, 128)
    right, _ = run(plan, feeds, of_pairs, (p,))
    wrong = with_bugs(of_pairs(p), BUGS)
    for k, bug in zip(wrong, BUGS, strict=True):
        with pytest.raises((AssertionError, DeviceError)):
            got, _ = run(plan, feeds, lambda p, env, k=k: k, (replace(p, kernels=wrong),))
            assert got["y"].tobytes() == right["y"].tobytes(), bug
    feeds, _ = case(plan, 64, 67)
    with pytest.raises(DeviceError, match="align"):
        run(plan, feeds, lambda p, env: replace(of_pairs(p), multiples=()), (p,))

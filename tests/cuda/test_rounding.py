"""Rounding of 16-bit floats: at stores, after every node, or after every node that requires it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from polydyn.backends import Options
from polydyn.backends.cuda import Cuda
from polydyn.lowering.rounding import round_at_stores, round_once
from polydyn.schedules.expr import Load, Op, Value, cast, const, op
from polydyn.schedules.index import Index
from polydyn.schedules.model import Array, Group, Statement, row_major
from tests.support.cuda_groups import plan_of, run

node = helper.make_node


@pytest.mark.parametrize("strict", [False, True])
def test_what_a_kernel_keeps_to_itself_is_rounded_only_without_stores(strict: bool) -> None:
    """x + 1024 has no bits of float16 left for fractions of x."""
    plan = plan_of(
        [node("Add", ["x", "large"], ["t"]), node("Sub", ["t", "large"], ["y"])], {"x": ("N",)}, ["y"],
        {"large": np.array(1024, np.float16)}, dtype="float16",
    )  # fmt: skip
    builder = Cuda("cuda:sm_80", Options({"stores"} if strict else ())).builder(plan)
    x = (np.arange(-33, 34) / 64).astype(np.float16)
    got, _ = run(plan, {"x": x}, kernels=tuple(p for g in plan.groups for p in builder.place(g)))
    assert np.array_equal(got["y"], (x + np.float16(1024)) - np.float16(1024) if strict else x)


def test_operands_that_are_stored_in_16_bits_stay_so() -> None:
    """A local becomes float32; a value that is widened again was not rounded; a load from memory is widened as before.
    """
    n, shape = Index.of("i"), (Index.of("n0"),)
    kinds = {"a0": ("float16", "input"), "l0": ("float16", "local"), "a1": ("float16", "output")}
    arrays = {k: Array(k, d, shape, role, row_major(shape)) for k, (d, role) in kinds.items()}
    read = cast(Load("float16", "a0", (n,)), "float32")
    half = cast(op("exp", read), "float16")
    twice = cast(op("add", cast(half, "float32"), cast(Load("float16", "l0", (n,)), "float32")), "float16")
    iters = (("i", shape[0]),)
    group = Group(
        "g", ("n0",), arrays, (Statement("S", iters, "l0", (n,), half), Statement("T", iters, "a1", (n,), twice))
    )
    made = round_at_stores(group)
    assert made.arrays["l0"].dtype == "float32" and made.arrays["a1"].dtype == "float16"
    first, second = (s.value for s in made.statements)
    assert first == op("exp", read)
    assert second == Op("float16", "cast", (op("add", op("exp", read), Load("float32", "l0", (n,))),))


def test_what_is_clipped_is_rounded_once_and_only_to_its_own_type() -> None:
    n, shape = Index.of("i"), (Index.of("n0"),)
    arrays = {k: Array(k, "bfloat16", shape, r, row_major(shape)) for k, r in (("a0", "input"), ("a1", "output"))}
    total = op("exp", cast(Load("bfloat16", "a0", (n,)), "float32"))

    def clipped(dtype: str, low: float, name: str = "max") -> Value:
        return cast(op(name, cast(cast(total, dtype), "float32"), const(low, "float32")), "bfloat16")

    def kernel_of(v: Value) -> Value:
        s = Statement("S", (("i", shape[0]),), "a1", (n,), v)
        return round_once(Group("g", ("n0",), arrays, (s,))).statements[0].value

    assert kernel_of(clipped("bfloat16", 0)) == cast(op("max", total, const(0, "float32")), "bfloat16")
    for stays in (clipped("float16", 0), clipped("bfloat16", 0.1), clipped("bfloat16", 0, "add")):
        assert kernel_of(stays) == stays, "another type, an end that is rounded itself, a sum"

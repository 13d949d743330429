"""Checks of every call: rank, dtype, equalities, ranges, divisibility; in Program.run and in the C interface."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
from collections.abc import Mapping

import numpy as np
import pytest

import polydyn
from polydyn import Sizes
from polydyn.errors import InputError
from polydyn.program_cache import compile as compile_cached
from polydyn.runtime.explain import refused_sizes
from polydyn.runtime.native import DTYPE_CODES, INPUT, OK, OVERFLOW, Tensor
from polydyn.runtime.program import Program
from tests.support.tiny import model, node

F = "float32"
INPUTS = {"x": (F, ["B", "L"]), "y": (F, ["B", "M"]), "past": (F, ["P", 4]), "mask": (F, ["T"]), "i": ("int64", ["B"])}
GOOD = {"x": (2, 16), "y": (2, 16), "past": (3, 4), "mask": (7,), "i": (2,)}


@pytest.fixture(scope="module")
def program() -> Program:
    """Compile x + y (L == M); x in rows of 4 columns; past joined to itself and 1 masked by T == 2 * P + 1; table[i].
    """
    nodes = [
        node("Add", "x y", "sum"), node("Reshape", "x rows", "four"), node("Slice", "x zero nine one", "cut"),
        node("Concat", "past past row", "twice", axis=0), node("Unsqueeze", "mask one", "column"),
        node("Mul", "twice column", "masked"), node("Gather", "table i", "looked"),
        node("Gather", "x nine", "tenth", axis=1),
    ]  # fmt: skip
    constants = {
        "rows": np.array([-1, 4]), "zero": np.array([0]), "nine": np.array([9]), "one": np.array([1]),
        "row": np.zeros((1, 4), np.float32), "table": np.zeros((5, 2), np.float32),
    }  # fmt: skip
    m = model(nodes, INPUTS, ["sum", "four", "masked", "looked", "tenth"], constants)
    return polydyn.compile(m, threads=1, dims={"B": (1, 8), "L": Sizes(0, 64, multiple=2)})


CASES: Mapping[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "rank": ({"past": (3,)}, "input 'past'.* has 1 axes, the program takes 2: [P, 4]"),
    "constant dim": ({"past": (3, 5)}, "past' of shape [P, 4]: axis 1 is 5, but the .* exported for 4 only.*symbols="),
    "one name": ({"y": (3, 16)}, "axis 0 is 3, but B (B = axis 0 of 'x') is 2.*because: .*both called B"),
    "equality": ({"y": (2, 20)}, "axis 1 is 20, but L (L = axis 1 of 'x') is 16.*because: .*Add_sum"),
    "expression": ({"mask": (8,)}, "axis 0 is 8, but 2*P + 1 (P = axis 0 of 'past') is 7.*because: .*Mul_masked"),
    "above": ({"x": (9, 16), "y": (9, 16), "i": (9,)}, "dim B of x axis 0: .*compiled for 1 <= B <= 8.*here 9 and 8"),
    "below": ({"x": (0, 16), "y": (0, 16), "i": (0,)}, "compiled for 1 <= B <= 8.*rule: 1 is at most B, here 1 and 0"),
    "multiple asked": ({"x": (2, 15), "y": (2, 15)}, "multiples of 2.*rule: L is a multiple of 2, here 15 and 2"),
    "multiple learned": ({"x": (1, 14), "y": (1, 14), "i": (1,)}, "Reshape_four.*is a multiple of 4, here 14 and 4"),
    "inequality": ({"x": (2, 8), "y": (2, 8)}, "Gather_tenth.*is at most L, here 10 and 8"),
}


def pattern(text: str) -> str:
    """Return the pattern of a message in which ``.*`` matches anything and all else itself."""
    return "(?s)" + ".*".join(map(re.escape, text.split(".*")))


def arrays(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {n: np.zeros(shapes.get(n, GOOD[n]), np.int64 if n == "i" else np.float32) for n in GOOD}


def shapes_in_c(program: Program, shapes: Mapping[str, tuple[int, ...]], **dtypes: str) -> tuple[int, str]:
    """Call pd_shapes on these inputs; return its code and its message."""
    lib, native = program._native.library, program._native
    context = ctypes.c_void_p()
    assert lib.pd_context_new(native.program, 1, ctypes.byref(context)) == OK
    names = [i["name"] for i in program.manifest["inputs"]]
    wanted = {i["name"]: i["dtype"] for i in program.manifest["inputs"]}
    sizes = [shapes.get(n, GOOD[n]) for n in names]
    memory = [(ctypes.c_int64 * (len(s) + 1))(*s) for s in sizes]
    tensors = (Tensor * len(names))()
    for t, n, s, m in zip(tensors, names, sizes, memory, strict=True):
        t.shape, t.strides, t.rank = ctypes.addressof(m), None, len(s)
        t.dtype = DTYPE_CODES.index(dtypes.get(n, wanted[n]))
    out = (ctypes.c_int64 * 64)()
    code = lib.pd_shapes(context, tensors, None, out)
    lib.pd_context_free(context)
    return code, lib.pd_error().decode()


@pytest.mark.parametrize("case", CASES)
def test_each_rule_has_its_own_message_through_run(program: Program, case: str) -> None:
    shapes, wanted = CASES[case]
    with pytest.raises(InputError, match=pattern(wanted)):
        program.run(arrays(shapes))
    assert program.run(arrays({}))["masked"].shape == (7, 4), "the program still works"


@pytest.mark.parametrize("case", CASES)
def test_each_rule_has_its_own_message_in_c(program: Program, case: str) -> None:
    shapes, wanted = CASES[case]
    code, said = shapes_in_c(program, shapes)
    assert code == INPUT
    with pytest.raises(InputError, match=pattern(wanted)):
        raise InputError(said)
    assert shapes_in_c(program, {})[0] == OK


def test_dtypes_are_checked(program: Program) -> None:
    for name, wrong in (("i", np.int32), ("x", np.float64)):
        with pytest.raises(InputError, match=rf"input '{name}' is {np.dtype(wrong)}, the program takes"):
            program.run(arrays({}) | {name: np.zeros(GOOD[name], wrong)})
    assert shapes_in_c(program, {}, x="float64") == (INPUT, "input 'x' is float64, the program takes float32")


def test_negative_and_gigantic_sizes_are_refused_in_c(program: Program) -> None:
    """numpy has no such arrays."""
    assert shapes_in_c(program, {"past": (-1, 4)}) == (INPUT, "input 'past': axis 0 is negative")
    code, said = shapes_in_c(program, {"past": (2**62, 4), "mask": (2**62 + 1,)})
    assert code == OVERFLOW and "overflow" in said


def test_described_sizes_that_the_model_refuses_are_named(program: Program) -> None:
    """The model gathers row 9 of an axis of L, so the described range 0..64 begins too low."""
    refused = refused_sizes(program.manifest)
    assert list(refused) == ["L"] and "L is described as 0..64, multiples of 2" in refused["L"]
    assert "refuses L=0" in refused["L"] and "Gather_tenth" in refused["L"]


def test_data_outside_their_axis_are_refused(program: Program) -> None:
    feeds = arrays({})
    feeds["i"][1] = 5
    with pytest.raises(InputError, match=r"Gather_looked.*: an index in 'i' lies outside its axis of size 5"):
        program.run(feeds)


def test_nothing_grows_with_the_number_of_shapes(program: Program) -> None:
    drawn = [(b, n) for b in range(1, 9) for n in range(12, 65, 4)] * 3
    first = [{"x": s, "y": s, "i": s[:1]} for s in ((8, 64), *drawn[:20])]
    for s in first:
        program.run(arrays(s))
    gc.collect()
    before, objects = program.counters, len(gc.get_objects())
    for b, n in drawn:
        program.run(arrays({"x": (b, n), "y": (b, n), "i": (b,)}))
    gc.collect()
    after = program.counters
    assert after["evaluations"] >= before["evaluations"] + len(drawn) - 1, "every shape was new"
    assert {k: after[k] for k in ("contexts", "arena_bytes")} == {k: before[k] for k in ("contexts", "arena_bytes")}
    assert len(gc.get_objects()) - objects < 50


RULES = {
    "a constant": (node("Add", "x c", "y"), {"N": (1, 64)}, "N is described as 1..64, but the model refuses N=1: N =="),
    "a multiple": (node("Reshape", "x s", "y"), {"N": (1, 64)}, "refuses N=1: N is a multiple of 4"),
    "the last": (node("Reshape", "x s", "y"), {"N": polydyn.Sizes(4, 62, multiple=2)}, "refuses N=6: N is a multiple"),
    "a right multiple": (node("Reshape", "x s", "y"), {"N": polydyn.Sizes(1, 64, multiple=4)}, ""),
    "ranges that meet": (node("MatMul", "x m", "y"), {"K": (1, 70), "L": (70, 80)}, ""),
}


@pytest.mark.parametrize("name", RULES)
def test_ranges_that_the_model_contradicts_are_said_also_of_a_stored_program(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    operation, dims, expected = RULES[name]
    inputs = {"x": ("float32", ["N", 3])}
    if operation.op_type == "MatMul":
        inputs = {"x": ("float32", [2, "K"]), "m": ("float32", ["L", 2])}
    constants = {"c": np.ones((5, 3), np.float32), "s": np.array([-1, 4], np.int64)}
    m = model([operation], inputs, ["y"], {n: a for n, a in constants.items() if n in operation.input})
    for cache in (False, True, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "polydyn"):
            compile_cached(m, dims=dims, cache=cache)
        said = [r.getMessage() for r in caplog.records]
        assert (len(said) == 1 and expected in said[0]) if expected else not said, said

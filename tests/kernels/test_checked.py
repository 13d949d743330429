"""The checked build: right programs pass, and every kind of wrong kernel is caught by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from polydyn.checked import CheckedProgram, CheckError
from polydyn.compiler import plan_program
from polydyn.errors import InputError
from polydyn.graph.ir import SymbolSource
from polydyn.program.plan import HostPlan
from polydyn.testing import models
from polydyn.testing.accuracy import TOLERANCE, error, reference
from polydyn.testing.inputs import feeds, shapes
from tests.support.programs import B, L, buffers, kernel, launch
from tests.support.stored import MODELS, compiled, load, path_of, planned
from tests.support.tiny import model, node

CI = ("gpt2_past_tiny",)
COLUMNS, STEPS = 45, 900


def check(name: str) -> None:
    """Check every stored shape: no check fails, the numbers are right, and the bits equal the normal build's."""
    plain, checked, wanted = compiled(name, 2), CheckedProgram(planned(name)), shapes(name)
    for shape, expected in zip(wanted, reference(path_of(name), wanted), strict=True):
        inputs = feeds(load(name), shape)
        got, normal = checked.run(inputs), plain.run(inputs)
        assert error(got, expected) <= TOLERANCE
        assert all(np.array_equal(got[n], normal[n]) for n in got), f"other bits than the normal build at {shape}"


@pytest.mark.parametrize("name", CI)
def test_transformers_pass_every_check(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n not in CI and "densenet" not in n])
def test_the_other_models_pass_every_check(name: str) -> None:
    check(name)


# -- one linear layer with a softmax: a contraction of two reduction blocks, tails everywhere -------------------------

RNG = np.random.default_rng(0)
W, BIAS = RNG.standard_normal((STEPS * 2, COLUMNS), np.float32), RNG.standard_normal(COLUMNS, np.float32)


@cache
def plan() -> HostPlan:
    nodes = [node("MatMul", "x w", "y"), node("Add", "y b", "z"), node("Softmax", "z", "o", axis=-1)]
    return plan_program(model(nodes, {"x": ("float32", ["B", 2 * STEPS])}, ["o"], {"w": W, "b": BIAS}))


def x(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, 2 * STEPS), np.float32)}


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 31])
def test_partial_sums_and_tails_are_fine(rows: int) -> None:
    checked = CheckedProgram(plan())
    z = x(rows)["x"].astype(np.float64) @ W + BIAS
    e = np.exp(z - z.max(-1, keepdims=True))
    np.testing.assert_allclose(checked.run(x(rows))["o"], e / e.sum(-1, keepdims=True), rtol=1e-3, atol=1e-5)


WRONG = {
    "store off by one": ("nest", r"(vstorem?_f32\(a\d), ", r"\1, 1 + ", r"writes element \d+ of a\d \(o\), which"),
    "no mask on the tail's store": (
        "nest", r"vstorem_f32\((a.*), [^,\n]*\);", r"vstore_f32(\1);", r"writes element \d+ of a\d \(o\), which",
    ),
    "no mask on the tail's load": (
        "nest", r"vloadm_f32\((a\d), (.*?), (?:13|5)\)", r"vload_f32(\1, \2)",
        r"reads element \d+ of a\d \(z\), which has",
    ),
    "accumulator without a first value": ("contract", r"(acc_\d+) = vbcast_f32\(0.0f\);", "", "without a value"),
    "two tasks write one row": ("nest", r"= task;", "= task / 2;", r"which task \d+ wrote"),
    "scratch read before it is written": (
        "nest", r"vstorem?_f32\(l\d.*;", "", r"reads element \d+ of l\d \(l\d\), which was never written",
    ),
    "rows that nobody writes": (
        "contract", r"for \(i64 c_i = (.*?); c_i < ", r"for (i64 c_i = \1; 1 + c_i < ", "other bits with 2 threads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_caught(fault: str) -> None:
    kind, pattern, replacement, message = WRONG[fault]
    with pytest.raises(CheckError, match=f"kernel {kind}_.*{message}"):
        only(plan(), kind, lambda text: re.sub(pattern, replacement, text)).run(x(9))


def only(p: HostPlan, kind: str, change: Callable[[str], str]) -> CheckedProgram:
    """Compile the program with changed texts of its kernels of a kind; at least one text must change."""
    kernels = tuple(replace(k, text=change(k.text)) if k.name.startswith(kind) else k for k in p.kernels)
    assert kernels != p.kernels, "the change changed nothing"
    return CheckedProgram(replace(p, kernels=kernels))


def test_what_the_row_block_before_has_left_is_not_seen() -> None:
    """With more heads than threads a task has all blocks of rows, which reuse one piece of scratch."""
    r = np.random.default_rng(0)
    inputs = {n: r.standard_normal((2, 40, 32), np.float32) for n in "qkv"}
    inputs["attention_mask"] = np.ones((2, 40), np.int64)
    p = plan_program(models.attention(heads=4, depth=8))
    for buffer, writes in (("weights", r"\w+_rows\("), ("scores", r"vstorem?_f32\(scores, ")):
        stale = re.compile(rf"({writes}.*;)")
        program = only(p, "attention", lambda t, stale=stale: stale.sub(r"if (o_i == 0) \1", t))  # type: ignore[misc]
        with pytest.raises(CheckError, match=rf"reads element \d+ of {buffer} .*, which was never written"):
            program.run(inputs)


def test_what_the_reduction_block_before_has_packed_is_not_seen() -> None:
    nodes = [node("MatMul", "a t", "y"), node("Transpose", "b", "t", perm=[1, 0])][::-1]
    made = model(nodes, {"a": ("float32", ["M", "K"]), "b": ("float32", ["N", "K"])}, ["y"])
    p = plan_program(made, target="cpu:avx2")
    r = np.random.default_rng(0)
    inputs = {"a": r.standard_normal((5, 1600), np.float32), "b": r.standard_normal((9, 1600), np.float32)}
    CheckedProgram(p).run(inputs)
    program = only(p, "contract", lambda t: re.sub(r"(pd_transpose_f32\(panel, .*;)", r"if (b_k == 0) { \1 }", t))
    with pytest.raises(CheckError, match=r"reads element \d+ of panel .*, which was never written"):
        program.run(inputs)


def test_a_panel_one_vector_short_is_caught() -> None:
    p = plan()
    name = next(n for n in p.constants if "@" in n)
    short = replace(p, constants={**p.constants, name: p.constants[name].reshape(-1)[:-16]})
    with pytest.raises(CheckError, match=rf"reads element {p.constants[name].size - 16} of a\d \({name}\)"):
        CheckedProgram(short).run(x(3))


def test_scratch_beyond_what_the_launch_asks_for_is_caught() -> None:
    """Two rows of 37 elements, each starting at a cache line."""
    p = plan_program(model([node("Softmax", "x", "y", axis=-1)], {"x": ("float32", ["B", "L"])}, ["y"]))
    missing = 2 * 64 + 4
    less = tuple(
        replace(k, candidates=tuple(replace(c, scratch=c.scratch - missing) for c in k.candidates)) for k in p.launches
    )
    with pytest.raises(CheckError, match=r"scratch l\d needs bytes 192 to 340 of 292"):
        CheckedProgram(replace(p, launches=less)).run({"x": np.zeros((3, 37), np.float32)})


def test_sizes_are_guarded() -> None:
    with pytest.raises(InputError, match="has shape"):
        CheckedProgram(plan()).run({"x": np.zeros((2, 7), np.float32)})


# -- hand-written kernels: rules between tasks and launches -----------------------------------------------------------


def one_kernel(body: str, symbols: tuple[object, ...] = (), tasks: object = B, repeat: int = 1) -> CheckedProgram:
    k = kernel("k", 2, len(symbols), body)
    p = HostPlan(
        "one", ("x",), ("y",),
        buffers(("x", "float32", (B, L), "input"), ("y", "float32", (B, L), "output")),
        {}, (SymbolSource("B", "x", 0), SymbolSource("L", "x", 1)), (), (k,),
        (launch(k, "x y", symbols, tasks, B * L),) * repeat,
        headers=plan().headers,
    )  # fmt: skip
    return CheckedProgram(p)


HEAD = "const f32 *a = buf[0]; f32 *c = buf[1]; for (i64 t = begin; t < end; ++t) "
FEED = {"x": np.arange(6, dtype=np.float32).reshape(3, 2)}


def test_a_kernel_that_keeps_all_rules() -> None:
    body = HEAD + "for (i64 j = 0; j < 2; ++j) { PD_PUT(c, 2*t + j, 1); PD_PUT(c, 2*t + j, PD_AT(c, 2*t + j) + 1); }"
    assert (one_kernel(body).run(FEED)["y"] == 2).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{ PD_PUT(c, 2*t, 1); PD_PUT(c, 2*t, 2); }", "task 0: writes element 0 of c .y. twice without reading"),
        ("{ PD_PUT(c, 2*t, t ? PD_AT(c, 2*t - 2) : 0); }", "task 1: reads element 0 of c .y., which task 0 wrote"),
        ("PD_PUT(c, -1, 1);", "task 0: writes element -1 of c .y., which has 6"),
        ("PD_PUT(c, 2*t, PD_AT(c, 2*t) + 1);", "task 0: reads element 0 of c .y., which was never written"),
        ("vstores_f32(c, 2*t, 0, vbcast_f32(1), 2);", "task 0: 2 lanes write one element of c"),
        ("PD_PUT(c, 2*t, PD_AT(a, 2*t));", "element 1 of output y was never written"),
    ],
)
def test_rules_between_tasks(body: str, message: str) -> None:
    with pytest.raises(CheckError, match=message):
        one_kernel(HEAD + body).run(FEED)


def test_a_second_launch_may_not_write_the_same_elements() -> None:
    body = HEAD + "for (i64 j = 0; j < 2; ++j) PD_PUT(c, 2*t + j, 1);"
    with pytest.raises(CheckError, match="which was written before this launch"):
        one_kernel(body, repeat=2).run(FEED)


def test_bits_that_depend_on_the_number_of_threads() -> None:
    body = HEAD + "for (i64 j = 0; j < 2; ++j) PD_PUT(c, 2*t + j, 1.0f / sym[0]);"
    with pytest.raises(CheckError, match="element 0 of y has other bits with 2 threads, tasks forwards, than with one"):
        one_kernel(body, symbols=("nth",)).run(FEED)


def test_bits_that_depend_on_the_order_of_tasks() -> None:
    body = "static f32 n; " + HEAD + "for (i64 j = 0; j < 2; ++j) PD_PUT(c, 2*t + j, n++);"
    with pytest.raises(CheckError, match="element 0 of y has other bits with 1 threads, tasks backwards"):
        one_kernel(body).run(FEED)

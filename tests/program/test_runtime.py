"""Running programs: shapes, checks, strides, outputs, threads."""

from __future__ import annotations

import gc
import os
import re
import threading
import time

import numpy as np
import pytest

from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.graph.ir import Guard, SymbolSource
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.runtime.program import Program
from polydyn.schedules.index import Index, fetch, maximum, minimum
from tests.support.programs import ADD, B, L, buffers, example, expected, feeds, kernel, launch

F = "float32"
XY = (SymbolSource("B", "x", 0), SymbolSource("L", "x", 1))


@pytest.fixture(scope="module")
def program() -> Program:
    return build_program(example(), threads=2)


def check(program: Program, x, y, **arguments) -> None:
    got = program.run({"x": x, "y": y}, **arguments)
    for name, value in expected(x, y).items():
        np.testing.assert_array_equal(got[name], value)


def test_alternating_ugly_shapes(program: Program) -> None:
    for shape in [(3, 5), (0, 4), (4, 0), (0, 0), (1, 1), (33, 130), (3, 5), (1000, 333), (31, 1), (3, 5)]:
        check(program, **feeds(*shape))


def test_parallel_launches_give_the_same_bits() -> None:
    plan = example()
    one, four = build_program(plan, threads=1), build_program(plan, threads=4)
    f = {n: np.random.default_rng(3).standard_normal((301, 257)).astype(np.float32) for n in "xy"}
    a, b = one.run(f), four.run(f)
    assert all(a[n].tobytes() == b[n].tobytes() for n in a)


def test_inputs_of_any_strides(program: Program) -> None:
    base = np.arange(4 * 6 * 8, dtype=np.float32).reshape(8, 24)
    check(program, base.T[::-2, ::3], base[:3, :12][:, ::-1].reshape(12, 3, order="F")[:, :3])
    check(program, np.broadcast_to(np.float32(2), (5, 7)), np.broadcast_to(np.arange(7, dtype=np.float32), (5, 7)))
    check(program, base[::2, 1::2], base[::2, ::2].copy(order="F"))


def test_unaligned_and_readonly_inputs(program: Program) -> None:
    raw = np.zeros(4 * 15 + 1, np.uint8)[1:].view(np.float32).reshape(3, 5)
    raw.flags.writeable = False
    check(program, raw, feeds(3, 5)["y"])


def test_outputs_into_the_callers_arrays(program: Program) -> None:
    f = feeds(6, 7)
    out = {"scaled": np.full((6, 7), np.nan, np.float32)}
    got = program.run(f, out=out)
    assert got["scaled"] is out["scaled"] and got["total"] is not None
    np.testing.assert_array_equal(out["scaled"], expected(**f)["scaled"])


def test_refuses_wrong_out(program: Program) -> None:
    f = feeds(6, 7)
    wrong = {
        "no output": {"nope": f["x"]},
        "shape (6, 7)": {"scaled": np.empty((7, 6), F)},
        "array of float32": {"scaled": np.empty((6, 7), "float64")},
        "C-contiguous": {"scaled": np.empty((7, 6), F).T},
        "share memory": {"scaled": f["x"]},
    }
    for message, out in wrong.items():
        with pytest.raises(InputError, match=re.escape(message)):
            program.run(f, out=out)


def test_refuses_wrong_inputs(program: Program) -> None:
    x = feeds(2, 3)["x"]
    wrong = {
        "input 'y' is missing": {"x": x},
        "no input 'z'": {"x": x, "y": x, "z": x},
        "no input 'q'": {"x": x, "q": x},
        "input 'y' is float64": {"x": x, "y": x.astype("float64")},
        "has 1 axes, the program takes 2": {"x": x, "y": x[0]},
        "axis 1 is 4, but L (L = axis 1 of 'x') is 3": {"x": x, "y": np.zeros((2, 4), F)},
        "is object": {"x": x, "y": np.array([[None]])},
    }
    for message, bad in wrong.items():
        with pytest.raises(InputError, match=re.escape(message)):
            program.run(bad)
    check(program, x, x)  # a rejected call leaves nothing behind


def test_guards_are_checked_on_every_call() -> None:
    guards = (
        Guard(B, "<=", Index.of(8), "node Expand needs B of x to be at most 8"),
        Guard(L, "%==", Index.of(4), "node Reshape splits L of x into parts of 4"),
        Guard(B * 2, "==", B + 2, "node Concat needs 2"),
    )
    program = build_program(example(guards), threads=1)
    check(program, **feeds(2, 8))
    for shape, message in {
        (9, 4): "at most 8",
        (2, 6): "rule: L is a multiple of 4, here 6 and 4",
        (3, 4): "node Concat",
    }.items():
        with pytest.raises(InputError, match=message):
            program.run(feeds(*shape))
        check(program, **feeds(2, 8))
    assert len(program.guards) == 3 and "B <= 8" in program.guards[0]


def test_scalars_lists_and_things_with_array(program: Program) -> None:
    class Tensorish:
        def __array__(self, dtype=None, copy=None):
            return np.ones((1, 2), np.float32)

    check_result = program.run({"x": Tensorish(), "y": np.ones((1, 2), np.float32)})
    np.testing.assert_array_equal(check_result["scaled"], [[2, 4]])
    np.testing.assert_array_equal(program(x=Tensorish(), y=Tensorish())["scaled"], [[2, 4]])


def test_several_threads_call_one_program(program: Program) -> None:
    wrong: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            for i in range(30):
                check(program, **feeds(20 + (seed + i) % 7 * 60, 64 + seed, seed))
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=call, args=(s,)) for s in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong, wrong[0]


def count_plan(launches: int) -> HostPlan:
    """Plan launches in which every task adds 1 to its own element."""
    count = kernel("count", 1, 0, "int64_t *o = buf[0];\nfor (int64_t i = begin; i < end; i++) o[i]++;")
    return HostPlan(
        "count", ("x",), ("o",), buffers(("x", F, (L,), "input"), ("o", "int64", (L,), "output")),
        {}, (SymbolSource("L", "x", 0),), (), (count,), (launch(count, "o", (), L, 10**9),) * launches,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_task_runs_exactly_once(threads: int) -> None:
    program = build_program(count_plan(10), threads=threads)
    for length in (0, 1, 2, 6, 7, 33, 1000):
        out = {"o": np.zeros(length, np.int64)}
        program.run({"x": np.zeros(length, F)}, out=out)
        assert (out["o"] == 10).all()


def test_sleeping_workers_are_woken_and_stop_with_the_program() -> None:
    def workers() -> int:
        return len(os.listdir("/proc/self/task"))

    before = workers()
    program = build_program(count_plan(3), threads=4)
    for pause in (0, 0.004, 0.0005, 0.004, 0.001):
        time.sleep(pause)
        out = {"o": np.zeros(100, np.int64)}
        program.run({"x": np.zeros(100, F)}, out=out)
        assert (out["o"] == 3).all()
    assert workers() == before + min(4, len(os.sched_getaffinity(0))) - 1, "no more than cores"
    del program
    gc.collect()
    assert workers() == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_runs_the_program(program: Program) -> None:
    f = feeds(400, 300)
    check(program, **f)  # the pool has threads now
    child = os.fork()
    if not child:
        try:
            check(program, **f)
            check(program, **feeds(500, 300))
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    check(program, **f)


def test_a_thousand_random_shapes_leave_the_arena_flat() -> None:
    program = build_program(example(), threads=1)
    program.run(feeds(64, 64))
    largest = program.counters["arena_bytes"]
    r = np.random.default_rng(5)
    for b, length in r.integers(0, 65, (1000, 2)):
        x = np.ones((b, length), np.float32)
        program.run({"x": x, "y": x})
    assert program.counters["arena_bytes"] == largest
    assert program.counters["contexts"] == 1


def test_equal_shapes_are_evaluated_once(program: Program) -> None:
    fresh = build_program(example(), threads=1)
    assert fresh.compilations == 0  # all from the cache
    for _ in range(5):
        check(fresh, **feeds(9, 9))
    assert fresh.counters["evaluations"] == 1


def test_the_last_eight_shapes_are_remembered() -> None:
    fresh = build_program(example(), threads=1)
    for _ in range(3):
        for n in range(8):
            check(fresh, **feeds(n, 2 * n + 1))
    assert fresh.counters["evaluations"] == 8
    for n in (9, 0, 9, 1, 9):  # the oldest is dropped first
        check(fresh, **feeds(n, 2 * n + 1))
    assert fresh.counters["evaluations"] == 11
    x = np.ones((6, 4), np.float32)[::2]  # other strides are another call
    check(fresh, x=x, y=x)
    check(fresh, **feeds(3, 4))
    check(fresh, x=x, y=x)
    assert fresh.counters["evaluations"] == 13


def test_launch_arithmetic_matches_python() -> None:
    """floor division, min, max, products, nth and unused symbols, evaluated in C and by Index."""
    cases = (
        (B * 3 - L * 5 + 7) // 4, (B - L) // (L + 1), B // (L - 2), minimum(B, L * 2, 9), maximum(B - L, Index.of(-3)),
        B * L * L - 2 * B, (B + 3) % 4, (B * L).ceildiv(8), Index.of("nth") * 100, Index.of(-5), B,
    )  # fmt: skip
    dump = kernel("dump", 1, len(cases), "int64_t *o = buf[0];\nfor (int i = 0; i < N; i++) o[i] = sym[i];".replace(
        "N", str(len(cases))))  # fmt: skip
    plan = HostPlan(
        "dump", ("x",), ("o",), buffers(("x", F, (B, L), "input"), ("o", "int64", (len(cases),), "output")),
        {}, XY, (), (dump,), (launch(dump, "o", cases, 1, 1),),
    )  # fmt: skip
    program = build_program(plan, threads=3)
    for b, length in [(0, 0), (1, 0), (2, 2), (5, 2), (7, 3), (3, 17), (130, 33)]:
        got = program.run({"x": np.zeros((b, length), F)})["o"]
        env = {"B": b, "L": length, "nth": 3}
        assert list(got) == [c.evaluate(env) for c in cases], (b, length)


def test_refuses_sizes_that_overflow() -> None:
    n = Index.of(2**40)
    plan = HostPlan(
        "big", ("x", "y"), ("o",),
        buffers(("x", F, (B, L), "input"), ("y", F, (B, L), "input"), ("t", F, (B * n, L), "intermediate"),
                ("o", F, (B, L), "output")),
        {}, XY, (), (ADD,), (launch(ADD, "x y t", (), B * L, 1), launch(ADD, "x t o", (), B * L, 1)),
    )  # fmt: skip
    program = build_program(plan, threads=1)
    for shape, message in {(2**12, 2**12): "overflow", (4, 4096): "bytes for intermediates"}.items():
        zeros = np.broadcast_to(np.float32(0), shape)
        with pytest.raises(PolydynError, match=message):
            program.run({"x": zeros, "y": zeros})
    assert program.run(feeds(0, 4))["o"].shape == (0, 4)


def test_refuses_negative_dims() -> None:
    plan = HostPlan(
        "cut", ("x", "y"), ("o",),
        buffers(("x", F, (B, L), "input"), ("y", F, (B, L), "input"), ("o", F, (L - 3,), "output")),
        {}, XY, (), (ADD,), (launch(ADD, "x y o", (), L - 3, 1),),
    )  # fmt: skip
    program = build_program(plan, threads=1)
    assert program.run(feeds(1, 3))["o"].shape == (0,)
    with pytest.raises(InputError, match=re.escape("make axis 0 of 'o', L - 3, negative: -1")):
        program.run(feeds(1, 2))


def test_refuses_malformed_plans() -> None:
    good = example()
    x = good.buffers["x"]

    def change(**fields):
        return HostPlan(**(vars(good) | fields))

    bad = {
        "without a source": change(sources=XY[:1]),
        "occurs twice": change(sources=(*XY, XY[0])),
        "must not be called 'nth'": change(sources=(*XY, SymbolSource("nth", "y", 0))),
        "which is not in the plan": change(kernels=good.kernels[:2]),
        "unknown buffer": change(buffers={n: b for n, b in good.buffers.items() if n != "t0"}),
        "no launch writes the output": change(launches=good.launches[:3]),
        "takes 3 and 1": change(launches=(launch(good.kernels[1], "x w t0", (), 1, 1), *good.launches)),
        "no array": change(constants={}),
        "contradicts": change(inputs=("x",), buffers=good.buffers | {"x": x}),
    }
    for message, plan in bad.items():
        with pytest.raises(PolydynError, match=message):
            build_program(plan)
    with pytest.raises(UnsupportedError, match="contents of tensor 'x'"):
        data_dependent = launch(ADD, "x y t0", (), fetch("x", (0, 0)), 1)
        build_program(change(launches=(data_dependent, *good.launches)))


def test_profile_reports_every_launch(program: Program) -> None:
    times = program.profile(feeds(50, 40))
    assert [t.label for t in times] == program.launches
    assert times[1].flops == 50 * 40 * 10 and times[0].tasks == 2000 and all(t.nanoseconds >= 0 for t in times)


def test_bfloat16_travels_as_bits() -> None:
    copy = kernel("copy16", 2, 0, "const uint16_t *a = buf[0]; uint16_t *c = buf[1];\n"
                  "for (int64_t i = begin; i < end; i++) c[i] = a[i];")  # fmt: skip
    plan = HostPlan(
        "b16", ("x",), ("o",), buffers(("x", "bfloat16", (L,), "input"), ("o", "bfloat16", (L,), "output")),
        {}, (SymbolSource("L", "x", 0),), (), (copy,), (launch(copy, "x o", (), L, 1),),
    )  # fmt: skip
    bits = np.arange(9, dtype=np.uint16)
    np.testing.assert_array_equal(build_program(plan).run({"x": bits[::2]})["o"], bits[::2])

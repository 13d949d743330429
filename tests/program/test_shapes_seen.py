"""The log of shapes: its counts, its limit, threads, and ``polydyn tune --from-log``."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest

from polydyn.errors import InputError
from polydyn.program.assemble import build_program
from polydyn.runtime.program import Program
from polydyn.runtime.shapes_log import read_log
from tests.support.programs import example, feeds


@pytest.fixture
def program() -> Program:
    return build_program(example(), threads=1)


def counts(program: Program) -> dict[tuple[int, int], int]:
    return {(x["dims"]["B"], x["dims"]["L"]): x["count"] for x in program.shapes_seen()}


def test_every_call_is_counted_with_its_shape(program: Program) -> None:
    assert program.shapes_seen() == []
    for shape in [(3, 5), (3, 5), (0, 4), (3, 5), (1, 1), (0, 4)]:
        program.run(feeds(*shape))
    assert program.shapes_seen() == [
        {"dims": {"B": 3, "L": 5}, "count": 3},
        {"dims": {"B": 0, "L": 4}, "count": 2},
        {"dims": {"B": 1, "L": 1}, "count": 1},
    ]
    program.bind(feeds(1, 1))()
    assert counts(program)[1, 1] == 2


def test_calls_that_compute_nothing_for_the_caller_are_not_counted(program: Program) -> None:
    f = feeds(3, 5)
    program.profile(f)
    program.bind(feeds(2, 2))  # prepared, never run
    with pytest.raises(InputError):
        program.run({"x": f["x"], "y": f["y"][:, :2]})
    assert program.shapes_seen() == []


def test_equal_sizes_with_other_strides_are_one_shape(program: Program) -> None:
    f = feeds(3, 5)
    program.run(f)
    program.run({n: np.asfortranarray(a) for n, a in f.items()})
    assert counts(program) == {(3, 5): 2}


def test_the_log_is_bounded_and_says_what_is_left_out(program: Program) -> None:
    x, y = (feeds(1, 4200)[n] for n in "xy")
    for n in range(4200):
        program.run({"x": x[:, :n], "y": y[:, :n]})
    program.run({"x": x[:, :7], "y": y[:, :7]})
    seen = counts(program)
    assert len(seen) == 4096 and seen[1, 7] == 2 and (1, 4150) not in seen
    assert program.counters["runs_not_logged"] == 4200 - 4096


def test_threads_lose_no_count() -> None:
    program = build_program(example(), threads=1)
    shapes = [feeds(1, n) for n in range(40)]
    start = threading.Barrier(4)

    def call() -> None:
        start.wait()
        for _ in range(10):
            for f in shapes:
                program.run(f)
            program.shapes_seen()

    workers = [threading.Thread(target=call) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert counts(program) == {(1, n): 40 for n in range(40)}


def test_from_c_with_too_little_room(program: Program) -> None:
    for n in range(5):
        program.run(feeds(n, 2))
    library, handle = program._native.library, program._native.program
    library.pd_symbol.restype = ctypes.c_char_p
    assert [library.pd_symbol(handle, k) for k in range(-1, 3)] == [None, b"B", b"L", None]
    rows, others = (ctypes.c_int64 * 7)(*[-1] * 7), ctypes.c_int64()
    assert library.pd_shapes_seen(handle, rows, ctypes.c_int64(2), ctypes.byref(others)) == 5
    assert rows[6] == -1 and rows[1] == rows[4] == 2 and rows[2] == rows[5] == 1 and others.value == 0


def test_a_saved_log_is_what_tuning_reads(program: Program, tmp_path: Path) -> None:
    for shape in [(3, 5), (3, 5), (1, 1)]:
        program.run(feeds(*shape))
    program.save_shapes(tmp_path / "shapes.json")
    assert read_log(tmp_path / "shapes.json") == [({"B": 3, "L": 5}, 2), ({"B": 1, "L": 1}, 1)]

"""The thread pool: every task runs once and gives the same bits, even if threads are lost, moved, rejected or stolen.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from polydyn.build.compiler import find_compiler
from polydyn.graph.ir import SymbolSource
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.runtime.c import sources
from tests.support.paths import TESTS
from tests.support.programs import L, buffers, example, expected, feeds, kernel, launch

HERE = TESTS
F = "float32"
MODES = ("plain", "lost", "crowded", "refused", "blind", "masks")


def hammer(folder: Path, change: tuple[str, str] | None = None, *flags: str) -> Path:
    """Compile ``tests/c/pool_hammer.c`` around the pool, in which ``change`` replaces one text by another."""
    for name, text in sources().items():
        if name == "pool.c" and change:
            assert text.count(change[0]) == 1, change
            text = text.replace(*change)
        (folder / name).write_text(text)
    program = folder / "hammer"
    warnings = ("-Wall", "-Wextra", "-Werror") if change is None else ()
    command = [*find_compiler().command, "-std=gnu11", "-O1", "-g", "-pthread", *warnings, *flags, f"-I{folder}"]
    subprocess.run([*command, str(HERE / "c" / "pool_hammer.c"), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def hammered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hammer(tmp_path_factory.mktemp("pool"))


@pytest.mark.parametrize("mode", MODES)
def test_every_task_runs_once_whatever_the_system_answers(hammered: Path, mode: str) -> None:
    """Odd splits, stealing, delays, several callers and pools, pools that are freed and forks while others run."""
    done = subprocess.run([hammered, mode, "3", "1500", "fork"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    pins, refused, pulls = (int(part.split()[0]) for part in done.stdout.split(","))
    assert pulls > 0, "workers that lost their core were waited for"
    if mode in ("refused", "blind"):
        assert pins == 0 and refused <= 200, "who may not be moved is not asked again and again"
    else:
        assert pins > 0 and refused == 0


BROKEN = {
    "a piece is claimed without looking whether another thread was faster": (
        "if (atomic_compare_exchange_weak_explicit(&r->pieces, &word, rest, relaxed, relaxed))",
        "atomic_store_explicit(&r->pieces, rest, relaxed);",
    ),
    "the caller does not wait for who has joined": ("if (!turn(p->workers[i], POSTED, IDLE)) join(", "if (0) join("),
    "threads that take pieces of another use its scratch": ("run_piece(job, owner, piece, scratch)",
        "run_piece(job, owner, piece, job->scratch + owner * job->scratch_stride)"),
    "the last piece is forgotten": ("if (next >= end) return -1;", "if (next + (end > 1) >= end) return -1;"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_pool_is_found(tmp_path: Path, fault: str) -> None:
    broken = hammer(tmp_path, BROKEN[fault])
    try:
        done = subprocess.run([broken, "plain", "3", "3000"], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return
    assert done.returncode != 0


TSAN = "-fsanitize=thread"
EXCHANGE = "atomic_exchange_explicit(&w->state, IDLE, acq_rel)"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the hammer with gcc's or clang's thread sanitizer."""
    return hammer(tmp_path_factory.mktemp("tsan"), None, TSAN)


def races(program: Path, mode: str, launches: int) -> str:
    done = subprocess.run([program, mode, "5", str(launches)], capture_output=True, text=True, timeout=1000)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("mode", MODES)
def test_no_data_races(watched: Path, mode: str) -> None:
    assert not races(watched, mode, 300)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_data_races_in_many_launches(watched: Path, mode: str) -> None:
    assert not races(watched, mode, 20000)


def test_a_data_race_is_found(tmp_path: Path) -> None:
    broken = hammer(tmp_path, (EXCHANGE, EXCHANGE.replace("acq_rel", "relaxed")), TSAN)
    assert "data race" in races(broken, "plain", 1000)


RECORD_ORDER = """int64_t *o = buf[1]; const int64_t *x = buf[0]; double *s = scratch;
for (int64_t i = begin; i < end; i++) {
    s[0] = (double)x[i];
    for (int k = 1; k < 64; k++) s[k] = s[k - 1] * 1.000001 + k;
    o[i] = (int64_t)(s[63] * 1e6);
}"""


def test_bits_do_not_depend_on_threads_cores_or_masks() -> None:
    work = kernel("work", 2, 0, RECORD_ORDER)
    plan = HostPlan(
        "work", ("x",), ("o",), buffers(("x", "int64", (L,), "input"), ("o", "int64", (L,), "output")),
        {}, (SymbolSource("L", "x", 0),), (), (work,), (launch(work, "x o", (), L, 10**8, scratch=512),) * 3,
    )  # fmt: skip
    programs = [build_program(plan, threads=t) for t in (1, 2, 3, 8, 100)]
    x = np.random.default_rng(0).integers(-(10**6), 10**6, 4001)
    (first, *others) = (p.run({"x": x})["o"] for p in programs)
    assert all((o == first).all() for o in others)
    before = os.sched_getaffinity(0)
    try:
        for mask in ([min(before)], before, [max(before)], before):
            os.sched_setaffinity(0, mask)
            for _ in range(30):
                assert all((p.run({"x": x})["o"] == first).all() for p in programs)
    finally:
        os.sched_setaffinity(0, before)


def workers() -> int:
    return len(os.listdir("/proc/self/task"))


def test_one_allowed_core_means_no_workers() -> None:
    program, before = build_program(example(), threads=4), os.sched_getaffinity(0)
    made = []

    def call(mask: set[int]) -> None:
        os.sched_setaffinity(0, mask)  # of this thread
        there, f = workers(), feeds(700, 300)
        np.testing.assert_array_equal(program.run(f)["total"], expected(**f)["total"])
        made.append(workers() - there)

    for mask in ({min(before)}, before):
        caller = threading.Thread(target=call, args=(mask,))
        caller.start()
        caller.join()
        threading.Event().wait(0.05)
    assert made == [0, min(4, len(before)) - 1]


def test_workers_follow_the_mask_of_the_caller() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    there = set(os.listdir("/proc/self/task"))
    program = build_program(example(), threads=2)
    f = feeds(700, 300)
    program.run(f)
    (made,) = set(os.listdir("/proc/self/task")) - there
    os.sched_setaffinity(int(made), [min(before)])  # another program changes the mask
    try:
        os.sched_setaffinity(0, [max(before)])
        threading.Event().wait(0.02)
        program.run(f)
        assert settles(int(made), {max(before)})
    finally:
        os.sched_setaffinity(0, before)
    threading.Event().wait(0.02)
    program.run(f)
    assert settles(int(made), before)


def settles(tid: int, mask: set[int]) -> bool:
    """Return whether a thread gets the mask; a moved worker has another one for a moment."""
    return any(os.sched_getaffinity(tid) == mask or threading.Event().wait(0.01) for _ in range(500))


def test_programs_are_closed_while_others_run() -> None:
    lasting, wrong = build_program(example(), threads=2), list[str]()

    def call(program: object) -> None:
        for i in range(40):
            used = program or build_program(example(), threads=3)
            f = feeds(40 + i, 300)
            if not np.array_equal(used.run(f)["total"], expected(**f)["total"]):  # type: ignore[attr-defined]
                wrong.append(f"{i}")

    callers = [threading.Thread(target=call, args=(p,)) for p in (lasting, lasting, None, None)]
    [t.start() for t in callers]
    [t.join() for t in callers]
    assert not wrong

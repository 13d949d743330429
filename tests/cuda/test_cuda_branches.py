"""Branches of a run's graph: launches that share no memory run in parallel, on the CPU libcuda in two orders."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydyn.codegen.kernel import Block
from polydyn.gpu.compiler import device_headers
from polydyn.gpu.errors import DeviceLostError
from polydyn.graph.ir import SymbolSource
from polydyn.program import launch_tables, parallel_launches
from polydyn.program.assemble import build_program
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.schedules.index import Index
from tests.support.cuda_programs import ADD, add, version
from tests.support.programs import B, buffers, kernel_of_text

X = np.arange(96, dtype=np.float32).reshape(3, 32)


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield open_session()


def branches() -> HostPlan:
    """Plan ``o = (x + 1) + 2`` and ``p = (x + 3) + 4``, one after the other: both intermediate sums share a buffer."""
    rows = [("x s", 1), ("s o", 2), ("x t", 3), ("t p", 4)]
    launches = tuple(
        Launch((version("a", Index.of(by), *names.split()),), B, Index.of(1), label=names, writes=(names[-1],))
        for names, by in rows
    )
    shape = (B, Index.of(32))
    return HostPlan(
        name="p", inputs=("x",), outputs=("o", "p"), launches=launches, kernels=(add("a"),), guards=(), constants={},
        buffers=buffers(
            ("x", "float32", shape, "input"), *((n, "float32", shape, "intermediate") for n in "st"),
            *((n, "float32", shape, "output") for n in "op"),
        ),
        sources=(SymbolSource("B", "x", 0),), headers=dict(device_headers()), place="cuda",
    )  # fmt: skip


def counter(session: Session, name: str) -> int:
    """Return a counter of the CPU libcuda."""
    return ctypes.c_uint64.in_dll(ctypes.CDLL(session.library), name).value


def depth(session: Session, program: Any) -> int:
    """Return the longest chain of nodes in a call's graph, after a check of its result."""
    call = program.bind({"x": X})
    got = call()
    assert np.array_equal(got["o"], X + 3) and np.array_equal(got["p"], X + 7)
    return counter(session, "pdemu_graph_depth")


def test_launches_wait_for_what_they_share_memory_with(device: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = branches()
    monkeypatch.setattr(parallel_launches, "MEMORY_FACTOR", 2)
    joined = parallel_launches.join_waves(plan)
    assert joined.waves == (2, 2)
    unknown = replace(plan, launches=tuple(replace(x, writes=None) for x in plan.launches))
    one_by_one = 1 + 4 + 1  # a copy in, the launches, a copy out
    assert depth(device, build_program(joined, target="cuda:emulated")) == 1 + 2 + 1
    assert depth(device, build_program(plan, target="cuda:emulated")) == one_by_one, "the place of s is t's"
    assert depth(device, build_program(unknown, target="cuda:emulated")) == one_by_one


def overlaps(session: Session, call: Any) -> int:
    """Return how many launches of a call began before the previous one ended, after a check of its result."""
    call()  # a graph's first replay runs it twice
    before = counter(session, "pdemu_overlaps")
    got = call()
    assert np.array_equal(got["o"], X + 3) and np.array_equal(got["p"], X + 7)
    return counter(session, "pdemu_overlaps") - before


def test_launches_begin_while_the_one_before_is_at_work(device: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"x": X}
    program: Any = build_program(branches(), target="cuda:emulated")
    program.graphs = 0
    assert overlaps(device, lambda: program.run(x)) == 3, "but for the first, which a copy precedes"
    assert overlaps(device, program.bind(x)) == 3
    program.profile(x, repeats=1)
    before = counter(device, "pdemu_overlaps")
    program.profile(x, repeats=1)
    assert counter(device, "pdemu_overlaps") == before, "each launch is timed alone"
    monkeypatch.setattr(parallel_launches, "MEMORY_FACTOR", 2)
    forked: Any = build_program(parallel_launches.join_waves(branches()), target="cuda:emulated")
    assert overlaps(device, forked.bind(x)) == 2, "in each branch"
    for name, value in (("PDEMU_SM", "80"), ("POLYDYN_LACKING", "early_launches")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            plain: Any = build_program(branches(), target="cuda:emulated")
            assert overlaps(device, lambda p=plain: p.run(x)) == overlaps(device, plain.bind(x)) == 0


def joins() -> HostPlan:
    """Plan ``o = (x + 1) + (x + 3)``, which waits for two kernels, and ``p = o + z``, for a kernel and a copy."""
    plan, shape = branches(), (B, Index.of(32))
    text = ADD.replace("NAME", "sum").replace("float *y, int64_t by", "const float *z, float *y")
    both = kernel_of_text("sum", text.replace("(float)by", "pd_ldg(z + at)"), 3, 0, Block(32))
    sums = [Candidate("sum", tuple(names), (), B, block=Block(32)) for names in ("sto", "ozp")]
    more = [Launch((c,), B, Index.of(1), label=c.buffers[2], writes=c.buffers[2:]) for c in sums]
    return replace(
        plan, inputs=("x", "z"), launches=(plan.launches[0], plan.launches[2], *more), kernels=(*plan.kernels, both),
        buffers=plan.buffers | buffers(("z", "float32", shape, "input")),
    )  # fmt: skip


def test_a_launch_begins_while_several_are_at_work(device: Session) -> None:
    program: Any = build_program(joins(), target="cuda:emulated")
    call = program.bind({"x": X, "z": 2 * X})
    call()
    before = counter(device, "pdemu_overlaps")
    got = call()
    assert np.array_equal(got["o"], 2 * X + 4) and np.array_equal(got["p"], 4 * X + 4)
    assert counter(device, "pdemu_overlaps") - before == 2, "both that read what kernels have made"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "global memory is touched at line .* before pd_grid_begin"),
        ("if (pd_tid() < 31) pd_grid_begin();", "thread 31"),
        ("if (pd_tid() == 31) return;\n  pd_grid_begin();", "ends without pd_grid_begin"),
        ("pd_ldg(x);\n  pd_grid_begin();", "before pd_grid_begin"),
        ("pd_fetch(x);\n  pd_grid_begin();", "memory that a launch or a copy has written is fetched"),
    ],
)
def test_a_kernel_that_does_not_wait_is_seen(
    device: Session, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(launch_tables, "BEGIN", "")  # the tables claim that it waits
    kernel = add("a")
    wrong = replace(kernel, text=kernel.text.replace("pd_grid_begin();", text))
    program: Any = build_program(replace(branches(), kernels=(wrong,)), target="cuda:emulated")
    with pytest.raises(DeviceLostError, match=message):
        program.run({"x": X})
    if not text:
        with pytest.raises(DeviceLostError, match=message):
            program.bind({"x": X})()


def test_a_missing_edge_is_seen(device: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_tables, "_touched", lambda *_: [])
    program: Any = build_program(branches(), target="cuda:emulated")
    call = program.bind({"x": X})
    with pytest.raises(DeviceLostError, match="branches of a graph race"):
        call()

"""Measurements with busy processes, and the simulation of more cores."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from benchmarks.busy import busy_processes, chain_program, chain_times, row
from benchmarks.cores import (
    FLOPS_PER_NS,
    JOIN_NS,
    POST_NS,
    constant,
    launch_ns,
    pieces,
    simulate,
    summary,
    wave_threads,
    worst,
)
from benchmarks.rivals import load
from polydyn.runtime.explain import WORK_PER_THREAD, ExplainedLaunch

LONG_LAUNCH = ExplainedLaunch("x", "k", 64, 4, {}, {}, int(64e6 * FLOPS_PER_NS), 0, 0, ())
"""64 tasks of a millisecond each."""


def test_constants_are_those_of_the_run_time() -> None:
    assert constant("PD_WORK_PER_THREAD") == WORK_PER_THREAD and constant("PD_PIECES") > 1
    with pytest.raises(AssertionError):
        constant("PD_NO_SUCH")


def test_tasks_that_divide_evenly_leave_nobody_idle() -> None:
    wave = simulate([LONG_LAUNCH], 4)
    assert wave.threads == 4 and wave.barrier == 3 * POST_NS + JOIN_NS
    assert wave.time == pytest.approx(16e6 + wave.barrier) and wave.idle(4) == pytest.approx(4 * wave.barrier)
    assert simulate([LONG_LAUNCH], 1).idle(1) == 0 and simulate([LONG_LAUNCH], 1).barrier == 0


def test_few_tasks_leave_cores_idle() -> None:
    three = replace(LONG_LAUNCH, tasks=3, threads=2)
    wave = simulate([three], 2)
    assert wave.time - wave.barrier == pytest.approx(2 / 3 * launch_ns(three)), "one thread has two tasks"
    s = summary([wave], 2)
    assert s["idle"] == pytest.approx(s["in shares"] + s["in barriers"])
    assert s["in shares"] == pytest.approx(0.25, abs=0.01)
    small = replace(LONG_LAUNCH, flops=WORK_PER_THREAD // 2, threads=1)
    assert wave_threads([small], 64) == 1 and simulate([small], 64).idle(64) == pytest.approx(63 * launch_ns(small))
    ((name, count, idle, longest),) = worst([wave, simulate([small], 64)], 2, 1)
    assert name == "k" and count == 2 and idle > 0 and longest is wave


def test_pieces_are_whole_tasks() -> None:
    assert sum(pieces(replace(LONG_LAUNCH, tasks=13))) == pytest.approx(launch_ns(LONG_LAUNCH))
    assert len(pieces(replace(LONG_LAUNCH, tasks=13))) == 13 and len(pieces(LONG_LAUNCH)) == 4 * constant("PD_PIECES")
    short = replace(LONG_LAUNCH, flops=4 * 6000 * constant("PD_FLOPS_PER_NS"))
    assert len(pieces(short)) == 4, "6 us for each thread"


def test_a_lookup_does_not_count_its_whole_table() -> None:
    table = replace(LONG_LAUNCH, flops=1000, bytes=10**9)
    assert launch_ns(table) < 10**4


def test_who_is_more_than_a_tenth_behind_is_named() -> None:
    found = {"polydyn": [1.0, 1.0, 9.0], "onnxruntime": [0.1] * 3, "onnxruntime-nospin": [0.95] * 3}
    one = row("m", {"B": 1}, "0 busy", found)
    assert not one["behind"] and one["ms"]["polydyn"][0] == 1000 and one["ms"]["polydyn"][2] > 8000
    assert row("m", {"B": 1}, "0 busy", found | {"onnxruntime-nospin": [0.89] * 3})["behind"]


def test_busy_processes_end_with_the_block() -> None:
    began = time.monotonic()
    with busy_processes(1):
        pass
    assert time.monotonic() - began < 60


def test_other_libraries_may_compute_before_a_call(tmp_path: Path) -> None:
    path = tmp_path / "add.onnx"
    x, y, z = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N"]) for n in "xyz")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", "xy", "z")], "g", [x, y], [z])
    onnx.save(onnx.helper.make_model(graph), path)
    with pytest.raises(ValueError, match="no product by 'cobol'; known: torch, numpy"):
        load("numpy+cobol", str(path), 1)
    player = load("numpy+numpy", str(path), 1)
    assert player.before is not None
    player.before()


def test_the_chain_runs(tmp_path: Path) -> None:
    found = chain_times(chain_program(tmp_path), 0.001, "spin")
    assert list(found) == ["launch_10us", "launch_100us", "launch_1ms", "chain", "1000_empty", "20_of_10ms"]
    assert all(0 < p50 <= p90 <= p99 for p50, p90, p99 in found.values())

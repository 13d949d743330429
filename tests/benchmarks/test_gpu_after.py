"""Evaluation of a GPU's reports: the order of faults, constants compared with measurements and fitted."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import after, calibration, fit
from benchmarks.gpu.timed import timed
from polydyn.gpu import hardware

H200 = hardware.load("h200")


def stages() -> dict[str, Any]:
    gemm = [
        {"name": "gemm M8192xN8192xK8192", "us": 1500.0, "over_torch": 0.9, "kernel": "wgmma_128x256x64_4"},
        {"name": "gemm M512xN768xK768", "us": 6.0, "over_torch": 0.4, "kernel": "mma_64x64x32"},
        {"name": "gemm M4xN768xK768", "us": 4.0, "over_torch": 1.2},
        {"name": "gemm M5xN7xK9", "ok": False, "message": "DeviceLostError: gone\nmore", "blocking": "launch 3\n"},
    ]
    calibration = [
        {"name": "time between kernels", "measured": 900.0, "constant": "launch_ns"},
        {"name": "rate of mma.sync", "measured": 0.5 * H200.peak_tflops["f16"], "constant": "mma_share", "of": "mma"},
        {"name": "bandwidth of memory", "measured": 4300.0, "constant": "memory_gb_per_s"},
    ]
    selector = {"name": "gemm M512xN768xK768", "loss": 1.25, "versions": {"mma_64x64x32_4": 5.0, "gemv_8": 4.0},
                "estimates": {"mma_64x64x32_4": 2.5, "gemv_8": 4.0}}  # fmt: skip
    return {
        "calibration": {"results": calibration, "device": "NVIDIA H200"}, "gemm": {"results": gemm},
        "selector": {"results": [selector]}, "real": {"results": [], "failed": "out of time"},
    }  # fmt: skip


def test_what_is_farthest_from_its_goal_comes_first() -> None:
    lines = list(after.order(stages()))
    heads = [x.split()[0] for x in lines if not x.startswith(" ")]
    assert heads == ["products", "selector", "large", "few"]
    assert "MISSED" in lines[0] and "1 below 0.5" in lines[0] and "mma_64x64x32" in lines[1]
    assert "met" in next(x for x in lines if x.startswith("large"))


def test_failures_name_the_launch() -> None:
    assert list(after.failures(stages())) == [
        "gemm: gemm M5xN7xK9: DeviceLostError: gone; launch by launch: launch 3",
        "real: out of time",
    ]


def test_constants_stand_beside_what_was_measured() -> None:
    found = {n: (a, b) for n, _, a, b in after.calibrated(stages(), H200)}
    assert found["launch_ns"][1] == 900 and found["memory_gb_per_s"] == (H200.memory_gb_per_s, 4300)
    assert found["mma_share"][1] == pytest.approx(0.5)
    assert next(after.biases(stages())) == ("mma_64x64x32", 2.0, 1)


def test_what_was_measured_becomes_a_description(tmp_path: Path) -> None:
    after.describe(tmp_path / "new.json", {"stages": stages(), "device": "NVIDIA H200", "date": "today"}, H200)
    made = hardware.load(tmp_path / "new.json")
    assert made == replace(H200, costs=replace(H200.costs, launch_ns=900.0, mma_share=0.5), sources=made.sources)
    assert "launch_ns, mma_share" in made.sources["measured costs"]
    left = " ".join(after.unmeasured(stages(), H200))
    assert "latency_ns" in left and "launch_ns" not in left


def test_every_cost_is_measured() -> None:
    """Costs that calibration cannot measure would stay assumed; ``calibration.MEASURABLE_COSTS`` lists the others."""
    assert {*calibration.MEASURABLE_COSTS} == {f.name for f in fields(hardware.Costs)}


def test_reports_of_several_calls_are_one(tmp_path: Path) -> None:
    both = stages()
    for k, names in enumerate((("calibration", "gemm"), ("selector", "real"))):
        (tmp_path / str(k)).mkdir()
        report = {"date": str(k), "stages": {n: both[n] for n in names}}
        (tmp_path / str(k) / "report.json").write_text(json.dumps(report))
    whole = after.read([tmp_path / "0", tmp_path / "1"])
    assert list(whole["stages"]) == ["calibration", "gemm", "selector", "real"] and whole["device"] == "NVIDIA H200"
    with pytest.raises(ValueError, match="none"):
        after.read([tmp_path / "1"])


@pytest.mark.slow
def test_constants_are_found_again() -> None:
    """The model itself gives the times with another constant: fitting must return to it."""
    case = next(c for c in timed(True) if c.name == "gemm")
    shapes = [{"M": m, "N": 768, "K": 768} for m in (1, 16, 128, 512, 4096)]
    guess = fit.Fit([fit.Choice("gemm", s, {}) for s in shapes], [case], H200)
    values = fit.supposed(H200)
    (launch,) = fit.estimated(
        guess.plans["gemm"], fit.supposing(values | {"latency_ns": 2 * values["latency_ns"]}, H200)
    ).launches
    env = [{**s, fit.THREADS: H200.multiprocessors} for s in shapes]
    known = list(fit.estimates(launch).items())[:8]
    times = [{n: t.evaluate(e) / 1000 for n, t in known} for e in env]
    found = fit.Fit([fit.Choice("gemm", s, t) for s, t in zip(shapes, times, strict=True)], [case], H200)
    fitted, least, first = found.best()
    assert first > 0.02 and least < first / 4
    assert fitted["latency_ns"] == pytest.approx(2 * values["latency_ns"], rel=0.2)

"""Runs NVIDIA's tools on our kernels, if installed: compute-sanitizer for errors, ncu for counters."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.processes import Job
from benchmarks.gpu.stage import Result, Stage, data, text

CHECKS = ("memcheck", "racecheck", "synccheck")
PROFILE_CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("gemm", {"M": 8192, "N": 8192, "K": 8192}), ("layer_gelu_768x3072", {"M": 4096}),
    ("layer_residual_3072x768", {"M": 4096}), ("layer_plain_4096x4096", {"M": 1}),
    ("layer_bias_768x768", {"M": 128}), ("attention_none_12x64", {"B": 8, "L": 512}),
    ("attention_keys_12x64", {"B": 8, "L": 512}), ("layernorm_float16", {"M": 4096, "N": 768}),
)  # fmt: skip
"""Eight kernels and their shapes."""
METRICS = {
    "gpu__time_duration.sum": "us", "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_%",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_%",
    "lts__t_bytes.sum": "L2_bytes", "dram__bytes.sum": "memory_bytes",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_%",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_%",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_%",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "bank_conflicts",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stalled_on_memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "stalled_on_barriers",
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": "stalled_on_arithmetic",
}  # fmt: skip
PATIENCE = 40.0
"""Maximum seconds of a tool's run."""


def sanitizer(stage: Stage) -> Iterator[Job]:
    """Run the primitives, then a case of each family, under each check."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return
    families = {c["kind"] + c["name"].split("_")[0]: c for c in reversed(stage.cases_of("kernels")) if c["checked"]}
    for check in CHECKS:
        yield f"conformance under {check}", partial(watched, stage, tool, check, conformance(stage))
    for check in CHECKS:
        for case in families.values():
            run = itself(stage, "kernels", case["name"])
            yield f"{case['name']} under {check}", partial(watched, stage, tool, check, run)


def conformance(stage: Stage) -> list[str]:
    """Return the command of the primitives' process."""
    return [sys.executable, "-m", "benchmarks.gpu.conformance", "--worker", "--pack", str(stage.folder)]


def itself(stage: Stage, kind: str, name: str) -> list[str]:
    """Return the command of a stage with one case."""
    return [sys.executable, "-m", "benchmarks.gpu.stages", kind, "--pack", str(stage.folder), "--only", name]


def watched(stage: Stage, tool: str, check: str, command: list[str]) -> Result:
    """Run a process under compute-sanitizer; return the number of errors, and the text of the first."""
    done = ran([tool, "--tool", check, "--print-limit", "5", *command])
    found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", done)
    errors = sum(int(a or b) for a, b in found)
    said = [x for x in done.splitlines() if x.startswith("=========")]
    if not found:
        return {"ok": False, "message": f"it did not end: {' '.join(said[-3:]) or done[-300:]}"}
    return {"ok": errors == 0, "errors": errors} | ({"message": " ".join(said[1:6])} if errors else {})


def ran(command: list[str]) -> str:
    """Return the output of a command, until PATIENCE."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout + done.stderr
    except subprocess.TimeoutExpired as e:
        return "".join(x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (e.stdout, e.stderr))


# ---- counters ------------------------------------------------------------------------------------------------------
def profiler(stage: Stage) -> Iterator[Job]:
    """Read the hardware counters of eight kernels."""
    tool = shutil.which("ncu")
    names = {c["name"] for c in stage.cases}
    for name, shape in PROFILE_CASES if tool else ():
        if name in names:
            yield f"{name} {text(shape)}", partial(counted, stage, str(tool), name, shape)


def counted(stage: Stage, tool: str, name: str, shape: dict[str, int]) -> Result:
    """Read the counters of the last launch of a case."""
    environment = ["--metrics", ",".join(METRICS), "--csv", "--clock-control", "none", "--target-processes", "all"]
    sizes = [f"{k}={v}" for k, v in shape.items()]
    run = [*itself(stage, "once", name)]
    os.environ[SHAPE] = " ".join(sizes)
    rows = list(csv.DictReader(x for x in ran([tool, *environment, *run]).splitlines() if x.startswith('"')))
    if not rows:
        return {"ok": False, "message": "ncu gave no counters"}
    last = rows[-1]["ID"]
    values = {
        METRICS.get(r["Metric Name"], r["Metric Name"]): _number(r["Metric Value"]) for r in rows if r["ID"] == last
    }
    return {"kernel": rows[-1]["Kernel Name"]} | values


def _number(value: str) -> Any:
    try:
        return float(value.replace(",", ""))
    except ValueError:
        return value


SHAPE = "POLYDYN_SHAPE"
"""The shape at which the stage ``once`` runs its case, as ``M=8 N=8``."""


def once(stage: Stage) -> Iterator[Job]:
    """Run one case at one shape, twice, for ncu."""
    shape = {k: int(v) for k, _, v in (x.partition("=") for x in os.environ[SHAPE].split())}

    def run() -> Result:
        program = stage.program(stage.cases[0])
        given = data(stage, program, shape)
        for _ in range(2):
            program.run(given)
        return {}

    yield "once", run

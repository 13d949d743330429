"""One script for a day when a GPU is at hand: is everything right there, and how fast is it?

    python -m benchmarks.gpu.run_all [--pack PACK] [--out FILE] [--driver ctypes|pycuda] [--stages ...] [--only ...]

At most eight minutes. Needs this repository, numpy, the CUDA driver, and what ``benchmarks.gpu.pack`` made, a folder
or a tarball (without ``--pack`` it is made here first, which needs the compiler's requirements). With a pack for the
device's architecture nothing is compiled there. torch is compared with where it is. Stages run one after the other,
each in a process of its own with a time of its own: a case that fails, hangs or breaks the device is reported and the
others go on (``processes``). Prints a table, writes JSON as it goes. ``--emulate``: the CPU libcuda, to test this.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import PATIENCE, SLACK, results

STAGES = {
    "conformance": 100.0, "kernels": 75.0, "models": 60.0, "gemm": 80.0, "stitch": 50.0, "selector": 30.0,
    "overhead": 15.0, "timeline": 15.0,
}  # fmt: skip
"""Stage -> seconds. Every primitive must conform before anything that is built from them means something."""
LIMIT = 8 * 60.0
"""Seconds for all of it: what a stage takes beyond its own time is missing at the end."""
GEOMEANS = {"over_torch": "geomean over torch", "over_inductor": "geomean over inductor", "loss": "geomean loss"}
"""Of a stage's results -> what their geometric mean is called."""


def versions() -> dict[str, str]:
    """What takes part, as installed."""
    found = {"python": platform.python_version()}
    for name in ("polydyn", "numpy", "torch", "triton", "pycuda", "nvidia-cuda-nvrtc"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command(stage: str, options: argparse.Namespace) -> list[str]:
    """The process of a stage."""
    if stage == "conformance":
        script = ["-m", "benchmarks.gpu.conformance", "--worker"]
    else:
        script = ["-m", "benchmarks.gpu.stages", stage, "--only", *options.only]
    emulate = ["--emulate"] if options.emulate else []
    return [sys.executable, *script, "--pack", str(options.pack), "--driver", options.driver, *emulate]


def run_stage(stage: str, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """One stage: its results, its time, why it failed. ``end``: of everything, on the monotonic clock."""
    start = time.monotonic()
    record: dict[str, Any] = {"results": []}
    seconds = min(STAGES[stage], end - start - SLACK)
    patience = 300.0 if options.emulate else PATIENCE  # kernels are compiled when they are launched
    found = results(command(stage, options), seconds, patience)
    for event in found if seconds > 0 else [{"failed": "no time was left"}]:
        if "failed" in event:
            record["failed"] = event["failed"]
        elif "about" in event:
            record |= event["about"]
        else:
            record["results"].append(event)
            print(f"  {'ok  ' if event.get('ok', True) else 'FAIL'} {line(event)}", flush=True)
    for key, name in GEOMEANS.items():
        values = [r[key] for r in record["results"] if r.get(key, 0) > 0]
        if values:
            record[name] = math.exp(sum(map(math.log, values)) / len(values))
    record["seconds"] = round(time.monotonic() - start, 1)
    return record


def line(result: dict[str, Any]) -> str:
    """A result for people."""
    hidden = ("name", "ok", "message")
    words = [
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in result.items()
        if k not in hidden and not isinstance(v, list | dict)
    ]
    message = str(result.get("message", "")).splitlines()[:1]
    return f"{result['name']:44s} {', '.join([*words, *message])}"


def summary(stages: dict[str, dict[str, Any]]) -> str:
    """The table at the end."""
    rows = [f"{'stage':12} {'right':>9} {'seconds':>8}  remarks"]
    for name, stage in stages.items():
        found = stage["results"]
        right = f"{sum(bool(r.get('ok', True)) for r in found)}/{len(found)}"
        remarks = [f"{k} {v:.3g}" for k, v in stage.items() if k.startswith("geomean")]
        remarks += [stage["failed"]] if "failed" in stage else []
        remarks += [f"left out for lack of time: {stage['cut']}"] if stage.get("cut") else []
        wrong = [r["name"] for r in found if not r.get("ok", True)]
        remarks += [f"wrong: {', '.join(wrong[:4])}{' ...' if len(wrong) > 4 else ''}"] if wrong else []
        rows.append(f"{name:12} {right:>9} {stage['seconds']:8.1f}  {'; '.join(remarks)}")
    return "\n".join(rows)


def unpacked(pack: Path, scratch: Path) -> Path:
    """The folder of a pack, which may be a tarball."""
    if pack.is_dir():
        return pack
    with tarfile.open(pack) as tar:
        tar.extractall(scratch, filter="data")
    return scratch / "pack"


def run(options: argparse.Namespace) -> int:
    """0 when every stage ran to its end and everything was right."""
    end = time.monotonic() + LIMIT
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "versions": versions(), "stages": {}}
    report["pack"] = {k: v for k, v in json.loads((options.pack / "cases.json").read_text()).items() if k != "cases"}
    for stage in options.stages:
        print(stage, flush=True)
        report["stages"][stage] = run_stage(stage, options, end)
        options.out.write_text(json.dumps(report, indent=1) + "\n")  # what is known so far, come what may
    print(summary(report["stages"]))
    wrong = [s for s in report["stages"].values() if "failed" in s or not all(r.get("ok", True) for r in s["results"])]
    return min(len(wrong), 1)


def main() -> int:
    """See module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--out", type=Path, default=Path("run_all.json"))
    parser.add_argument("--driver", default="ctypes", choices=["ctypes", "pycuda"])
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args()
    if options.pack is None:
        options.pack = options.out.with_suffix(".pack")
        target = "cuda:emulated" if options.emulate else "cuda"
        made = [sys.executable, "-m", "benchmarks.gpu.pack", str(options.pack), "--target", target]
        subprocess.run([*made, *(["--quick"] if options.emulate else [])], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        options.pack = unpacked(options.pack, Path(scratch))
        return run(options)


if __name__ == "__main__":
    sys.exit(main())

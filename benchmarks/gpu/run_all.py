"""One script for a day with a GPU: checks all results there, and measures times.

    python -m benchmarks.gpu.run_all --pack PACK [--out FOLDER] [--call 1|2|3 | --stages ...] [--only NAME ...]
                                     [--limit SECONDS] [--driver ctypes|pycuda] [--emulate]

Needs this repository, numpy, the CUDA driver, and the output of ``benchmarks.gpu.pack``, a folder or a tarball. With a
pack for the device's architecture nothing is compiled there. If torch is installed, times are compared with it. Stages
run one after the other, each in its own process with its own time limit: a case that fails, hangs or breaks the device
is reported and the others go on (``processes``). There are three calls of less than ten minutes each (``CALLS``):
correctness and times; models and profiles; NVIDIA's checks. If an optional primitive fails, the rest is measured
without kernels that use it (``$POLYDYN_LACKING``); a device that does not respond ends the call.

FOLDER (default: $OUT, else benchmarks/out/gpu) receives ``report.json``, written after every event, and ``log`` with
all printed lines: the table comes last, then the failures once more. ``--emulate``: the CPU libcuda, to test this.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu.processes import PATIENCE, SLACK, results
from polydyn.errors import PolydynError
from polydyn.gpu.lacking import LACKING, failures, keep
from polydyn.gpu.targets import EMULATED, named

STAGES = {
    "conformance": 60.0, "loading": 20.0, "calibration": 20.0, "kernels": 60.0, "models": 40.0, "attention": 40.0,
    "gemm": 90.0, "layers": 70.0, "stitch": 30.0,
    "real": 170.0, "selector": 90.0, "conv": 20.0, "bytes": 10.0, "variants": 60.0, "overhead": 15.0, "timeline": 15.0,
    "profiler": 120.0,
    "sanitizer": 150.0, "pycuda": 60.0,
}  # fmt: skip
"""Maps a stage to its seconds, the most important first. Results only count if every primitive conforms."""
CALLS = {
    1: ("conformance", "loading", "calibration", "kernels", "models", "attention", "gemm", "layers", "stitch"),
    2: ("real", "selector", "conv", "bytes", "variants", "overhead", "timeline", "profiler"),
    3: ("sanitizer", "pycuda"),
}
LENT, STARTING = 30 * 60.0, 2 * 60.0
"""Seconds that the machine is lent in total, and startup seconds per call."""
LIMIT = 9 * 60.0
"""Seconds for all stages; if a stage exceeds its own time, later stages have less."""
SLOWER = 10
"""Factor by which stages may take longer on the emulation."""
GEOMEANS = {
    "over_torch": "geomean over torch", "cold_over_torch": "cold geomean", "over_inductor": "geomean over inductor",
    "loss": "geomean loss",
}  # fmt: skip
"""Maps a value in a stage's results to the name of its geometric mean."""
CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
EMULATION = f"cuda:{EMULATED}"
LOAD_TORCH = "import torch; torch.ones(1, device='cuda')"


def versions() -> dict[str, str]:
    """Return the installed versions of all participants."""
    found = {"python": platform.python_version()}
    for name in ("polydyn", "numpy", "torch", "triton", "pycuda", "nvidia-cuda-nvrtc"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def clocks() -> str:
    """Return clocks, temperature and power of the device from nvidia-smi, or an empty string without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()
    except subprocess.TimeoutExpired:
        return ""


@contextmanager
def warming(options: argparse.Namespace) -> Iterator[None]:
    """Read torch from the disk inside the block, which takes a minute the first time."""
    if options.emulate:
        yield
        return
    reader = subprocess.Popen([sys.executable, "-c", LOAD_TORCH], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        reader.kill()
        reader.wait()


class Report:
    """The results so far, on disk after every event; and all printed lines, also in a file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.log = folder / "report.json", folder / "log"
        self.content: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "versions": versions()}
        self.content["stages"] = {}
        self._file: TextIO = self.log.open("w")

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)
        print(line, file=self._file, flush=True)

    def write(self) -> None:
        """Replace the file atomically: a partial file would be lost with the machine."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.replace(self.path)

    def close(self) -> None:
        """Close the log."""
        self._file.close()


def command(stage: str, options: argparse.Namespace) -> list[str]:
    """Return the command of a stage's process."""
    if stage == "conformance":
        script = ["-m", "benchmarks.gpu.conformance", "--worker"]
    else:
        script = ["-m", "benchmarks.gpu.stages", stage, "--only", *options.only]
    emulate = ["--emulate"] if options.emulate else []
    return [sys.executable, *script, "--pack", str(options.pack), "--driver", options.driver, *emulate]


def run_stage(stage: str, options: argparse.Namespace, end: float, report: Report) -> dict[str, Any]:
    """Run one stage; return its results, its time, the reason of a failure.

    ``end``: end of all stages (monotonic clock).
    """
    start = time.monotonic()
    record: dict[str, Any] = {"results": [], "clocks": [clocks()]}
    report.content["stages"][stage] = record
    seconds = min(STAGES[stage] * (SLOWER if options.emulate else 1), end - start - SLACK)
    found = results(command(stage, options), seconds, options.patience)
    for event in found if seconds > 0 else [{"failed": "no time was left"}]:
        if "failed" in event:
            record["failed"] = event["failed"]
        elif "about" in event:
            record.update(event["about"])
        else:
            record["results"].append(event)
            report.say(f"  {'ok  ' if event.get('ok', True) else 'FAIL'} {line(event)}")
        report.write()
    for key, name in GEOMEANS.items():
        values = [r[key] for r in record["results"] if r.get(key, 0) > 0]
        if values:
            record[name] = math.exp(sum(map(math.log, values)) / len(values))
    record["seconds"] = round(time.monotonic() - start, 1)
    record["clocks"].append(clocks())
    report.write()
    return record


def line(result: dict[str, Any]) -> str:
    """Format a result."""
    hidden = ("name", "ok", "message", "blocking")
    words = [
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in result.items()
        if k not in hidden and not isinstance(v, list | dict)
    ]
    said = [str(result[k]).splitlines()[0] for k in ("message", "blocking") if result.get(k)]
    return f"{result['name']:44s} {', '.join([*words, *said])}"


def wrong(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results that are not right."""
    return [r for r in stage["results"] if not r.get("ok", True)]


def summary(stages: dict[str, dict[str, Any]]) -> str:
    """Return the table at the end, then the failures."""
    rows = [f"{'stage':12} {'right':>9} {'seconds':>8}  remarks"]
    for name, stage in stages.items():
        found, bad = stage["results"], [r["name"] for r in wrong(stage)]
        remarks = [f"{k} {v:.3g}" for k, v in stage.items() if "geomean" in k]
        remarks += [stage["failed"]] if "failed" in stage else []
        remarks += [f"left out for lack of time: {stage['cut']}"] if stage.get("cut") else []
        remarks += [f"wrong: {', '.join(bad[:4])}{' ...' if len(bad) > 4 else ''}"] if bad else []
        right = f"{len(found) - len(bad)}/{len(found)}"
        rows.append(f"{name:12} {right:>9} {stage['seconds']:8.1f}  {'; '.join(remarks)}")
    rows += [f"FAIL {name}: {line(r)}" for name, stage in stages.items() for r in wrong(stage)]
    return "\n".join(rows)


def unpacked(pack: Path, scratch: Path) -> Path:
    """Return the folder of a pack, which may be a tarball."""
    if pack.is_dir():
        return pack
    with tarfile.open(pack) as tar:
        tar.extractall(scratch, filter="data")
    return scratch / "pack"


def run(options: argparse.Namespace) -> int:
    """Run the stages; return 0 if every stage ran to its end and everything was right."""
    end, report = time.monotonic() + options.limit, Report(options.out)
    about = {k: v for k, v in json.loads((options.pack / "cases.json").read_text()).items() if k != "cases"}
    report.content["pack"] = about
    for left in about.get("left_out", ()):
        report.say(f"not in the pack: {left['name']}: {left['failed'].splitlines()[0]}")
    stages = report.content["stages"]
    with warming(options):
        for stage in options.stages:
            report.say(stage)
            record = run_stage(stage, options, end, report)
            if stage == "conformance":
                without_broken(record, options.emulate, report)
            if "arch" in record and about.get("target") not in (f"cuda:{named(record['arch'])}", EMULATION):
                report.say(f"the pack is for {about.get('target')}: kernels for sm_{record['arch']} are compiled there")
            if not record["results"] and "silent" in record.get("failed", ""):
                report.content["stopped"] = f"the device does not answer: what follows {stage} is left out"
                report.say(report.content["stopped"])
                break
    report.write()
    report.say(summary(stages))
    report.close()
    return min(sum("failed" in s or bool(wrong(s)) for s in stages.values()), 1)


def without_broken(conformance: dict[str, Any], emulate: bool, report: Report) -> None:
    """Exclude later kernels that use a feature with a failed primitive; on a device the failure is stored."""
    results = {r["name"]: r.get("ok", True) for r in conformance["results"]}
    failed = {feature: cases for feature, cases in failures(results).items() if cases}
    for feature, cases in failed.items():
        report.say(f"kernels that use {feature} are left out from here on: {', '.join(cases)} failed")
    if failed:
        report.content["lacking"] = failed
        os.environ[LACKING] = ",".join(failed)
    if "device" in conformance and not emulate:
        try:
            keep(conformance["device"], results)
        except PolydynError as e:
            report.say(f"what conforms is not kept: {e}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "benchmarks/out/gpu"))
    parser.add_argument("--driver", default="ctypes", choices=["ctypes", "pycuda"])
    parser.add_argument("--stages", nargs="*", choices=list(STAGES))
    parser.add_argument("--call", type=int, choices=list(CALLS), help="run the stages of one of three calls")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all stages")
    parser.add_argument("--patience", type=float, help="seconds without output after which a case counts as hanging")
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args()
    options.stages = options.stages or CALLS.get(options.call) or list(STAGES)
    options.patience = options.patience or (300.0 if options.emulate else PATIENCE)  # the emulation compiles kernels
    with tempfile.TemporaryDirectory() as scratch:
        options.pack = unpacked(options.pack, Path(scratch))
        return run(options)


if __name__ == "__main__":
    sys.exit(main())

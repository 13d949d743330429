"""One script for a day when a GPU is at hand: is everything right there, and how fast is it?

    python -m benchmarks.gpu.run_all [--pack FOLDER] [--out FILE] [--driver ctypes|pycuda] [--stages ...] [--only ...]

At most eight minutes. Needs this repository, numpy, the CUDA driver, and a folder made by ``benchmarks.gpu.pack``
(without ``--pack`` it is made here first, which needs the compiler's requirements). torch is compared with where it is.
Stages run one after the other, each in a process of its own with a time of its own: one that fails, hangs or breaks
the device is reported and the others go on. Prints a table, writes JSON. ``--emulate``: the CPU libcuda, to test this.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

STAGES = {
    "conformance": 110.0, "kernels": 80.0, "models": 70.0, "gemm": 90.0, "stitch": 50.0, "selector": 30.0,
    "overhead": 15.0, "timeline": 15.0,
}  # fmt: skip
"""Stage -> seconds. Every primitive must conform before anything that is built from them means something."""
SLACK = 20.0
"""Seconds a process may take to start and to end beyond its stage's time."""


def versions() -> dict[str, str]:
    """What takes part, as installed."""
    found = {"python": platform.python_version()}
    for name in ("polydyn", "numpy", "torch", "triton", "pycuda", "nvidia-cuda-nvrtc"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def events(command: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Lines of JSON that a process prints; ends with {"failed": why} when it does not end well or in time."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end = time.monotonic() + seconds + SLACK
    try:
        while True:
            line = lines.get(timeout=max(0.1, end - time.monotonic()))
            if line is None:
                if process.wait():
                    yield {"failed": f"the process ended with {process.returncode}, see above"}
                return
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", flush=True)
    except queue.Empty:
        yield {"failed": f"it took more than {seconds + SLACK:.0f} s and was stopped"}
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def conformance(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The other script, as a stage."""
    out = options.out.with_suffix(".conformance.json")
    command = [sys.executable, "-m", "benchmarks.gpu.conformance", "--driver", options.driver, "--out", str(out)]
    for event in events([*command, *(["--emulate"] if options.emulate else [])], STAGES["conformance"]):
        if "failed" in event and not out.exists():
            yield event
    if out.exists():
        report = json.loads(out.read_text())
        wrong = [r["name"] for r in report["results"] if not r["ok"]]
        count = f"{len(report['results']) - len(wrong)} of {len(report['results'])} conform"
        yield {"name": count, "ok": not wrong, "wrong": wrong, "device": report.get("device")}


def run_stage(stage: str, options: argparse.Namespace) -> dict[str, Any]:
    """One stage in a process of its own: its results, its time, why it failed."""
    start = time.monotonic()
    record: dict[str, Any] = {"results": []}
    if stage == "conformance":
        found = conformance(options)
    else:
        command = [sys.executable, "-m", "benchmarks.gpu.stages", stage, "--pack", str(options.pack)]
        command += ["--driver", options.driver, "--seconds", str(STAGES[stage]), "--only", *options.only]
        found = events([*command, *(["--emulate"] if options.emulate else [])], STAGES[stage])
    for event in found:
        if "failed" in event:
            record["failed"] = event["failed"]
        elif "about" in event:
            record |= event["about"]
        else:
            record["results"].append(event)
            print(f"  {'ok  ' if event.get('ok', True) else 'FAIL'} {line(event)}", flush=True)
    record["seconds"] = round(time.monotonic() - start, 1)
    return record


def line(result: dict[str, Any]) -> str:
    """A result for people."""
    hidden = ("name", "ok", "message", "wrong")
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
        results = stage["results"]
        right = f"{sum(bool(r.get('ok', True)) for r in results)}/{len(results)}"
        remarks = [f"{k} {v:.3g}" for k, v in stage.items() if k.startswith("geomean")]
        remarks += [stage["failed"]] if "failed" in stage else []
        remarks += [f"left out for lack of time: {stage['cut']}"] if stage.get("cut") else []
        rows.append(f"{name:12} {right:>9} {stage['seconds']:8.1f}  {'; '.join(remarks)}")
    return "\n".join(rows)


def main() -> int:
    """0 when every stage ran to its end and everything was right."""
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
        command = [sys.executable, "-m", "benchmarks.gpu.pack", str(options.pack), "--target", target]
        subprocess.run([*command, *(["--quick"] if options.emulate else [])], check=True)
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "versions": versions(), "stages": {}}
    report["pack"] = {k: v for k, v in json.loads((options.pack / "cases.json").read_text()).items() if k != "cases"}
    for stage in options.stages:
        print(stage, flush=True)
        report["stages"][stage] = run_stage(stage, options)
        options.out.write_text(json.dumps(report, indent=1) + "\n")  # what is known so far, come what may
    print(summary(report["stages"]))
    wrong = [s for s in report["stages"].values() if "failed" in s or not all(r.get("ok", True) for r in s["results"])]
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())

"""Rehearses the first day without a GPU: a Python with only numpy, the CPU libcuda, and planted faults.

    python -m benchmarks.gpu.rehearsal [OUT] [--python PYTHON] [--pycuda] [--stages ...]

Packs few cases for the emulation and plants faults: a kernel that never ends, one that ends its process, one that
computes nothing and one with a forbidden write. Then it makes an environment of PYTHON with numpy and nothing else (so
torch is missing) and runs ``run_all`` there. The rehearsal passes if the report is complete, names exactly the planted
cases with their faults, and everything else is right. ``--pycuda``: its wheel is built, packed, and a model runs
through it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.run_all import STAGES
from polydyn.runtime.artifact import read_artifact, write_artifact

ROOT = Path(__file__).parents[2]
CASES = (
    "gemm", "softmax_float32", "column_sum_float32", "layernorm", "broadcast", "gather", "gemm_float16", "add",
    "layer_gelu_72x64", "attention_causal_2x64", "bytes_64x32", "float8_64x32", "bert_tiny", "bert_tiny_float16",
)  # fmt: skip
PATIENCE, LIMIT = 60, 1500


@dataclass(frozen=True)
class Fault:
    """Text at the beginning of a case's kernels, and the message that the report must contain, also of a second run."""

    case: str
    text: str
    message: str
    blocking: str = ""


FAULTS = (
    Fault("kernels-column_sum_float32", "volatile int forever = 1; while (forever) {}", "silent for"),
    Fault("kernels-gather", "__builtin_trap();", "the process ended with", "the process ended with"),
    Fault("kernels-layernorm", "return;", "error inf"),
    Fault("kernels-broadcast", "pd_stg((float *)8, 0.f);", "DeviceLostError", "cuLaunchKernel"),
)


def plant(folder: Path, fault: Fault) -> None:
    """Change the kernels of a packed case; the emulation compiles them from their sources."""
    path = folder / f"{fault.case}.polydyn"
    artifact = read_artifact(path)
    sources = dict(artifact.sources)
    for k in artifact.manifest["kernels"]:
        head, mark, rest = sources[f"{k['name']}.cu"].partition("PD_KERNEL")
        before, brace, body = rest.partition(") {")
        assert mark and brace, f"{k['name']} does not begin as kernels do"
        sources[f"{k['name']}.cu"] = f"{head}{mark}{before}{brace}\n  {fault.text}{body}"
    path.unlink()
    write_artifact(replace(artifact, sources=sources), path)


def environment(python: str, folder: Path) -> Path:
    """Return the interpreter of an environment with only numpy."""
    found = folder / "bin" / "python"
    if not found.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(found), "-m", "pip", "install", "-q", "numpy"], check=True)
    return found


def packed(options: argparse.Namespace) -> Path:
    """Return the folder of a pack for the emulation, with planted faults."""
    folder: Path = options.out / "pack"
    shutil.rmtree(folder, ignore_errors=True)
    models = [str(ROOT / "tests/data/bert_tiny.onnx")]
    command = [sys.executable, "-m", "benchmarks.gpu.pack", str(folder), "--target", "cuda:emulated", "--quick"]
    command += ["--models", *models, "--only", *CASES]
    subprocess.run([*command, *(["--pycuda", options.python] if options.pycuda else [])], check=True, cwd=ROOT)
    for fault in FAULTS:
        plant(folder, fault)
    return folder


def shortcomings(report: dict[str, Any], stages: list[str], pycuda: bool) -> list[str]:
    """Return what a rehearsal's report lacks, or reports in addition to the planted faults."""
    out = [f"the stage {s} is missing" for s in stages if s not in report["stages"]]
    found = {(s, r["name"]): r for s, stage in report["stages"].items() for r in stage["results"]}
    bad = {key: r for key, r in found.items() if not r.get("ok", True)}
    out += [f"{s} failed: {stage['failed']}" for s, stage in report["stages"].items() if "failed" in stage]
    for fault in FAULTS if "kernels" in stages else ():
        name = fault.case.partition("-")[2]
        mine = {key: r for key, r in bad.items() if key[0] == "kernels" and key[1].split()[0] == name}
        right = [r for r in mine.values() if fault.message in r["message"] and fault.blocking in r.get("blocking", "")]
        if not right:
            said = list(mine.values()) or "nothing"
            out.append(f"{name} should say '{fault.message}' and '{fault.blocking}', and says {said}")
        bad = {key: r for key, r in bad.items() if key not in mine}
    out += [f"{s}: {name} is wrong: {r.get('message', r)}" for (s, name), r in bad.items()]
    expected = [s for s in stages if s not in ("conv", "real", "profiler", "sanitizer") and (pycuda or s != "pycuda")]
    out += [f"{s} has no results" for s in expected if not report["stages"].get(s, {}).get("results")]
    out += ["torch should be missing"] if any("torch_us" in r for r in found.values()) else []
    return out


def main() -> int:
    """Print the report and its faults; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "benchmarks/out/rehearsal")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--pycuda", action="store_true")
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    python, folder = environment(options.python, options.out / "venv"), packed(options)
    made = time.monotonic() - start
    command = [str(python), "-m", "benchmarks.gpu.run_all", "--pack", str(folder), "--out", str(options.out / "report")]
    command += ["--emulate", "--patience", str(PATIENCE), "--limit", str(LIMIT), "--stages", *options.stages]
    paths = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=paths)
    report = json.loads((options.out / "report/report.json").read_text())
    lacking = shortcomings(report, options.stages, options.pycuda)
    lacking += [] if done.returncode == 1 else [f"run_all ended with {done.returncode}, 1 stands for wrong results"]
    print(*lacking, sep="\n")
    which = f"Python {report['versions']['python']} with numpy {report['versions'].get('numpy')}"
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20
    print(f"the rehearsal {'failed' if lacking else 'passed'}: {which}; packed in {made:.0f} s, {size:.1f} MiB")
    return min(len(lacking), 1)


if __name__ == "__main__":
    raise SystemExit(main())

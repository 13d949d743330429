"""Measures the CPU of a GPU machine: BERT-base, ResNet-50 and products, compared with ONNX Runtime and torch.

    python -m benchmarks.gpu.cpu --pack PACK [--out FOLDER] [--threads 1 2 4 8 16] [--limit SECONDS]

A second run, if time remains. It uses the benchmarks of every CPU (``cpu_all``, ``gemm``) with few shapes, and exports
models on the spot. The machine needs a C compiler, torch, transformers, onnx, numpy, click and rich; islpy comes from
any pack, ONNX Runtime from a pack of ``pack --cpu``. FOLDER receives the results and a ``cpu.log`` as they grow. Each
step has its own time limit, and a failure affects only its own step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from benchmarks.gpu.run_all import unpacked

ROOT = Path(__file__).parents[2]
WHEELS = ("islpy", "onnxruntime", "click", "rich", "markdown-it-py", "mdurl", "pygments", "psutil", "flatbuffers")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MODELS = {"bert_base": ("B=1,L=128", "B=8,L=128"), "resnet50": ("N=1,H=224,W=224", "N=8,H=224,W=224")}
LIMIT = 300.0


def download(folder: Path, version: str) -> None:
    """Download the wheels for a Python version ("3.12"), through pip. CalledProcessError: one is not available."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", version, "--implementation", "cp"]
    subprocess.run([*command, *(x for p in PLATFORMS for x in ("--platform", p)), *WHEELS], check=True)


def steps(python: str, models: Path, threads: list[str]) -> list[tuple[str, list[str], float]]:
    """Return (name, command, share of the time) of each step, the most important first."""
    out = [("export", [python, "-m", "benchmarks.models.export", str(models), *MODELS], 0.3)]
    effort = ["--threads", *threads, "--rounds", "5", "--seconds", "2"]
    for name, shapes in MODELS.items():
        path = str(models / f"{name}.onnx")
        out.append((name, [python, "-m", "benchmarks.cpu_all", path, "--shapes", *shapes, *effort], 0.5))
    out.append(("gemm", [python, "-m", "benchmarks.gemm", "--quick", *effort], 1.0))
    return out


def main() -> int:
    """Run the steps; return the number of failed steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "benchmarks/out/gpu"))
    parser.add_argument("--threads", nargs="+", default=["1", "2", "4", "8", "16"])
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.limit, 0
    with tempfile.TemporaryDirectory() as scratch, (options.out / "cpu.log").open("w") as log:
        site, models = Path(scratch) / "site", Path(scratch) / "models"
        wheels = sorted(map(str, (unpacked(options.pack, Path(scratch)) / "wheels").glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site), *wheels]
        paths = os.pathsep.join(filter(None, [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        first = [("wheels", pip, 0.2)] if wheels else []
        for name, command, share in [*first, *steps(sys.executable, models, options.threads)]:
            start, seconds = time.monotonic(), max(5.0, (end - time.monotonic()) * share)
            code = run(command, seconds, environment, log)
            failed += code != 0
            print(
                f"{name:10} {time.monotonic() - start:6.1f} s{'' if code == 0 else f'  ended with {code}'}", flush=True
            )
            for path in (ROOT / "benchmarks/out/results").glob("*.json"):
                shutil.copy(path, options.out / f"cpu_{path.name}")
    return failed


def run(command: list[str], seconds: float, environment: Mapping[str, str], log: TextIO) -> int:
    """Return the exit status of a command; 124 if it and its children were stopped after ``seconds``."""
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124


if __name__ == "__main__":
    raise SystemExit(main())

"""The CPU of a machine with a GPU and many cores: BERT-base, ResNet-50 and products beside ONNX Runtime and torch.

    python -m benchmarks.gpu.cpu --pack PACK [--out FOLDER] [--threads 1 2 4 8 16] [--limit SECONDS]

A second run, when time is left. The benchmarks are those of every CPU (``cpu_all``, ``gemm``), with few shapes; models
are exported on the spot. Needs there: a C compiler, torch, transformers, onnx, numpy, click and rich; islpy comes from
any pack, ONNX Runtime too from one of ``pack --cpu``. FOLDER gets the results and a ``cpu.log`` as they grow; each step
has a time of its own, and one that fails costs itself.
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
    """The wheels for a Python version ("3.12"), through pip. CalledProcessError: one is not to be had."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", version, "--implementation", "cp"]
    subprocess.run([*command, *(x for p in PLATFORMS for x in ("--platform", p)), *WHEELS], check=True)


def steps(python: str, models: Path, threads: list[str]) -> list[tuple[str, list[str], float]]:
    """(name, command, share of the time) of everything, what matters most first."""
    out = [("export", [python, "-m", "benchmarks.models.export", str(models), *MODELS], 0.3)]
    effort = ["--threads", *threads, "--rounds", "5", "--seconds", "2"]
    for name, shapes in MODELS.items():
        path = str(models / f"{name}.onnx")
        out.append((name, [python, "-m", "benchmarks.cpu_all", path, "--shapes", *shapes, *effort], 0.5))
    out.append(("gemm", [python, "-m", "benchmarks.gemm", "--quick", *effort], 1.0))
    return out


def main() -> int:
    """Runs the steps; the number of those that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "benchmarks/out/gpu"))
    parser.add_argument("--threads", nargs="+", default=["1", "2", "4", "8", "16"])
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all of it")
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
    """Its exit status; 124 when it was stopped after ``seconds``, with everything it had started."""
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124


if __name__ == "__main__":
    raise SystemExit(main())

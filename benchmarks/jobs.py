"""Robustness of batches against kills, and the cost of a job: ``python -m benchmarks.jobs``.

``kills``: 60 jobs on two workers; a working worker is killed every few seconds and the whole batch twice. A batch that
gives up, because it found no workers for a minute, is started again. At the end all jobs must be done, none twice in
the ledger, and every artifact must be byte-equal to the serial run's artifact. The jobs are small stored models x
targets x passes (``--models`` selects some of the five models, 12 jobs each); with ``--tune`` they are five products x
targets x strategies, each tuned into records that the jobs of a model share. ``--separate`` starts its own scheduler
and workers, kills these workers, and sends files by content; ``--scheduler`` uses a running one and kills only the
batch.

``overhead``: 10 000 jobs (``--jobs``) whose compilation is a stub, on one scheduler: milliseconds per job.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from polydyn.cli.machine import DIFFERENT
from polydyn.jobs import Batch, read_jobs
from polydyn.jobs.ledger import Ledger, folder_of
from polydyn.program_cache import cached_program

DATA = Path(__file__).parent.parent / "tests" / "data"
MODELS = ("alexnet_tiny", "squeezenet_tiny", "resnet_tiny", "t5_tiny", "bert_tiny")
WIDTHS = (16, 24, 40, 56, 72)
"""Widths of the products that are tuned."""
PASSES = """
defaults: {{retries: 60, model: [{models}]}}
jobs:
  - output: "out/{{name}}-{{target}}-{{without}}.polydyn"
    matrix: {{target: [cpu:avx2, cpu:avx512], without: [stitch, merge, attention, prologue, columns, horizontal]}}
"""
TUNING_JOBS = """
defaults: {{retries: 60, model: [{models}]}}
jobs:
  - output: "out/{{name}}-{{target}}-{{strategy}}.polydyn"
    records: "records/{{name}}.db"
    tune: {{trials: 1}}
    matrix:
      target: [cpu:avx2, cpu:avx512]
      strategy: [tscompiler, vortex, dietcode, ftuner, bladedisc, polydyn]
"""


def write_jobs(folder: Path, models: Sequence[str], tune: bool) -> Path:
    """Write the job file of ``kills``, and the products that it tunes."""
    paths = [DATA / f"{m}.onnx" for m in models]
    if tune:
        paths = [folder / f"product{n}.onnx" for n in WIDTHS]
        for path, n in zip(paths, WIDTHS, strict=True):
            w = numpy_helper.from_array(np.random.default_rng(n).standard_normal((32, n)).astype(np.float32), "w")
            x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", 32])
            y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", n])
            graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], path.stem, [x], [y], [w])
            onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    jobs = folder / "jobs.yaml"
    jobs.write_text((TUNING_JOBS if tune else PASSES).format(models=", ".join(f"'{p}'" for p in paths)))
    return jobs


def kills(scheduler: str | None, every: float, jobs: Path) -> int:
    """Run the jobs while processes are killed, and compare with a serial run; return 1 if something is wrong.

    ``scheduler``: an address, or ``separate``.
    """
    folder, count, killed = jobs.parent, len(read_jobs(jobs)), 0
    environment = os.environ | {"POLYDYN_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "polydyn", "batch", str(jobs)]
    with cluster(scheduler, folder, environment) as (address, victims):
        command += ["--scheduler", address] if address else ["-j", "2"]
        ends = [count // 4, count * 2 // 3]
        while True:
            print(f"batch begins, {len(list(folder.glob('out/*')))} artifacts are there", flush=True)
            batch = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            while batch.poll() is None:
                time.sleep(every)
                if ends and len(list(folder.glob("out/*.polydyn"))) >= ends[0]:
                    ends.pop(0)
                    batch.kill()
                    batch.wait()
                elif found := list(victims(batch.pid)):
                    os.kill(random.choice(found), signal.SIGKILL)
                    killed += 1
            if batch.returncode in (0, DIFFERENT):
                return verdict(jobs, killed)


def verdict(path: Path, killed: int) -> int:
    """Compare the ledger and the artifacts with a serial run; return 1 if something is wrong."""
    ledger = Ledger.open(folder_of(path) / "ledger.db")
    attempts = ledger.attempts()
    ledger.close()
    done = [a.job for a in attempts if a.outcome == "done"]
    os.environ["POLYDYN_CACHE"] = str(path.parent / "serial")
    different, jobs = 0, read_jobs(path)
    for job in jobs:
        cached_program(job.model, job.arguments).save(path.parent / "serial.polydyn")
        assert job.output is not None
        there = job.output.exists() and job.output.read_bytes()
        different += there != (path.parent / "serial.polydyn").read_bytes()
    outcomes = {o: sum(a.outcome == o for a in attempts) for o in sorted({a.outcome for a in attempts})}
    steps, twice = sum(1 + bool(j.tune) for j in jobs), len(done) - len(set(done))
    print(f"{len(jobs)} jobs of {steps} steps, {killed} workers killed, the batch twice: {outcomes}, {len(done)} done, "
          f"{twice} twice, {different} artifacts differ from a serial run")  # fmt: skip
    return int(bool(different) or bool(twice) or len(done) != steps)


@contextmanager
def cluster(
    scheduler: str | None, folder: Path, environment: dict[str, str]
) -> Iterator[tuple[str | None, Callable[[int], Iterator[int]]]]:
    """Yield the address of a scheduler, or None for a local cluster per batch, and a function that lists victims.

    The function yields the processes of a batch to kill. ``separate`` starts a scheduler and two workers, as
    docs/jobs.md describes.
    """
    if scheduler != "separate":
        yield scheduler, workers_of if scheduler is None else lambda batch: iter(())
        return
    file, dask = folder / "scheduler.json", [sys.executable, "-m", "dask"]
    silent = subprocess.DEVNULL
    quiet: dict[str, Any] = {"env": environment, "cwd": folder, "stdout": silent, "stderr": silent}
    ends = ["--scheduler-file", str(file), "--no-dashboard"]
    started = [subprocess.Popen([*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", *ends], **quiet)]
    try:
        while not file.exists():
            if started[0].poll() is not None:
                raise RuntimeError("the scheduler has ended")
            time.sleep(0.1)
        limits = ["--nworkers", "2", "--nthreads", "1", "--memory-limit", "0"]
        started.append(subprocess.Popen([*dask, "worker", *limits, *ends], **quiet))
        yield json.loads(file.read_text())["address"], lambda batch: workers_of(started[1].pid)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def workers_of(client: int) -> Iterator[int]:
    """Yield the step processes of the Dask workers below a client."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for pid, parent in parents.items():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if parent == client and b"spawn_main" in text and pid in parents.values():
            yield pid


def stub(request: dict[str, Any]) -> dict[str, Any]:
    """Stand in for compiling."""
    folder = Path(request["folder"])
    folder.mkdir(parents=True)
    (folder / "artifact").write_bytes(b"x")
    return {"outcome": "done", "error": "", "facts": {"seconds": 0.0}, "log": ""}


def overhead(count: int) -> int:
    """Print the cost of a job in addition to its compilation."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "jobs.yaml"
        (Path(name) / "a.onnx").write_bytes(b"")
        rows = "\n".join(f"- {{model: a.onnx, output: out/{k}, dims: {{N: {k + 1}}}}}" for k in range(count))
        path.write_text(f"jobs:\n{rows}\n")
        start = time.perf_counter()
        read_jobs(path)
        reading = time.perf_counter() - start
        result = Batch(path, 2, execute=stub).run()
        first = time.perf_counter() - start - reading
        again = Batch(path, 2, execute=stub)
        start = time.perf_counter()
        skipped = again.run().state.skipped
        second = time.perf_counter() - start
    read, ran, left = (seconds * 1e3 / count for seconds in (reading, first, second))
    print(f"{count} jobs, ms each, starting the workers included: reading {read:.3f}, running {ran:.2f}, "
          f"skipping {left:.2f}; {result.state.done} done, {skipped} skipped")  # fmt: skip
    return int(result.state.done != count or skipped != count)


def main() -> int:
    """Run the command line; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "overhead"))
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--scheduler")
    parser.add_argument("--separate", action="store_const", const="separate", dest="scheduler")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills")
    args = parser.parse_args()
    if args.what == "overhead":
        return overhead(args.jobs)
    with tempfile.TemporaryDirectory() as folder:
        return kills(args.scheduler, args.every, write_jobs(Path(folder), args.models, args.tune))


if __name__ == "__main__":
    sys.exit(main())

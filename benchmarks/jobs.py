"""What batches survive, and what a job costs: ``python -m benchmarks.jobs``.

``kills``: 60 jobs (small stored models x targets x passes; ``--models`` takes some of the five models, 12 jobs each) on
two local workers; a worker is killed every few seconds and the whole batch twice. Then all are done, none twice in the
ledger, and every artifact is that of a serial run, byte by byte. ``--scheduler`` does the same on one that is there,
without killing its workers.

``overhead``: 10 000 jobs (``--jobs``) whose compilation is a stub, on one scheduler: milliseconds for each job.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polydyn.jobs import Batch, read_jobs
from polydyn.jobs.ledger import Ledger, folder_of
from polydyn.program_cache import cached_program

DATA = Path(__file__).parent.parent / "tests" / "data"
MODELS = ("alexnet_tiny", "squeezenet_tiny", "resnet_tiny", "t5_tiny", "bert_tiny")
JOBS = """
defaults: {{retries: 60, model: [{models}]}}
jobs:
  - output: "out/{{name}}-{{target}}-{{without}}.polydyn"
    matrix: {{target: [cpu:avx2, cpu:avx512], without: [stitch, merge, attention, prologue, columns, horizontal]}}
"""


def kills(scheduler: str | None, every: float, models: Sequence[str]) -> int:
    """Runs the jobs under fire, compares with a serial run; 1 when something is wrong."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "jobs.yaml"
        path.write_text(JOBS.format(models=", ".join(f"'{DATA / m}.onnx'" for m in models)))
        count = len(read_jobs(path))
        command = [sys.executable, "-m", "polydyn", "batch", str(path)]
        command += ["--scheduler", scheduler] if scheduler else ["-j", "2"]
        environment = os.environ | {"POLYDYN_CACHE": f"{name}/cache"}
        killed = 0
        for end in (count // 4, count * 2 // 3, None):
            done = len(list(Path(name).glob("out/*.polydyn")))
            print(f"batch begins, {done} artifacts are there", flush=True)
            batch = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            while batch.poll() is None:
                time.sleep(every)
                if end is not None and len(list(Path(name).glob("out/*.polydyn"))) >= end:
                    batch.kill()
                    batch.wait()
                elif not scheduler and (found := list(workers_of(batch.pid))):
                    os.kill(random.choice(found), signal.SIGKILL)
                    killed += 1
        jobs = read_jobs(path)
        ledger = Ledger.open(folder_of(path) / "ledger.db")
        attempts = ledger.attempts()
        ledger.close()
        done_jobs = [a.job for a in attempts if a.outcome == "done"]
        os.environ["POLYDYN_CACHE"] = f"{name}/serial"
        different = 0
        for job in jobs:
            cached_program(job.model, job.arguments).save(Path(name) / "serial.polydyn")
            assert job.output is not None
            there = job.output.exists() and job.output.read_bytes()
            different += there != (Path(name) / "serial.polydyn").read_bytes()
        outcomes = {o: sum(a.outcome == o for a in attempts) for o in sorted({a.outcome for a in attempts})}
        twice = len(done_jobs) - len(set(done_jobs))
        print(f"{len(jobs)} jobs, {killed} workers killed, the batch twice: {outcomes}, {len(done_jobs)} done, "
              f"{twice} twice, {different} artifacts differ from a serial run")  # fmt: skip
        return int(bool(different) or len(done_jobs) != len(jobs) or len(set(done_jobs)) != len(jobs))


def workers_of(client: int) -> Iterator[int]:
    """Processes of Dask's workers below a client: those whose parent is a nanny's child of it."""
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
        if parent == client and b"spawn_main" in text:
            yield pid


def stub(request: dict[str, Any]) -> dict[str, Any]:
    """Stands for compiling."""
    folder = Path(request["folder"])
    folder.mkdir(parents=True)
    (folder / "artifact").write_bytes(b"x")
    return {"outcome": "done", "error": "", "facts": {"seconds": 0.0}, "log": ""}


def overhead(count: int) -> int:
    """Prints what a job costs beside its compilation."""
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
    """1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "overhead"))
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--scheduler")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills")
    args = parser.parse_args()
    return kills(args.scheduler, args.every, args.models) if args.what == "kills" else overhead(args.jobs)


if __name__ == "__main__":
    sys.exit(main())

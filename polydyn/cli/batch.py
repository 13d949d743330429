"""Offline compile jobs from a JSON file: resumable, one failing job does not stop the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polydyn
from polydyn.build.cache import digest, write_atomically
from polydyn.compiler import Options
from polydyn.errors import InputError, PolydynError, ShapeError
from polydyn.fusion.pipeline import check_names
from polydyn.shapes.sizes import Sizes, SizesLike, sizes_by_name

EXAMPLE = 'write [{"model": "a.onnx", "output": "a.polydyn"}]'
KEYS = {"model", "output", "dims", "target", "without"}


@dataclass(frozen=True)
class Job:
    """One compilation: ``model`` to ``output``, with the arguments of ``polydyn.compile``."""

    model: Path
    output: Path
    dims: Mapping[str, Sizes]
    target: str = "cpu"
    without: frozenset[str] = frozenset()

    def key(self) -> str:
        """What determines the artifact: the model's bytes, the arguments, polydyn's version. InputError: unreadable."""
        try:
            content = self.model.read_bytes()
        except OSError as e:
            raise InputError(f"cannot read {self.model}: {e.strerror}", remedy="correct the job's model") from e
        dims = {name: sizes.to_json() for name, sizes in self.dims.items()}
        arguments = json.dumps([dims, sorted(self.without)], sort_keys=True)
        return digest(content, arguments, self.target, polydyn.__version__)


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file, paths relative to it. InputError: no JSON, an unknown or missing key, an output twice."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InputError(f"{path} is no JSON file: {e}", remedy=EXAMPLE) from e
    if not isinstance(rows, list):
        raise InputError(f"{path} holds no list of jobs", remedy=EXAMPLE)
    jobs = [_job(path.parent, row, k) for k, row in enumerate(rows)]
    outputs = [j.output for j in jobs]
    twice = next((o for o in outputs if outputs.count(o) > 1), None)
    if twice:
        raise InputError(f"two jobs of {path} write {twice}", remedy="give each its own output")
    return jobs


def _job(folder: Path, row: Any, position: int) -> Job:
    if not isinstance(row, dict) or not {"model", "output"} <= row.keys() or row.keys() - KEYS:
        raise InputError(f"job {position} is malformed: {row}", remedy=f"its keys are {', '.join(sorted(KEYS))}")
    try:
        dims = sizes_by_name({str(k): _sizes(v) for k, v in row.get("dims", {}).items()})
    except (TypeError, AttributeError, ShapeError) as e:
        remedy = 'write "dims": {"B": [1, 64]} or {"L": {"low": 8, "high": 512, "multiple": 8, "likely": [128]}}'
        raise InputError(f"the dims of job {position} are malformed: {e}", remedy=remedy) from e
    without = check_names(list(map(str, row.get("without", []))))
    return Job(folder / row["model"], folder / row["output"], dims, str(row.get("target", "cpu")), without)


def _sizes(given: Any) -> SizesLike:
    """[low, high] or the fields of ``Sizes``."""
    return Sizes(**given) if isinstance(given, dict) else tuple(given)


def run_batch(path: Path, say: Callable[[str], None]) -> int:
    """Runs the jobs of a file one after the other; the number that failed.

    What is done is remembered beside the file, in ``<name>.done.json`` (path of the output, relative to the
    file -> key), after every job: a job is skipped when its output exists and its key is the same. An interrupted job
    leaves nothing behind.
    """
    jobs = read_jobs(path)
    record = path.with_name(f"{path.name}.done.json")
    done = _read_record(record)
    failed = skipped = 0
    for k, job in enumerate(jobs, 1):
        name = os.path.relpath(job.output, path.parent)
        place = f"[{k}/{len(jobs)}] {name}"
        try:
            key = job.key()
            if done.get(name) == key and job.output.exists():
                skipped += 1
                say(f"{place}: done before")
                continue
            start = time.perf_counter()
            options = Options(job.without)
            program = polydyn.compile(job.model, dims=job.dims, target=job.target, options=options)
            program.save(job.output)
        except PolydynError as e:
            failed += 1
            say(f"{place}: failed ({type(e).__name__}): {e}")
            continue
        done[name] = key
        write_atomically(record, json.dumps(done, indent=1, sort_keys=True).encode())
        say(f"{place}: {len(program.launches)} kernels, {program.kernel_count} unique, "
            f"{time.perf_counter() - start:.1f} s")  # fmt: skip
    say(f"{len(jobs)} jobs: {len(jobs) - failed - skipped} compiled, {skipped} done before, {failed} failed")
    return failed


def _read_record(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

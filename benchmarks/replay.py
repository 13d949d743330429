"""Digests of all texts that compilation writes, and the differences between two runs: a safety net for restructuring.

    python -m benchmarks.replay write FILE [--models NAME ...] [--targets cpu:avx512 ...] [--no-records] [--jobs 2]
    python -m benchmarks.replay compare OLD NEW [--lines 20]

``write`` plans each model for each target, with tile records and without. It stores the text of every kernel, the host
program, the manifest, and the facts of every kernel that its text does not show: when it may be launched, its sizes,
and the work that estimates of its time are made from. Models are the stored ones, and the small graphs of
``polydyn.testing.kernel_graphs``, which need the kinds of kernels that no stored model has: 16-bit floats and bytes on
tensor cores, scatters, scans, sorting. Nothing is compiled or measured: records are made by a simulated machine, so
equal code writes equal files.

``compare`` prints which kernels or facts differ, and exits with 1 if any does. If only host programs or manifests
differ, it lists them and exits with 0. Kernels whose texts differ only in the content hashes inside their names are
counted separately.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import onnx

from polydyn.codegen.kernel import Kernel
from polydyn.compiler import plan_program
from polydyn.errors import BuildError
from polydyn.gpu.hardware import device_of
from polydyn.gpu.targets import is_cuda
from polydyn.measure import tune
from polydyn.measure.cpu import tasks_of
from polydyn.program.assemble import manifest_of
from polydyn.program.estimates import estimated
from polydyn.program.host import host_program
from polydyn.program.plan import HostPlan
from polydyn.runtime.artifact import pack_constants
from polydyn.search.backbone import Problem
from polydyn.search.hardware import cpu
from polydyn.search.outcomes import outcome, search_record
from polydyn.search.records import Records
from polydyn.search.strategies import strategy
from polydyn.search.strategies import tune as tune_task
from polydyn.testing.kernel_graphs import GRAPHS, graph
from polydyn.testing.simulated import Simulated

DATA = Path(__file__).parent.parent / "tests" / "data"
TARGETS = ("cpu:avx512", "cpu:avx2", "cuda:sm_80", "cuda:sm_90a")
TRIALS = 4
SHOWN = 5
"""Lines shown of each side of a difference."""
HASH = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Case:
    """One compilation for a target, with tile records or without. ``model``: a path, or a name of ``GRAPHS``."""

    model: str
    target: str
    records: bool

    @property
    def source(self) -> str | onnx.ModelProto:
        """The model, in the form that the compiler takes."""
        return graph(self.model) if self.model in GRAPHS else self.model

    def __str__(self) -> str:
        return f"{Path(self.model).stem} {self.target}" + (" records" if self.records else "")


def plan(case: Case) -> HostPlan:
    """Return the host plan of a case; its records are made on the spot."""
    if not case.records:
        return plan_program(case.source, target=case.target)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.db"
        simulate_records(case.source, case.target, path)
        return plan_program(case.source, target=case.target, records=path)


def simulate_records(model: str | onnx.ModelProto, target: str, path: Path) -> None:
    """Write a record file with a search of every product of a model, on a simulated machine: equal on every machine."""
    if is_cuda(target):
        absent = BuildError("records of a replay depend on no compiler")
        with (
            mock.patch.dict(os.environ, {"POLYDYN_LIBCUDA": "libno-such-cuda.so.1"}),
            mock.patch("polydyn.measure.cuda.compiler_version", side_effect=absent),
        ):
            tune(model, path, target=target, trials=TRIALS)
        return
    machine, row = cpu(1, lanes=16 if target == "cpu:avx512" else 8), strategy("polydyn")
    with Records.open(path) as records:
        for placed in tasks_of(model, target=target):
            task = placed.task
            problem = Problem(task.key, task.backbone, *placed.instances(()))
            tuned = tune_task(row, problem, machine, Simulated(task.backbone, machine), trials=TRIALS, seed=0)
            records.put([search_record(outcome(tuned, machine), task)])


def texts(plan: HostPlan, target: str) -> dict[str, str]:
    """Return texts by name: of all kernels and their facts, of ``host`` and ``manifest``."""
    if is_cuda(target):
        plan = estimated(plan, device_of(target), {})
    used = {n for launch in plan.launches for n in launch.buffers} | set(plan.outputs)
    offsets, weights = pack_constants({n: a for n, a in plan.constants.items() if n in used})
    host = host_program(plan, offsets, int(weights.size))
    constants = {n: sha256(a.tobytes()).hexdigest() for n, a in sorted(plan.constants.items())}
    manifest = {**manifest_of(plan, host), "constants": constants}
    kernels = {f"kernel {k.name}": k.text for k in plan.kernels}
    return {
        **kernels,
        **{f"facts {k.name}": facts(k) for k in plan.kernels},
        "host": host.text,
        "manifest": json.dumps(manifest, indent=1, sort_keys=True),
    }


def facts(kernel: Kernel) -> str:
    """Return the fields of a kernel except its text, one per line."""
    values = {f.name: getattr(kernel, f.name) for f in fields(kernel) if f.name not in ("text", "block")}
    values["after"] = [k.name for k in kernel.after]
    if kernel.block is not None:
        values |= {f"block.{f.name}": getattr(kernel.block, f.name) for f in fields(kernel.block)}
    return "\n".join(f"{name} = {value!r}" for name, value in values.items())


def write(cases: Sequence[Case], file: Path, jobs: int) -> None:
    """Write digests and texts of all cases."""
    digests: dict[str, dict[str, str]] = {}
    kept: dict[str, str] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for case, case_texts in zip(cases, pool.map(_run, cases), strict=True):
            digests[str(case)] = {name: digest(text) for name, text in case_texts.items()}
            kept |= {digest(text): text for text in case_texts.values()}
            print(f"{case}: {len(case_texts) // 2 - 1} kernels, {digest(json.dumps(digests[str(case)]))}", flush=True)
    with gzip.open(file, "wt") as f:
        json.dump({"cases": digests, "texts": kept}, f)


def _run(case: Case) -> dict[str, str]:
    return texts(plan(case), case.target)


def digest(text: str) -> str:
    """Return a short content hash."""
    return sha256(text.encode()).hexdigest()[:16]


def without_hashes(text: str) -> str:
    """Return a text with every content hash replaced by the number of its first appearance."""
    seen: dict[str, str] = {}
    return HASH.sub(lambda m: seen.setdefault(m.group(), f"#{len(seen)}"), text)


@dataclass(frozen=True)
class Difference:
    """Two texts that differ, in one case or several; ``lines``: the first lines that differ."""

    cases: tuple[str, ...]
    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """``equal`` and ``renamed`` (equal except for content hashes): numbers of texts. ``kernels``: differences of
    kernels and their facts. ``host_texts``: differences of host programs and manifests. ``missing``: cases of one file
    only.
    """

    equal: int
    renamed: int
    kernels: tuple[Difference, ...]
    host_texts: tuple[Difference, ...]
    missing: tuple[str, ...]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Compare two results.

    Kernels are paired by their texts without content hashes, else by their order in the plan.
    """
    equal = renamed = 0
    cases_of: dict[tuple[str, str, str], list[str]] = {}
    for case in sorted(old["cases"].keys() & new["cases"].keys()):
        for name, before, after in _pairs(old, new, case):
            if before == after:
                equal += 1
            elif without_hashes(before) == without_hashes(after):
                renamed += 1
            else:
                cases_of.setdefault((name, before, after), []).append(case)
    differences = [Difference(tuple(cases), n, tuple(_lines(b, a))) for (n, b, a), cases in cases_of.items()]
    kernels = tuple(d for d in differences if d.name not in ("host", "manifest"))
    others = tuple(d for d in differences if d.name in ("host", "manifest"))
    return Comparison(equal, renamed, kernels, others, tuple(sorted(old["cases"].keys() ^ new["cases"].keys())))


def _pairs(old: Mapping[str, Any], new: Mapping[str, Any], case: str) -> Iterator[tuple[str, str, str]]:
    a, b = ({n: f["texts"][d] for n, d in f["cases"][case].items()} for f in (old, new))
    for name in ("host", "manifest"):
        yield name, a.pop(name), b.pop(name)
    for name in sorted(a.keys() & b.keys()):
        yield name, a.pop(name), b.pop(name)
    plain = {without_hashes(t): n for n, t in b.items()}
    for name, text in list(a.items()):
        other = plain.pop(without_hashes(text), None)
        if other is not None:
            yield name, a.pop(name), b.pop(other)
    rest = [*a.items()], [*b.items()]
    for k in range(max(map(len, rest))):
        (name, before), (_, after) = (x[k] if k < len(x) else (x[0][0] if x else "kernel", "") for x in rest)
        yield name, before, after


def _lines(before: str, after: str) -> Iterator[str]:
    """Yield the first lines that differ."""
    a, b = before.splitlines(), after.splitlines()
    first = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    yield f"line {first + 1}"
    yield from (f"- {x}" for x in a[first : first + SHOWN])
    yield from (f"+ {x}" for x in b[first : first + SHOWN])


def report(c: Comparison, lines: int) -> int:
    """Print a comparison; return 1 if a kernel differs."""
    print(f"{c.equal} texts equal, {c.renamed} equal but for content hashes in names, {len(c.kernels)} kernels differ, "
          f"{len(c.host_texts)} host programs or manifests differ")  # fmt: skip
    for d in (*c.kernels, *c.host_texts):
        print(f"\n{d.name} of {', '.join(d.cases[:4])}{' ...' if len(d.cases) > 4 else ''}")
        print("\n".join(d.lines[:lines]))
    for case in c.missing:
        print(f"only in one of the files: {case}")
    return 1 if c.kernels or c.missing else 0


def cases(models: Sequence[str], targets: Sequence[str], records: Sequence[bool]) -> list[Case]:
    """Return all combinations; a model is a path, the name of a stored one, or of ``GRAPHS``."""
    paths = [m if m in GRAPHS or Path(m).exists() else str(DATA / f"{m}.onnx") for m in models]
    return [Case(*x) for x in product(paths, targets, records)]


def load(file: str) -> dict[str, Any]:
    """Read a file that ``write`` wrote."""
    with gzip.open(file, "rt") as f:
        found: dict[str, Any] = json.load(f)
    return found


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    w = sub.add_parser("write")
    w.add_argument("file", type=Path)
    w.add_argument("--models", nargs="+", default=[*sorted(p.stem for p in DATA.glob("*.onnx")), *GRAPHS])
    w.add_argument("--targets", nargs="+", default=TARGETS)
    w.add_argument("--no-records", action="store_true")
    w.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    c = sub.add_parser("compare")
    c.add_argument("old")
    c.add_argument("new")
    c.add_argument("--lines", type=int, default=20, help="lines to print of each difference")
    a = parser.parse_args()
    if a.command == "compare":
        return report(compare(load(a.old), load(a.new)), a.lines)
    write(cases(a.models, a.targets, (False,) if a.no_records else (False, True)), a.file, a.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())

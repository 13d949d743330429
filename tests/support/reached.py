"""Functions that run when a model is compiled or tuned, and the texts that this writes: each way in a new process.

A new process has no memory of earlier compilations, so every function that a way needs is called in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import onnx
import onnx.parser

import polydyn
from polydyn.backends.options import Options
from polydyn.compiler import plan_program
from polydyn.gpu.hardware import device_of
from polydyn.measure import tasks_of
from polydyn.program.assemble import manifest_of
from polydyn.program.estimates import estimated
from polydyn.program.host import host_program
from polydyn.program.plan import HostPlan
from polydyn.search.backbone import Problem, Tile
from polydyn.search.explorers.explore import aligned_order
from polydyn.search.hardware import cpu
from polydyn.search.outcomes import outcome, search_record
from polydyn.search.records import Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.strategies import STRATEGIES, Tuned
from polydyn.search.strategies import tune as tune_task
from polydyn.shapes.sizes import Sizes
from polydyn.testing import models
from polydyn.testing.kernel_graphs import graph
from polydyn.testing.simulated import Simulated
from tests.support.paths import DATA, ROOT

TRIALS, LENGTHS = 48, (1, 3, 8, 24, 61, 100, 300, 700)
"""Trials and numbers of rows of a search on the simulated machine."""
Model = str | onnx.ModelProto
CPU = (("bert_tiny", "cpu:avx512"), ("products", "cpu:avx2"), ("rows", "cpu:avx512"), ("windows", "cpu:avx2"),
       ("tables", "cpu:avx2"), ("sums", "cpu:avx2"))  # fmt: skip
CUDA = (("few rows", "cuda:sm_80"), ("attention of halves", "cuda:sm_90a"))
"""Models and targets: a stored model, or a graph of ``kernel_graphs``."""


SUMS = """<ir_version: 10, opset_import: ["" : 18]>
g (float[M, 64] x) => (float[M] a, float[M] b) <int64[1] last = {1}> {
  a = ReduceSum <keepdims = 0> (x, last) b = ReduceMax <keepdims = 0> (x, last)
}"""
"""Two reductions of the same rows."""


def model_of(name: str) -> Model:
    """Return a stored model's path, the model of ``SUMS``, or a graph of ``kernel_graphs``."""
    if name == "sums":
        return onnx.parser.parse_model(SUMS)
    path = DATA / f"{name}.onnx"
    return str(path) if path.exists() else graph(name)


def written(plan: HostPlan) -> str:
    """Return the notes, the manifest, and the texts of a plan."""
    host = host_program(plan, {}, 0)
    manifest = json.dumps(manifest_of(plan, host))
    return "\n".join([*plan.notes, manifest, host.text, *(k.text for k in plan.kernels)])


def compiled(*cases: tuple[str, str]) -> Iterator[str]:
    """Plan models for CPUs."""
    for name, target in cases:
        plan = plan_program(model_of(name), target=target)
        yield written(estimated(plan, device_of(target), {}) if target.startswith("cuda") else plan)


def searched(strategy: str) -> Iterator[str]:
    """Tune a product by one strategy on a simulated machine, and compile with the records: equal anywhere."""
    machine, target, model = cpu(2, lanes=16), "cpu:avx512", models.gemm(256, 192)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.db"
        with Records.open(path) as records:
            for placed in tasks_of(model, target=target):
                task = placed.task
                problem = Problem(task.key, task.backbone, *placed.instances([({"M": m}, 1) for m in LENGTHS]))
                bench = Simulated(task.backbone, machine)
                found = tune_task(STRATEGIES[strategy], problem, machine, bench, trials=TRIALS, records=records)
                records.put([search_record(outcome(found, machine), task)])
                yield from _steps(found, aligned_order(loop_model(task.backbone, machine), task.backbone, machine))
            yield "\n".join(f"{r.kind} {r.note} {r.values}" for r in records.rows())
        options = Options(strategy=strategy)
        yield written(plan_program(model, target=target, options=options, records=path))


def _steps(tuned: Tuned, order: Sequence[Tile]) -> Iterator[str]:
    """Say where a search begins, and whether it leaves the analytical order."""
    tried = [t.tile for t in tuned.trials]
    if tried[:4] == list(order[:4]):
        yield "the search begins with the analytical order"
    if not set(tried) <= set(order[: len(tried)]):
        yield "the search leaves the analytical order"


def tuned(target: str, strategy: str = "polydyn") -> Iterator[str]:
    """Tune a product by ``polydyn.tune`` and compile it. A GPU is not here: an analytical model ranks its tiles."""
    model, options = models.gemm(64, 96), Options(strategy=strategy)
    absent = {"POLYDYN_LIBCUDA": "libno-such-cuda.so.1"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, absent):
        path = Path(folder) / "records.db"
        likely = {"M": Sizes(likely=(24, 3))}
        yield str(polydyn.tune(model, path, target=target, trials=6, threads=1, dims=likely, options=options))
        with Records.open(path, readonly=True) as records:
            yield "\n".join(f"{r.kind} {r.note} {r.values}" for r in records.rows())
        yield written(plan_program(model, target=target, options=options, records=path))


WAYS: dict[str, Callable[[], Iterator[str]]] = {
    "compile": lambda: compiled(*CPU),
    "compile cuda": lambda: compiled(*CUDA),
    **{f"tune {s}": lambda s=s: searched(s) for s in STRATEGIES},  # type: ignore[misc]
    "tune": lambda: tuned("cpu"),
    "tune cuda": lambda: tuned("cuda:sm_80"),
    "tune cuda dietcode": lambda: tuned("cuda:sm_80", "dietcode"),
}
"""Ways to use the product, by the word that docs/mechanisms.md has in the column "reached by"."""


def run(way: str) -> dict[str, Any]:
    """Run a way. Return the functions that ran, as file, first line and name, and all texts that were written."""
    seen: dict[int, CodeType] = {}
    made: dict[int, type] = {}

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in seen:
            seen[id(code)] = code
            if code.co_filename == "<string>" and "self" in frame.f_locals:  # the constructor of a dataclass
                kind = type(frame.f_locals["self"])
                made[id(kind)] = kind

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        texts = list(WAYS[way]())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    root = f"{ROOT.resolve()}/"
    found: list[tuple[str, int, str]] = []
    for code in seen.values():
        file = str(Path(code.co_filename).resolve())
        if file.startswith(root):
            found.append((file[len(root) :], code.co_firstlineno, code.co_name))
    for kind in made.values():
        file = str(Path(getattr(sys.modules[kind.__module__], "__file__", "") or "").resolve())
        if file.startswith(root):
            found.append((file[len(root) :], 0, kind.__qualname__))
    return {"reached": found, "text": "\n".join(texts)}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))

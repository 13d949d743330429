"""Counts kernels of models on GPU and CPU, kernels of a layer, and kernels that only move or cast numbers.

    python -m benchmarks.gpu.launches MODEL.onnx [...] [--dtype float16] [--arch sm_90a] [--all]

Works on the fusion plan: nothing is compiled. A kernel is one launch, with a split reduction two. ``--all`` lists every
kernel with its nodes. Results are in benchmarks/results/gpu_launches.json.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from benchmarks import record
from benchmarks.gpu.halves import ONNX_TYPE, of_type
from polydyn.backends import target_of
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.gpu.targets import ARCHITECTURES
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute
from polydyn.schedules.expr import Load, Op, walk
from polydyn.testing.plans import layers


@dataclass(frozen=True)
class Row:
    """A model's kernels on both targets; ``layer``: kernels per transformer layer on the GPU; ``moving``: see
    ``moves``.
    """

    model: str
    dtype: str
    arch: str
    gpu: int
    cpu: int
    layer: int | None
    kinds: dict[str, int]
    moving: list[str]

    def __str__(self) -> str:
        of_layer = "" if self.layer is None else f", {self.layer} of a layer"
        only = f"; only move or cast: {', '.join(self.moving)}" if self.moving else ""
        kinds = ", ".join(f"{n} {k}" for k, n in self.kinds.items()) + of_layer
        return f"{self.model:18} {self.dtype:9} {self.gpu:4} on the GPU ({kinds}), {self.cpu:4} on the CPU{only}"


def planned(model: onnx.ModelProto, target: str) -> FusionPlan:
    """Return the groups of a model on a target."""
    backend = target_of(target)
    return backend.fuse(backend.rewrite(import_model(model)))


def moves(group: FusedGroup) -> bool:
    """Return whether a kernel computes nothing: it copies elements into another order or another type."""
    return all(_moves(n) for n in group.nodes)


def _moves(n: Compute) -> bool:
    copies = (x for x in walk(n.body) if not (isinstance(x, Load) or (isinstance(x, Op) and x.name == "cast")))
    fetched = any(i.fetches() for x in walk(n.body) if isinstance(x, Load) for i in x.index)
    return n.is_map and not fetched and next(copies, None) is None


def counted(path: Path, dtype: str, arch: str) -> tuple[Row, FusionPlan]:
    """Return a model's row, and its plan for the GPU."""
    model = of_type(path, dtype)
    gpu, cpu = (planned(model, target) for target in (f"cuda:{arch}", "cpu"))
    of_layers = layers(gpu)
    kinds = Counter(g.kind for g in gpu.groups)
    moving = [g.outputs[0] for g in gpu.groups if moves(g)]
    layer = of_layers[0] if of_layers else None
    return Row(path.stem, dtype, arch, len(gpu.groups), len(cpu.groups), layer, dict(kinds), moving), gpu


def listed(plan: FusionPlan) -> Iterator[str]:
    """Yield a line for each kernel: its kind, and the ONNX nodes in it."""
    for g in plan.groups:
        origins = dict.fromkeys(n.origin for n in g.nodes)
        yield f"    {g.kind:10} {g.outputs[0]:40} {' '.join(origins)}"


def main() -> None:
    """Print a line for each model, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--dtype", choices=ONNX_TYPE, default="float16")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90a")
    parser.add_argument("--all", action="store_true", help="list every kernel")
    options = parser.parse_args()
    rows = []
    for path in options.models:
        row, plan = counted(path, options.dtype, options.arch)
        rows.append(asdict(row))
        print(row, *(listed(plan) if options.all else ()), sep="\n", flush=True)
    record.save("gpu_launches", rows=rows)


if __name__ == "__main__":
    main()

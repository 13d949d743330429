"""The cost of schedules: once for each group, and for one more tile of a group.

usage: python -m benchmarks.scheduling MODEL.onnx ... [--target cpu:avx512] [--rounds 3] [--quick]

Once per distinct kernel, in a warm process and without caches: dependences, schedule, proof and tree (isl's AST as loop
IR); the limit is 300 ms. For one more tile: on the GPU's tree, bind the tile's sizes, check that the tile is whole, and
compute its resources (threads, shared memory, registers), 3 ms; a CPU macro-kernel with all its variants of rows and
vectors, 60 ms from the tree to C text, without the C compiler. Times are milliseconds of CPU time, the minimum of the
rounds. ``--quick``: one round, results in benchmarks/out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks import record
from polydyn.backends.cpu import cpu_target
from polydyn.codegen import isl_ast
from polydyn.codegen.cpu.attention import AttentionKernel
from polydyn.codegen.cpu.dot import DotKernel
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.rows import NestKernel
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import FMA_TILES, MMA_TILES
from polydyn.codegen.isl_ast import generate
from polydyn.codegen.passes.bind import bind
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.lowering.attention import AttentionGroup
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.place_cpu import Form, KernelBuilder
from polydyn.schedules.group import dependence
from polydyn.schedules.group.dependence import Dependences, analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.index import Index
from polydyn.schedules.model import Group
from polydyn.schedules.proof import boxes
from polydyn.schedules.proof import prove as one_proof
from polydyn.schedules.proof.obligations import vectors_in_rows
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.solution.schedule import schedule_attention, schedule_contract, schedule_nest
from polydyn.schedules.tree.gpu import gpu_product
from polydyn.schedules.tree.names import extent

LIMITS_MS = {"once": 300.0, "cpu tile": 60.0, "gpu tile": 3.0}
"""Maximum milliseconds."""
SHARED_BYTES, THREADS, REGISTERS = 99 * 1024, 1024, 65536
"""Limits of a block on the smallest supported GPU (sm_80 lends 163 KB, sm_86 and sm_89 99 KB)."""

Times = dict[str, float]
T = TypeVar("T")


class _Clock:
    """Milliseconds of CPU time, by name."""

    def __init__(self) -> None:
        self.times: Times = {}

    def __call__(self, name: str, f: Callable[[], T]) -> T:
        start = time.process_time()
        out = f()
        self.times[name] = self.times.get(name, 0.0) + (time.process_time() - start) * 1e3
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    target = cpu_target(args.target)
    rounds = 1 if args.quick else args.rounds
    rows = [measure(m, target, rounds) for m in args.models]
    total = [g for r in rows for g in r["groups"]]
    print(f"all: {summary(total)}")
    folder = record.SCRATCH if args.quick else record.RESULTS
    path = record.save("scheduling", folder=folder, target=target.name, allowed_ms=LIMITS_MS, models=rows)
    print(f"written: {path.name}")


def measure(path: str, target: CpuTarget, rounds: int) -> dict[str, Any]:
    """Measure all distinct kernels of one model."""
    plan = fusion_plan(rewrite_graph(import_model(path, None)))
    builder = KernelBuilder(plan, target)
    for g in plan.groups:  # warms up the process
        builder.place(g)
    forms = builder.forms.items()
    groups = [{"kernel": builder.placed[k].kernels[0].name, **cost(f, target, rounds)} for k, f in forms]
    print(f"{Path(path).stem:<14} {summary(groups)}", flush=True)
    return {"model": Path(path).stem, "groups": groups}


def summary(groups: Sequence[Mapping[str, object]]) -> str:
    """Return median and maximum of each cost, and the number of values above the limit."""
    out = []
    for name, limit in LIMITS_MS.items():
        ms = [float(str(g[name])) for g in groups if name in g]
        if ms:
            out.append(f"{name}: median {median(ms):.1f}, most {max(ms):.1f} of {limit:.0f} ms, "
                       f"{sum(x > limit for x in ms)} above")  # fmt: skip
    return f"{len(groups)} kernels; " + "; ".join(out)


def cost(form: Form, target: CpuTarget, rounds: int) -> dict[str, object]:
    """Return the costs of one kernel, the minimum of the rounds for each part."""
    once: Times = {}
    tile: Times = {}
    for _ in range(rounds):
        for memory in (isl_ast._generate, boxes._check_packed, one_proof._prove, dependence._analyse):
            memory.cache_clear()
        clock, again = _Clock(), _Clock()
        candidate = _once(form, target, clock)
        again("cpu tile", candidate)
        if isinstance(form, ContractGroup):
            _gpu(form, again)
        for best, now in ((once, clock.times), (tile, again.times)):
            best.update({n: min(ms, best.get(n, ms)) for n, ms in now.items()})
    return {"once": round(sum(once.values()), 2), **{n: round(v, 3) for n, v in {**once, **tile}.items()}}


def _once(form: Form, target: CpuTarget, clock: _Clock) -> Callable[[], object]:
    """Run the parts of the one-off cost; return a function that builds the kernel for one more tile."""
    if isinstance(form, AttentionGroup):
        return _attention(form, target, clock)
    group = form.lowered.group if isinstance(form, ContractGroup) else form.group
    deps = clock("dependences", lambda: analyse(group, positive=False))
    if isinstance(form, ContractGroup):
        build = DotKernel if form.dot else ContractKernel
        roles, _ = clock("schedule", lambda: schedule_contract(group, form.roles, deps.under(context(group))))

        def contraction() -> ContractKernel:
            return build("contract", group, roles, target, form.packed, None, form.fill, form.footprint)

        schedule = contraction().schedule
        clock("proof", lambda: one_proof.prove(schedule))
        clock("tree", lambda: generate(contraction().schedule.tiled()))
        return lambda: contraction().build()
    return _nest(group, deps, target, clock)


def _nest(group: Group, deps: Dependences, target: CpuTarget, clock: _Clock) -> Callable[[], object]:
    s = clock("schedule", lambda: schedule_nest(group, deps.under(context(group))))

    def nest() -> NestKernel:
        return NestKernel("nest", group, s.band, s.phases, target)

    schedule = nest().schedule
    clock("proof", lambda: one_proof.prove(schedule))
    clock("tree", lambda: generate(schedule.tiled()))
    return lambda: nest().build()


def _attention(form: AttentionGroup, target: CpuTarget, clock: _Clock) -> Callable[[], object]:
    """Measure an attention; the dependences of its parts are computed inside the schedule and the proof."""
    group = form.lowered.group
    parts = clock("schedule", lambda: schedule_attention(form.parts))

    def kernel() -> AttentionKernel:
        return AttentionKernel("attention", group, parts, target, frozenset())

    schedule = kernel().schedule
    clock("proof", lambda: Proven(schedule, vectors_in_rows(parts)))
    clock("tree", lambda: generate(schedule.tiled()))
    return lambda: kernel().build()


def _gpu(form: ContractGroup, clock: _Clock) -> None:
    """Measure candidates on the GPU's tree of this group; the mean over all tiles."""
    tiles = (*FMA_TILES, *MMA_TILES)
    clock("gpu tile", lambda: [candidate(form, t) for t in tiles])
    clock.times["gpu tile"] /= len(tiles)


def candidate(form: ContractGroup, tile: CudaTile) -> bool:
    """Compose and bind one tile; return whether it is whole and a block of it fits the GPU."""
    schedule = gpu_product(form.lowered.group, form.roles, tile.sizes())
    sizes: dict[str, Index] = {extent(x): n for x, n in schedule.extents().items()}
    bind(generate(schedule.tiled()), sizes)
    width = 2 if tile.instruction == "mma" else 4
    shared = (tile.bm + tile.bn) * tile.bk * width * tile.stages
    registers = tile.threads * (tile.bm * tile.bn // tile.threads + 40)
    return shared <= SHARED_BYTES and tile.threads <= THREADS and registers * tile.blocks <= REGISTERS


if __name__ == "__main__":
    main()

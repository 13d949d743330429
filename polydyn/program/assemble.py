"""From a host plan to a program: host text, kernels, library, manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import polydyn
from polydyn.build.compiler import build_library
from polydyn.build.features import architecture
from polydyn.graph.ir import Guard
from polydyn.program.artifact import ABI, FORMAT, Artifact, pack_constants, read_artifact, write_artifact
from polydyn.program.expressions import decision_to_json, to_json
from polydyn.program.host import HostProgram, host_program, shape_text
from polydyn.program.plan import Choice, HostPlan, IndexCheck, Launch
from polydyn.program.program import Program
from polydyn.program.runtime import sources
from polydyn.program.verify import verify_host_plan
from polydyn.program.waves import wave_ranges

BATCH = 10
"""Kernels per translation unit: headers are parsed once per unit, and units compile in parallel."""


def build_program(plan: HostPlan, *, target: str = "cpu", threads: int | None = None) -> Program:
    """Compiles a host plan into a program.

    ``target``: a name in ``polydyn.build.compiler.TARGETS``. ``threads``: of every call, default all cores this
    process may use. Errors: PolydynError (malformed plan), UnsupportedError (sizes that depend on data), BuildError.
    """
    artifact, compiled = build_artifact(plan, target)
    return Program(artifact, threads=threads, compilations=compiled)


def build_artifact(plan: HostPlan, target: str = "cpu") -> tuple[Artifact, int]:
    """The artifact of a host plan, and how many translation units had to be compiled."""
    verify_host_plan(plan)
    used = {n for launch in plan.launches for n in launch.buffers} | set(plan.outputs)
    offsets, weights = pack_constants({n: a for n, a in plan.constants.items() if n in used})
    host = host_program(plan, offsets, int(weights.size))
    files = sources() | plan.headers | {"host.c": host.text} | kernel_units(plan)
    units, headers = _split(files)
    library = build_library(units, headers, target)
    manifest = _manifest(plan, host) | {
        "target": target,
        "architecture": architecture(),
        "features": list(library.features),
        "compiler": library.compiler,
    }
    return Artifact(manifest, files, library.data, weights), library.compiled


def rebuild(path: str | os.PathLike[str], to: str | os.PathLike[str], target: str = "cpu") -> None:
    """Compiles an artifact's sources again, for this machine, into another artifact."""
    old = read_artifact(path, verify=True, check_machine=False)
    library = build_library(*_split(dict(old.sources)), target)
    manifest = dict(old.manifest) | {
        "target": target,
        "architecture": architecture(),
        "features": list(library.features),
        "compiler": library.compiler,
    }
    write_artifact(Artifact(manifest, old.sources, library.data, old.weights), to)


def _split(files: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Translation units and headers."""
    units = {n: t for n, t in files.items() if n.endswith(".c")}
    return units, {n: t for n, t in files.items() if n not in units}


def kernel_units(plan: HostPlan) -> dict[str, str]:
    """Translation units (file name -> C text) with a plan's kernels."""
    units = {}
    includes = "\n".join(["#include <stdint.h>", *(f'#include "{h}"' for h in plan.headers)])
    for start in range(0, len(plan.kernels), BATCH):
        texts = "\n\n".join(k.text for k in plan.kernels[start : start + BATCH])
        units[f"kernels_{start // BATCH:03}.c"] = f"{includes}\n\n{texts}\n"
    return units


def _guard(g: Guard) -> dict[str, Any]:
    return {
        "rule": f"{g.left} {g.relation} {g.right}",
        "message": g.message,
        "left": to_json(g.left),
        "relation": g.relation,
        "right": to_json(g.right),
    }


def _index_check(c: IndexCheck) -> dict[str, Any]:
    shift = "" if c.offset == 0 else f" + {c.offset}"
    return {"rule": f"{c.buffer}{shift} in [-{c.size}, {c.size})", "message": c.message}


def _launch(launch: Launch) -> dict[str, Any]:
    return {
        "label": launch.label or launch.kernel,
        "kernel": launch.kernel,
        "buffers": list(launch.buffers),
        "names": list(launch.names or map("s{}".format, range(len(launch.symbols)))),
        "choices": launch.choices,
        "symbols": [to_json(s) for s in launch.symbols],
        "tasks": to_json(launch.tasks),
        "scratch": to_json(launch.scratch),
        "work": to_json(launch.work),
        "flops": to_json(launch.flops),
        "bytes": to_json(launch.bytes),
        "reasons": list(launch.reasons),
    } | ({} if launch.choice is None else {"choice": _choice(launch.choice)})


def _choice(choice: Choice) -> dict[str, Any]:
    variants = [
        {
            "kernel": v.kernel,
            "symbols": [to_json(s) for s in v.symbols],
            "tasks": to_json(v.tasks),
            "scratch": to_json(v.scratch),
        }
        for v in choice.variants
    ]
    return {"variants": variants, "decision": decision_to_json(choice.decision)}


def _manifest(plan: HostPlan, host: HostProgram) -> dict[str, Any]:
    def io(names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "name": n,
                "dtype": b.dtype,
                "shape": [shape_text([d])[1:-1] for d in b.shape],
                "strided": len(b.strides),
                "dims": [to_json(d) for d in b.shape],
            }
            for n in names
            for b in [plan.buffers[n]]
        ]

    return {
        "format": FORMAT,
        "abi": ABI,
        "polydyn": polydyn.__version__,
        "name": plan.name,
        "inputs": io(plan.inputs),
        "outputs": io(plan.outputs),
        "appendable": [
            {"input": launch.skip_if_same[0], "output": launch.skip_if_same[1]}
            for launch in plan.launches
            if launch.skip_if_same
        ],
        "symbols": [{"symbol": s.symbol, "input": s.input, "axis": s.axis} for s in plan.sources],
        "dims": {name: sizes.to_json() for name, sizes in sorted(plan.dims.items())},
        "guards": [_guard(g) for g in plan.guards],
        "kernels": [{"name": k.name, "digest": k.digest, "notes": list(k.notes)} for k in plan.kernels],
        "launches": [_launch(launch) for launch in plan.launches],
        "waves": [len(r) for r in wave_ranges(plan)],
        "index_checks": [_index_check(c) for c in plan.index_checks],
        "memory": [list(s.tenants) for s in host.slots],
        "notes": list(plan.notes),
    }

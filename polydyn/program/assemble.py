"""Assemble a program from a host plan: host text, kernels, library, manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import polydyn
from polydyn.build.compiler import Building, Library, architecture_of, build_library
from polydyn.clock import section, unit_lines
from polydyn.codegen.cpu.target import lanes_text
from polydyn.codegen.kernel import Block, Kernel, TensorMapOf
from polydyn.debug import Level, show
from polydyn.errors import BuildError
from polydyn.gpu.hardware import Hardware, device_of
from polydyn.gpu.targets import architectures, is_cuda, special_arch
from polydyn.program.estimates import estimated
from polydyn.program.guards import guard_to_json
from polydyn.program.host import HostProgram, host_program, shape_text
from polydyn.program.parallel_launches import wave_ranges
from polydyn.program.plan import Candidate, HostPlan, IndexCheck, Launch
from polydyn.program.verify import verify_host_plan
from polydyn.runtime.artifact import ABI, FORMAT, Artifact, pack_constants, read_artifact, write_artifact
from polydyn.runtime.c import sources
from polydyn.runtime.cuda.images import Images, build_images
from polydyn.runtime.expressions import decision_to_json, to_json
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Program
from polydyn.runtime.seal import digest_of, seal_library
from polydyn.schedules.decision import Decision

BATCH = 4
"""Kernels per translation unit. The number is small, so that the first units compile while later kernels are planned.
It is not 1, because each unit parses the headers.
"""


def build_program(plan: HostPlan, *, target: str = "cpu", threads: int | None = None) -> Program:
    """Compile a host plan into a program.

    ``target``: a name in ``polydyn.build.compiler.TARGETS`` or ``polydyn.gpu.targets.CUDA_TARGETS``. ``threads``: the
    number of threads per call, by default all cores this process may use. Errors: PolydynError (malformed plan),
    UnsupportedError (sizes that depend on data), BuildError.
    """
    artifact, compiled = build_artifact(plan, target)
    return open_program(artifact, threads=threads, compilations=compiled)


class KernelsAhead:
    """Compiles the CPU kernels of a program, and the runtime units, while later kernels are planned.

    ``headers``: the headers that kernels include. Use it as a context manager, like ``Building``.
    """

    def __init__(self, target: str, headers: Mapping[str, str]) -> None:
        self._units, every = _split(sources("cpu") | dict(headers))
        self._headers, self._done, self._rejected = headers, 0, False
        self.building = Building(every, target)

    def __enter__(self) -> KernelsAhead:
        self.building.__enter__()
        self.building.request(self._units)
        return self

    def __exit__(self, *error: object) -> None:
        self.building.__exit__(*error)

    def __call__(self, kernels: Sequence[Kernel]) -> None:
        """Compile the units that are complete. ``kernels``: all kernels so far, in the order of the program.

        A compiler error is not raised here. The request for the library raises it, when the kernels' nodes are known.
        """
        full = len(kernels) // BATCH * BATCH
        if not self._rejected:
            with suppress(BuildError):
                self._rejected = True
                self.building.request(_units(kernels[self._done : full], self._headers, self._done // BATCH))
                self._rejected = False
        self._done = full


def build_artifact(plan: HostPlan, target: str = "cpu", building: Building | None = None) -> tuple[Artifact, int]:
    """Return the artifact of a host plan, and the number of translation units that were compiled.

    For a device the kernels are compiled first, because their occupancy decides the time estimates. For a CPU,
    ``building`` may already be compiling kernels.
    """
    verify_host_plan(plan)
    units = kernel_units(plan)
    built: Images | None = None
    more: dict[str, Any] = {}
    if plan.on_device:
        kernels = [(k.name, k.device.arch) for k in plan.kernels]
        built = build_images(kernels, units | plan.headers, architectures(target))
        device = device_of(target)
        plan = estimated(plan, device, built.resources)
        plan = replace(plan, notes=(*plan.notes, f"launch times are estimated for {device.name} ({device.arch})"))
        more = {"estimates": _device(device)}
    used = {n for launch in plan.launches for n in launch.buffers} | set(plan.outputs)
    with section("packing constants"):
        offsets, weights = pack_constants({n: a for n, a in plan.constants.items() if n in used})
    if built is not None:  # a caller that launches a single version needs the offsets of its constants
        more["constants"] = {n: {"offset": o, "bytes": plan.constants[n].nbytes} for n, o in offsets.items()}
    with section("host program"):
        host = host_program(plan, offsets, int(weights.size))
    show(Level.TEXTS, "", "host", lambda: host.text, "c")
    files = sources(plan.place) | plan.headers | {"host.c": host.text} | units
    units, headers = _split(files)
    try:
        library = (
            build_library(units, headers, host_target(target, plan.on_device))
            if building is None
            else building.library(units)
        )
    except BuildError as e:
        raise _placed(e, plan) from e
    sealed = seal_library(library.data, digest_of(weights))
    artifact = Artifact(manifest_of(plan, host) | _built_by(library, target) | more, files, sealed, weights)
    return (artifact if built is None else with_images(artifact, built)), library.compiled


def _placed(e: BuildError, plan: HostPlan) -> BuildError:
    """Return the error, extended by the kernels that the compiler names and the nodes that they compute."""
    launched = {k.kernel: launch.label for launch in plan.launches for c in launch.candidates for k in c.sequence}
    named = [name for name in launched if re.search(rf"\b{name}\b", e.message)]
    if not named:
        return e
    nodes = ", ".join(dict.fromkeys(launched[n] for n in named))
    return BuildError(e.message, node=nodes, rule=f"kernel {', '.join(named)}", remedy=e.remedy)


def _device(h: Hardware) -> dict[str, Any]:
    """Return the device description that ``explain`` uses while no device is open."""
    return {
        "device": h.name, "multiprocessors": h.multiprocessors, "shared": h.smem_per_block,
        "special": special_arch(h.arch),
    }  # fmt: skip


def host_target(target: str, on_device: bool) -> str:
    """Return the compilation target of the host library: for a device, any processor of this architecture."""
    return "cpu:baseline" if on_device else target


def _built_by(library: Library, target: str) -> dict[str, Any]:
    return {
        "target": target,
        "architecture": architecture_of(target),
        "features": list(library.features),
        "compiler": library.compiler,
    }


def with_images(artifact: Artifact, built: Images) -> Artifact:
    """Return the artifact of a CUDA program with the compiled images and resources of its kernels, if any."""
    more = {
        "kernels": [k | {"resources": built.resources.get(k["name"], {})} for k in artifact.manifest["kernels"]],
        "cuda": {
            "compiler": built.compiler, "images": sorted({n.partition("/")[0] for n in built.files}),
            "note": built.note,
        },
    }  # fmt: skip
    return replace(artifact, manifest=dict(artifact.manifest) | more, images=built.files)


def rebuild(path: str | os.PathLike[str], to: str | os.PathLike[str], target: str = "cpu") -> None:
    """Compile an artifact's sources again, for this machine, into another artifact.

    BuildError: a program for a device cannot become one for the CPU, or vice versa.
    """
    old = read_artifact(path, check_machine=False)
    if "order" in old.manifest or "general" in old.manifest or old.manifest.get("overridden", {}).get("program"):
        raise BuildError(f"{path} has several parts", remedy="compile the model again")
    on_device = "cuda" in old.manifest
    if is_cuda(target) != on_device:
        raise BuildError(f"{path} is for {old.manifest['target']}, not for {target}", remedy="compile the model again")
    library = build_library(*_split(dict(old.sources)), host_target(target, on_device))
    sealed = seal_library(library.data, digest_of(old.weights))
    new = Artifact(dict(old.manifest) | _built_by(library, target), old.sources, sealed, old.weights)
    if on_device:
        kernels = [(k["name"], k["arch"]) for k in old.manifest["kernels"]]
        new = with_images(new, build_images(kernels, old.sources, architectures(target)))
    write_artifact(new, to)


def _split(files: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split files into translation units and headers."""
    units = {n: t for n, t in files.items() if n.endswith(".c")}
    return units, {n: t for n, t in files.items() if n.endswith(".h")}


def kernel_units(plan: HostPlan) -> dict[str, str]:
    """Return the translation units (file name -> text) of a plan's kernels; for a device, one CUDA file per kernel."""
    if plan.on_device:
        return {f"{k.name}.cu": k.text for k in plan.kernels}
    return _units(plan.kernels, plan.headers)


def _units(kernels: Sequence[Kernel], headers: Mapping[str, str], first: int = 0) -> dict[str, str]:
    """Return units of at most ``BATCH`` kernels with equal lanes, numbered from ``first``."""
    includes = "\n".join(["#include <stdint.h>", *(f'#include "{h}"' for h in headers)])
    units = {}
    for number, start in enumerate(range(0, len(kernels), BATCH), first):
        part = kernels[start : start + BATCH]
        for lanes in dict.fromkeys(k.lanes for k in part):
            name = f"kernels_{number:03}{f'_{lanes}' if lanes else ''}.c"
            texts = {k.name: k.text for k in part if k.lanes == lanes}
            units[name] = "\n\n".join([lanes_text(lanes) + includes, *texts.values()]) + "\n"
            unit_lines(name, {k: t.count("\n") for k, t in texts.items()})
    return units


def _index_check(c: IndexCheck) -> dict[str, Any]:
    shift = "" if c.offset == 0 else f" + {c.offset}"
    first, step = c.part
    name = c.buffer if step == 1 else f"{c.buffer}[..., {first}]"
    return {"rule": f"{name}{shift} in [-{c.size}, {c.size})", "message": c.message}


def _index_checks(plan: HostPlan) -> list[dict[str, Any]]:
    """Return the host's checks, then the checks that only a device makes. ``launch`` is the checking launch."""
    checking = {d.check: d.launch for d in plan.device_checks}
    checks = dict.fromkeys((*plan.index_checks, *checking))
    return [_index_check(c) | ({"launch": checking[c]} if c in checking else {}) for c in checks]


def _kernel(k: Kernel) -> dict[str, Any]:
    return {"name": k.name, "notes": list(k.notes)} | ({"arch": k.block.arch} if k.block else {})


def _launch(launch: Launch, decisions: dict[Decision, int]) -> dict[str, Any]:
    """``decisions`` numbers the decisions so far; a new decision is added."""
    return {
        "label": launch.label,
        "candidates": list(map(_candidate, launch.candidates)),
        "decision": decisions.setdefault(launch.decision, len(decisions)),
        "elements": to_json(launch.elements),
        "work": to_json(launch.work),
        "flops": to_json(launch.flops),
        "bytes": to_json(launch.bytes),
        "reasons": list(launch.reasons),
        "declined": list(map(list, launch.declined)),
    }


def _candidate(c: Candidate) -> dict[str, Any]:
    return {
        "name": c.name,
        "kernel": c.kernel,
        "buffers": list(c.buffers),
        "symbols": [to_json(s) for s in c.symbols],
        "names": list(c.names or map("s{}".format, range(len(c.symbols)))),
        "choices": c.choices,
        "tasks": to_json(c.tasks),
        "scratch": to_json(c.scratch),
        "conditions": [
            {"rule": f"{a} {relation} {b}", "left": to_json(a), "relation": relation, "right": to_json(b)}
            for a, relation, b in c.conditions
        ],
    } | ({} if c.block is None else {"block": _block(c.block, c)})


def _block(b: Block, candidate: Candidate) -> dict[str, Any]:
    return {
        "threads": b.threads,
        "arch": b.arch,
        "features": list(candidate.features),
        "maps": list(map(_map, b.maps)),
        "workspace": to_json(candidate.workspace),
        "after": list(map(_candidate, candidate.after)),
    }


def _map(m: TensorMapOf) -> dict[str, Any]:
    sizes: dict[str, Any] = {"dims": [to_json(d) for d in m.dims], "strides": [to_json(s) for s in m.strides]}
    if m.pixels:
        lower, upper = (list(map(to_json, x)) for x in (m.pixels.lower, m.pixels.upper))
        sizes["pixels"] = {"lower": lower, "upper": upper, "steps": list(m.pixels.steps)}
    return {"buffer": m.buffer, "dtype": m.dtype, "offset": to_json(m.offset), "box": list(m.box)} | sizes


def manifest_of(plan: HostPlan, host: HostProgram) -> dict[str, Any]:
    """Return the manifest of a plan's artifact, without the entries about how its library was built."""

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

    decisions: dict[Decision, int] = {}
    launches = [_launch(launch, decisions) for launch in plan.launches]
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
        "guards": [guard_to_json(g) for g in plan.guards],
        "kernels": [_kernel(k) for k in plan.kernels],
        "launches": launches,
        "decisions": list(map(decision_to_json, decisions)),
        "waves": [len(r) for r in wave_ranges(plan)],
        "index_checks": _index_checks(plan),
        "memory": [list(s.tenants) for s in host.slots],
        "notes": list(plan.notes),
    }

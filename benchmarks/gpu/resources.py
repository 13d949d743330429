"""Resources of the CUDA kernels of models: registers, spills, shared memory, resident blocks.

    python -m benchmarks.gpu.resources MODEL.onnx [...] [--dtype float16] [--arch sm_80 sm_90a] [--shapes B=8,L=512 ...]

For every group, the versions that the model's shapes choose are compiled (no GPU is needed) and listed once. The rows
are added to benchmarks/results/gpu_resources.json and replace earlier ones of the same model, type and architecture.
The exit status is the number of kernels that use local memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import onnx

from benchmarks import record
from benchmarks.arguments import parse_shape
from benchmarks.gpu.halves import ONNX_TYPE, of_type
from polydyn.build.features import available_cores
from polydyn.compiler import plan_program
from polydyn.gpu import hardware
from polydyn.gpu.compiler import compile_cuda, compiler_version
from polydyn.program.estimates import estimated
from polydyn.program.plan import Candidate, HostPlan
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.index import product
from polydyn.testing.choice import choose
from polydyn.testing.inputs import Shape, feeds, shapes

FILE = "gpu_resources"


@dataclass(frozen=True)
class Chosen:
    """A kernel that some shape launches, with its maximum shared memory (bytes); ``kind``: the kind of its group."""

    text: str
    version: Candidate
    kind: str
    smem: int


@dataclass(frozen=True)
class Use:
    """A row of the table.

    ``spills``: bytes stored and loaded, ``local``: bytes of local memory per thread, ``blocks``: resident blocks per
    SM, ``supposed``: resident blocks that the kernel's estimate assumes if no compiler has counted registers.
    """

    kind: str
    version: str
    threads: int
    smem: int
    registers: int
    spills: int
    local: int
    blocks: int
    supposed: int

    def __str__(self) -> str:
        name = f"{self.kind} {self.version}"
        numbers = f"{self.spills:6} {self.local:5} {self.blocks:6} {self.supposed:8}"
        fewer = "  FEWER BLOCKS" if self.blocks < self.supposed else ""
        return f"{name:44} {self.threads:7} {self.smem:6} {self.registers:9} {numbers}{fewer}"

    @property
    def in_memory(self) -> bool:
        """Whether a thread uses local memory."""
        return self.spills > 0 or self.local > 0


def chosen(path: Path, dtype: str, arch: str, requested: Sequence[Shape]) -> tuple[list[Chosen], tuple[str, ...]]:
    """Return the distinct kernels that a model's shapes launch on a device, and the plan's notes."""
    device = hardware.load(hardware.DEVICES[arch])
    plan = estimated(plan_program(of_type(path, dtype), target=f"cuda:{arch}"), device)
    texts = {k.name: k.text for k in plan.kernels}
    model = onnx.load(path)
    inputs = [feeds(model, s) for s in requested]
    found: dict[str, Chosen] = {}
    for f in inputs:
        env = environment(plan, {s.symbol: f[s.input].shape[s.axis] for s in plan.sources}, device)
        for launch in plan.launches:
            for v in choose(launch, env, device).sequence:
                smem = max(v.scratch.evaluate(env), found[v.kernel].smem if v.kernel in found else 0)
                found[v.kernel] = Chosen(texts[v.kernel], v, launch.label.split()[0], smem)
    return list(found.values()), plan.notes


def environment(plan: HostPlan, sizes: Mapping[str, int], device: hardware.Hardware) -> dict[str, int]:
    """Return the symbols of a call on whole arrays: no axis is a part of a longer one."""
    env = {**sizes, THREADS: device.multiprocessors}
    for b in plan.buffers.values():
        env |= {s: product(b.shape[k + 1 :]).evaluate(env) for k, s in enumerate(b.strides)}
    return env


def use(c: Chosen, arch: str) -> Use:
    """Return ptxas's resource report of a kernel."""
    v, block = c.version, c.version.block
    assert block is not None
    u, device = compile_cuda(c.text, arch).kernels[v.kernel], hardware.load(hardware.DEVICES[arch])
    supposed = u.registers if block.work is None else block.work.registers
    blocks, expected = (device.resident_blocks(block.threads, n, c.smem) for n in (u.registers, supposed))
    spills = u.spill_stores + u.spill_loads
    return Use(c.kind, v.name, block.threads, c.smem, u.registers, spills, u.stack, blocks, expected)


def save(about: dict[str, Any], rows: list[Use], **more: Any) -> None:
    """Replace or add a table with the fields ``more``."""
    path = record.RESULTS / f"{FILE}.json"
    old = json.loads(path.read_text())["tables"] if path.exists() else []
    kept = [t for t in old if any(t[k] != v for k, v in about.items())]
    table = about | {"kernels": len(rows), "spilling": sum(r.in_memory for r in rows)} | more
    rows = sorted(set(rows), key=str)  # equal kernels are listed once
    tables = [*kept, table | {"rows": [asdict(r) for r in rows]}]
    tables.sort(key=lambda t: [t[k] for k in about])
    record.save(FILE, compiler=compiler_version(), tables=tables)


def main() -> int:
    """Print the tables; return the number of kernels that use local memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--dtype", nargs="+", choices=ONNX_TYPE, default=["float16"])
    parser.add_argument("--arch", nargs="+", choices=hardware.DEVICES, default=["sm_80", "sm_90a"])
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="B=1,L=8", help="replace the stored shapes")
    options = parser.parse_args()
    spilling = 0
    for path, dtype, arch in ((p, d, a) for p in options.models for d in options.dtype for a in options.arch):
        wanted = options.shapes or shapes(path.stem)
        kernels, notes = chosen(path, dtype, arch, wanted)
        print(f"\n{path.stem}, {dtype}, {arch}: {len(kernels)} kernels\n"
              f"{'kernel':44} threads   smem registers spills local blocks supposed")  # fmt: skip
        rows = []
        with ThreadPoolExecutor(available_cores()) as pool:
            for row in pool.map(use, kernels, repeat(arch)):
                rows.append(row)
                spilling += row.in_memory
                print(row, flush=True)
        print("".join(f"note: {n}\n" for n in notes), end="")
        save({"model": path.stem, "dtype": dtype, "arch": arch}, rows, notes=notes, shapes=wanted)
    print(f"\n{spilling} kernels keep registers in local memory")
    return spilling


if __name__ == "__main__":
    raise SystemExit(main())

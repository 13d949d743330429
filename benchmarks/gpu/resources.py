"""What the CUDA kernels of models take of a multiprocessor: registers, spills, shared memory, resident blocks.

    python -m benchmarks.gpu.resources MODEL.onnx [...] [--dtype float16] [--arch sm_80 sm_90a]

For every group the versions that the model's shapes choose are compiled (no GPU is needed) and listed once. The exit
status is the number of kernels that spill registers to memory.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import onnx

from benchmarks.gpu.emulated import dims_of, params_of, plan_of
from benchmarks.gpu.halves import ONNX_TYPE
from benchmarks.models.inputs import feeds, shapes
from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.gpu import hardware
from polydyn.gpu.compiler import compile_cuda
from polydyn.lowering.cuda import CudaBuilder

DEVICE = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "rtx4090", "sm_90a": "h200"}


@dataclass(frozen=True)
class Chosen:
    """A kernel that some shape launches, with its largest shared memory (bytes); ``kind``: of its group."""

    kernel: CudaKernel
    kind: str
    smem: int


def chosen(path: Path, dtype: str, arch: str) -> tuple[list[Chosen], list[str]]:
    """The distinct kernels that a model's shapes launch on a device, and the builder's notes."""
    device = hardware.load(DEVICE[arch])
    plan = plan_of(path, dtype)
    builder = CudaBuilder(plan, arch)
    model = onnx.load(path)
    dims = [dims_of(plan, feeds(model, s)) for s in shapes(path.stem)]
    found: dict[str, Chosen] = {}
    for group in plan.groups:
        for p in builder.place(group):
            for env in (params_of(p, d) for d in dims):
                size = (device.smem_per_block, device.multiprocessors, arch)
                first = next(k for k in p.versions if k.fits(env, *size))
                known = first.values(env, device.multiprocessors)
                for k in (first, *first.after):
                    smem = max(k.smem.evaluate(known), found[k.name].smem if k.name in found else 0)
                    found[k.name] = Chosen(k, group.kind, smem)
    return list(found.values()), builder.notes


def show(c: Chosen, arch: str) -> tuple[str, bool]:
    """The kernel's line, and whether it spills."""
    k = c.kernel
    use = compile_cuda(k.text, arch).kernels[k.name]
    spilled = use.spill_stores + use.spill_loads
    blocks = hardware.load(DEVICE[arch]).resident_blocks(k.threads, use.registers, c.smem)
    line = f"{c.kind + ' ' + k.version:44} {k.threads:7} {c.smem:6} {use.registers:9} {spilled:6} {blocks:6}"
    return line, spilled > 0


def main() -> int:
    """Prints the tables; the number of kernels that spill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--dtype", choices=ONNX_TYPE, default="float16")
    parser.add_argument("--arch", nargs="+", choices=DEVICE, default=["sm_80", "sm_90a"])
    options = parser.parse_args()
    spilling = 0
    for path in options.models:
        for arch in options.arch:
            kernels, notes = chosen(path, options.dtype, arch)
            print(f"\n{path.stem}, {options.dtype}, {arch}: {len(kernels)} kernels\n"
                  f"{'kernel':44} threads   smem registers spills blocks")  # fmt: skip
            for line, spills in (show(c, arch) for c in kernels):
                spilling += spills
                print(line, flush=True)
            print("".join(f"note: {n}\n" for n in notes), end="")
    print(f"\n{spilling} kernels spill registers")
    return spilling


if __name__ == "__main__":
    raise SystemExit(main())

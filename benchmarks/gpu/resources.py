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

from benchmarks.gpu.emulated import MULTIPROCESSORS, dims_of, first_fit, params_of, plan_of
from benchmarks.gpu.halves import ONNX_TYPE
from benchmarks.models.inputs import feeds, shapes
from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.gpu import hardware
from polydyn.gpu.compiler import KernelUse, compile_cuda
from polydyn.lowering.cuda import CudaBuilder

DEVICE = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "rtx4090", "sm_90a": "h200"}


@dataclass(frozen=True)
class Chosen:
    """A kernel that some shape launches, with its largest shared memory (bytes); ``kind``: of its group."""

    kernel: CudaKernel
    kind: str
    smem: int


def chosen(path: Path, dtype: str) -> tuple[list[Chosen], list[str]]:
    """The distinct kernels that a model's shapes launch, and the builder's notes."""
    plan = plan_of(path, dtype)
    builder = CudaBuilder(plan)
    model = onnx.load(path)
    dims = [dims_of(plan, feeds(model, s)) for s in shapes(path.stem)]
    found: dict[str, Chosen] = {}
    for group in plan.groups:
        for p in builder.place(group):
            for env in (params_of(p, d) for d in dims):
                first = first_fit(p, env)
                known = first.values(env, MULTIPROCESSORS)
                for k in (first, *first.after):
                    smem = max(k.smem.evaluate(known), found[k.name].smem if k.name in found else 0)
                    found[k.name] = Chosen(k, group.kind, smem)
    return list(found.values()), builder.notes


def row(c: Chosen, arch: str) -> tuple[str, KernelUse]:
    """Registers, spilled bytes and resident blocks as text, and what the compiler said."""
    use = compile_cuda(c.kernel.text, arch).kernels[c.kernel.name]
    blocks = hardware.load(DEVICE[arch]).resident_blocks(c.kernel.threads, use.registers, c.smem)
    return f"{use.registers:5} {use.spill_stores + use.spill_loads:6} {blocks:6}", use


def main() -> int:
    """Prints the table; the number of kernels that spill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--dtype", choices=ONNX_TYPE, default="float16")
    parser.add_argument("--arch", nargs="+", choices=DEVICE, default=["sm_80", "sm_90a"])
    options = parser.parse_args()
    spilling = 0
    for path in options.models:
        kernels, notes = chosen(path, options.dtype)
        heads = "  ".join(f"{a:>5} spills blocks" for a in options.arch)
        print(f"\n{path.stem}, {options.dtype}: {len(kernels)} kernels\n{'kernel':44} threads   smem  {heads}")
        for c in kernels:
            rows = [row(c, a) for a in options.arch]
            spilling += any(use.spill_stores or use.spill_loads for _, use in rows)
            text = "  ".join(r for r, _ in rows)
            print(f"{c.kind + ' ' + c.kernel.version:44} {c.kernel.threads:7} {c.smem:6}  {text}", flush=True)
        print(*(f"note: {n}" for n in notes), sep="\n")
    print(f"\n{spilling} kernels spill registers")
    return spilling


if __name__ == "__main__":
    raise SystemExit(main())

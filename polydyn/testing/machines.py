"""The papers' GPUs, for simulations: machines without a polydyn target, or with other memory sizes."""

from __future__ import annotations

from dataclasses import replace

from polydyn.search.hardware import Hardware, Instruction


def _gpu(name: str, units: int, local: int, block: int, memory: float, tensor: float, cuda: float) -> Hardware:
    per = 1.0 / units
    return Hardware(
        name,
        "gpu",
        units,
        local,
        block,
        128 * 1.4e9,
        memory,
        65536,
        255,
        32,
        (
            Instruction("mma.m16n8k16.f16", "tensor", "float16", (16, 8, 16), tensor * per),
            Instruction("hfma2", "vector", "float16", (1, 2, 1), 2 * cuda * per),
            Instruction("dp4a", "vector", "int8", (1, 1, 4), 4 * cuda * per),
            Instruction("ffma", "scalar", "float32", (1, 1, 1), cuda * per),
        ),
        unit_threads=2048,
        block_threads=1024,
        unit_blocks=32,
    )


A100 = _gpu("A100", 108, 164 << 10, 163 << 10, 1.555e12, 312e12, 19.5e12)
"""NVIDIA A100 as in TSCompiler and Vortex (Table 2): 108 SMs."""

V100 = _gpu("V100", 80, 96 << 10, 96 << 10, 0.9e12, 112e12, 15.7e12)
"""NVIDIA V100 as in FTuner: 80 SMs."""

T4 = replace(_gpu("T4", 40, 64 << 10, 64 << 10, 0.32e12, 65e12, 8.1e12), unit_threads=1024, unit_blocks=16)
"""NVIDIA T4 as in DietCode: 40 SMs."""

"""Descriptions of GPUs as data: one JSON file each, so that adding a GPU means adding a file.

Peak figures are dense, with f32 (or int32) accumulators. They are upper bounds for schedules; calibration measures the
real performance of a machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.gpu.hardware.costs import Costs
from polydyn.gpu.targets import SPECIAL, architectures
from polydyn.schedules.index import Index

__all__ = ["DEVICES", "Costs", "Hardware", "device_of", "existing", "load", "match", "names"]

HERE = Path(__file__).parent
_REGISTER_UNIT, _SMEM_UNIT = 256, 128  # allocation granules: registers of a warp, bytes of a block
DEVICES = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "rtx4090", "sm_90a": "h200"}
"""The default device of an architecture."""


@dataclass(frozen=True)
class Hardware:
    """One GPU. Bytes, GHz, GB/s (10^9), TFLOP/s or TOP/s; ``smem_per_block`` is the maximum that a kernel may request.

    ``clock_ghz`` is the boost clock of ordinary arithmetic, ``tensor_clock_ghz`` that of the tensor peaks.
    ``instructions``: those that kernels may use in addition to plain CUDA, named as in ``codegen/device``. ``costs``:
    the file contains known values, with their ``sources``; the others are assumptions.
    """

    name: str
    arch: str
    multiprocessors: int
    clock_ghz: float
    tensor_clock_ghz: float
    memory_bytes: int
    memory_gb_per_s: float
    l2_bytes: int
    smem_per_sm: int
    smem_per_block: int
    smem_reserved_per_block: int
    threads_per_sm: int
    threads_per_block: int
    blocks_per_sm: int
    registers_per_sm: int
    max_registers_per_thread: int
    peak_tflops: Mapping[str, float]
    instructions: tuple[str, ...]
    costs: Costs
    sources: Mapping[str, str]

    def resident_blocks(self, threads: int, registers: int, smem: int) -> int:
        """Return how many blocks of a kernel fit on one multiprocessor; 0 if not even one fits.

        ``registers``: per thread, as reported by ptxas. ``smem``: static and dynamic bytes per block. Registers are
        allocated per warp in units of 256, shared memory per block in units of 128 plus the system's reserve.
        """
        if threads > self.threads_per_block or registers > self.max_registers_per_thread or smem > self.smem_per_block:
            return 0
        warps = -(-threads // 32)
        per_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        per_block = int(self.block_bytes(Index.of(smem)))
        limits = (
            self.blocks_per_sm,
            self.threads_per_sm // (warps * 32),
            self.registers_per_sm // per_warp // warps,
            self.smem_per_sm // per_block,
        )
        return min(limits)

    def block_bytes(self, smem: Index) -> Index:
        """Return the shared memory in bytes, in whole units, that a block requesting ``smem`` occupies."""
        return (smem + self.smem_reserved_per_block).ceildiv(_SMEM_UNIT) * _SMEM_UNIT


def names() -> tuple[str, ...]:
    """Return the names of the descriptions that are part of polydyn."""
    return tuple(sorted(p.stem for p in HERE.glob("*.json")))


def load(name: str | Path) -> Hardware:
    """Return a description by name ("h200"), or from a JSON file given by its path.

    UnsupportedError: unknown name. PolydynError: the file has missing, unknown or invalid fields.
    """
    path = Path(name) if str(name).endswith(".json") else HERE / f"{name}.json"
    if not path.exists():
        raise UnsupportedError(
            f"unknown hardware description {name}", remedy=f"use one of {', '.join(names())}, or a path to a .json file"
        )
    raw: dict[str, Any] = json.loads(path.read_text())
    expected = {f.name for f in dataclasses.fields(Hardware)}
    if raw.keys() != expected:
        odd = ", ".join(sorted(raw.keys() ^ expected))
        raise PolydynError(f"{path.name}: missing or unknown fields: {odd}", remedy=f"see {HERE.name}/h100.json")
    costs = raw["costs"]
    if unknown := costs.keys() - {f.name for f in dataclasses.fields(Costs)}:
        raise PolydynError(f"{path.name}: unknown costs: {', '.join(sorted(unknown))}")
    invalid = [k for k, v in {**raw, **costs}.items() if isinstance(v, int | float) and v <= 0]
    if invalid:
        raise PolydynError(f"{path.name}: not positive: {', '.join(invalid)}")
    return Hardware(**{**raw, "instructions": tuple(raw["instructions"]), "costs": Costs(**costs)})


def match(device_name: str) -> Hardware | None:
    """Return the description of a device by the driver's name for it, or None."""
    for name in names():
        hardware = load(name)
        if hardware.name == device_name or device_name.startswith(hardware.name + " "):
            return hardware
    return None


def existing(target: str, name: str, multiprocessors: int) -> Hardware:
    """Return the description of a device of this machine, by the driver's name for it, for a target's architecture.

    A device without a description is assumed to be like the target's default device, with rates in proportion to its
    multiprocessors.
    """
    hardware = match(name)
    if hardware is not None and hardware.multiprocessors == multiprocessors:
        return hardware
    default = hardware or device_of(target)
    rates = {unit: rate * multiprocessors / default.multiprocessors for unit, rate in default.peak_tflops.items()}
    return dataclasses.replace(default, name=name, multiprocessors=multiprocessors, peak_tflops=rates)


def device_of(target: str) -> Hardware:
    """Return the device for which times of a target's kernels are estimated: the default one of its newest
    architecture.

    For architectures without a description, and for the emulation, it is that of ``SPECIAL``.
    """
    described = [a for a in architectures(target) if a in DEVICES]
    return load(DEVICES[described[-1] if described else SPECIAL])

"""Tuning tasks of CUDA products: loops, and the mapping from tile configurations to tiles of ``codegen.cuda_contract``.

All reductions are one loop. A configuration has the block (level ``b``), the part of a warp (``w``; or of a thread:
``t``), the instruction's granularity (``v``) and the ``stages`` of the ring; all are bound at compile time. The target
occupancy in blocks per SM, which bounds the registers, follows from the tile and the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from polydyn.codegen.cuda.group import product_refusal
from polydyn.codegen.cuda.instructions import INSTRUCTIONS
from polydyn.codegen.cuda.limits import (
    PRODUCT_INSTRUCTION,
    TF32,
    broken_rule,
    grain,
    of_warp,
    registers,
    shared_bytes,
    warp_part,
)
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import CudaContractKernel
from polydyn.codegen.cuda.work import UNITS, WARP, WAVEFRONT
from polydyn.errors import BuildError, Declined, ScheduleError
from polydyn.gpu.cache import content_key
from polydyn.gpu.compiler import compiler_version, device_headers
from polydyn.gpu.hardware import Hardware as Device
from polydyn.gpu.hardware import device_of
from polydyn.gpu.targets import EMULATED, newest, single
from polydyn.lowering.contract import ContractGroup
from polydyn.schedules.index import Index, product
from polydyn.search.backbone import GroupKey, Tile
from polydyn.search.hardware import Hardware, Instruction
from polydyn.search.tasks.cpu import Task, accumulation, backbone_of_roles, declined_data

STEPS = "steps"
"""The loop that represents several reductions."""
STAGES = 4
"""Stages of a ring if a space does not specify them."""
GENERATOR = "1"
"""Incremented when equal tiles give other kernels."""


def hardware_of(device: Device) -> Hardware:
    """Convert a GPU's data file to the form of spaces and cost models: the instructions of kernels, at their peaks.

    A warp's part is a multiple of the instruction's ``tile``. Shared memory includes the system's reservation per
    block.
    """
    rates = {**UNITS, TF32: TF32}
    per = 1e12 / device.multiprocessors
    instructions = tuple(
        Instruction(
            name, "tensor" if INSTRUCTIONS[name].warp else "scalar", dtype, grain(name),
            device.peak_tflops[rates[dtype]] * per,
        )
        for dtype, name in PRODUCT_INSTRUCTION.items()
        if rates[dtype] in device.peak_tflops  # not all devices support 8-bit floats
    )  # fmt: skip
    return Hardware(
        device.name,
        "gpu",
        device.multiprocessors,
        device.smem_per_sm,
        device.smem_per_block + device.smem_reserved_per_block,
        WAVEFRONT * device.clock_ghz * 1e9,
        device.memory_gb_per_s * 1e9,
        device.registers_per_sm,
        device.max_registers_per_thread,
        WARP,
        instructions,
        unit_threads=device.threads_per_sm,
        block_threads=device.threads_per_block,
        unit_blocks=device.blocks_per_sm,
    )


@dataclass(frozen=True)
class CudaTask(Task[ContractGroup]):
    """A group to tune for a CUDA target. ``kernel`` builds its versions; ``device`` gives the limits."""

    kernel: CudaContractKernel
    device: Device

    @property
    def extents(self) -> dict[str, Index]:
        """Maps a loop to its extent; all reductions are one loop."""
        extents = dict(accumulation(self.group).iters)
        r = self.form.roles
        extents[self.backbone.reduction[-1].name] = product(extents[x] for x in (*r.inner, r.block))
        return extents

    @property
    def loops(self) -> tuple[str, str, str]:
        """The loops of rows, columns and the reduction."""
        return self.form.roles.row, self.form.roles.col, self.backbone.reduction[-1].name

    @cached_property
    def defaults(self) -> tuple[Tile, ...]:
        """The configurations of the tiles that the group has without tuning."""
        return tuple(dict.fromkeys(self.tuple_of(t) for t in self.kernel.defaults))

    def refusal(self, tile: Tile) -> str | None:
        """Return the name of the hard constraint that a configuration breaks, or None."""
        try:
            self.tile(tile)
        except ScheduleError as e:
            return e.rule
        return None

    def tile(self, tile: Tile) -> CudaTile:
        """Return the tile of a configuration. ScheduleError: it breaks a rule, which is named."""
        rows, columns, steps = self.loops
        name = PRODUCT_INSTRUCTION[self.kernel.dtype]
        block, warp, thread = (tile.level(x) for x in "bwt")
        if thread and INSTRUCTIONS[name].warp:
            raise _broken(tile, f"{name} has no tiles of threads")
        if tile.get(f"w.{steps}") > grain(name)[2]:
            raise _broken(tile, "a warp executes one instruction's steps at a time")
        part = (thread[rows], thread[columns]) if thread else of_warp(name, warp[rows], warp[columns])
        alone = CudaTile(name, block[rows], block[columns], block[steps], *part, tile.get("stages", STAGES))
        if rule := broken_rule(alone, self.kernel.product.dtypes):
            raise _broken(tile, rule)
        resident = self.device.resident_blocks(alone.threads, registers(alone), self.shared(alone))
        if not resident:
            raise _broken(tile, "no block fits an SM")
        return replace(alone, blocks=resident)

    def shared(self, tile: CudaTile) -> int:
        """Return the shared memory of a block in bytes."""
        return shared_bytes(tile, self.kernel.product.dtypes, self.kernel.product.sums)

    def tuple_of(self, tile: CudaTile) -> Tile:
        """Return the configuration of a tile."""
        sizes = dict.fromkeys((x.name for x in self.backbone.loops), (1, 1, 1))
        unit = grain(tile.instruction)
        part = (*warp_part(tile), unit[2])
        sizes |= dict(zip(self.loops, zip((tile.bm, tile.bn, tile.bk), part, unit, strict=True), strict=True))
        levels = [(f"{level}.{n}", v[k]) for k, level in enumerate("bwv") for n, v in sizes.items()]
        return Tile((*levels, ("stages", tile.stages)))


def _broken(tile: Tile, rule: str) -> ScheduleError:
    return ScheduleError(f"tile {tile} is not supported", rule=rule, remedy="tune the group again")


def cuda_task_of(key: str, form: ContractGroup, target: str, tf32: bool = False) -> CudaTask | Declined:
    """Return the task of a group for one architecture, or why it is not tuned."""
    group, roles = form.lowered.group, form.roles
    if refusal := product_refusal(group, roles):
        return refusal
    kernel = CudaContractKernel(f"contract_{key[:12]}", group, roles, newest(target), tf32, fixed=form.fixed)
    if refusal := declined_data(group, "it has one row" if roles.row == "one" else ""):
        return refusal
    backbone = backbone_of_roles(group, roles, kernel.dtype, STEPS if roles.inner else "")
    generator = f"{GENERATOR} {content_key(*device_headers().values())[:12]}"
    name = GroupKey(key, kernel.dtype, target, compiler=compiler_of(single(target)), generator=generator)
    return CudaTask(form, name, backbone, kernel, device_of(target))


def compiler_of(arch: str) -> str:
    """Return the version of the compiler for an architecture; empty without one."""
    if arch == EMULATED:
        return EMULATED
    try:
        return compiler_version()
    except BuildError:
        return ""

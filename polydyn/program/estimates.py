"""Launch times of CUDA kernels as closed forms over the symbols: what the host program chooses candidates by.

TSCompiler's waves over Vortex's recursion (``cost.py`` has both as printed; this is the form of ``cost.polydyn``). A
multiprocessor holds so many blocks of a kernel at a time; it needs at least its blocks' shares of a full one, and at
least a lone block's time for each wave. The machine needs at least the time of its memory traffic. What a block does
is said by the kernel's generator (``codegen.cuda_work``), rates and limits are those of a hardware description.

Times are whole nanoseconds, those inside a block picoseconds. Whatever the sizes, no sum or product of an estimate
leaves 64 bits: a count is taken for ``MOST`` at most, a block's time likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import TypeAlias

from polydyn.codegen.kernel import UNIT, Block, Work
from polydyn.gpu.hardware import Costs, Hardware
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.decision import with_costs
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum

V = Index.of
Resources: TypeAlias = "Mapping[str, Mapping[str, Mapping[str, int]]]"
"""Kernel -> architecture -> what the compiler says of it (``registers``)."""

MOST = 2**30
"""The largest count of waves, of blocks and of nanoseconds of a block that is told from larger ones."""
LONGEST = 2**40
"""Nanoseconds beyond which measured factors do not tell times apart."""
RESULT_BYTES = 8
"""Of shared memory for each result: there and back."""
PARTS = 8
"""The part of a launch's shorter time that is not hidden is a whole number of these."""
SCHEDULERS = 4
"""Parts of a multiprocessor, each with tensor cores of its own; a warp has those of one."""


def launch_time(
    work: Work, threads: int, grid: Index, smem: Index, moved: Index, hardware: Hardware,
    registers: int | None = None, kept: Index = ZERO,
) -> Index:  # fmt: skip
    """Nanoseconds of one launch, over the symbols of its arguments and ``nth``, the number of multiprocessors.

    ``threads``: of a block; ``grid``: blocks; ``smem``: bytes of shared memory of a block; ``moved``: bytes that the
    launch moves at least; ``kept``: those of a workspace, which L2 holds for the next launch; ``registers``: of a
    thread, as the compiler says, else as ``work`` supposes.
    """
    resident = resident_blocks(threads, registers or work.registers, smem, hardware)
    full, alone = step_time(work, threads, hardware)
    least, end = ends_time(work, threads, hardware)
    steps, tiles = minimum(work.steps, MOST), minimum(work.tiles, MOST)
    share = minimum(grid.ceildiv(THREADS), MOST)
    waves = minimum(share.ceildiv(resident), MOST)
    busy = share * _nanoseconds(maximum(V(end).ceildiv(resident), least), tiles, _tile(work, steps * full, end))
    busy = maximum(busy, waves * _nanoseconds(V(end), tiles, _tile(work, steps * alone, end)))
    traffic = memory_time(work, grid, waves, resident, moved, kept, hardware)
    exposed = round(PARTS * (1 - hardware.costs.hidden_memory))
    return round(hardware.costs.launch_ns) + maximum(busy, traffic) + minimum(busy, traffic) // PARTS * exposed


def _tile(work: Work, steps: Index, end: int) -> Index:
    """Picoseconds of a tile: of those in turn two are under way, the end of one beside the steps of the other."""
    return steps if work.tiles == ONE else maximum(steps, (steps + end) // 2)


def _nanoseconds(ends: Index, tiles: Index, tile: Index) -> Index:
    """Of a block with its ends and its tiles, all in picoseconds."""
    if tiles == ONE:
        return minimum((ends + tile).ceildiv(1000), MOST)
    return minimum(ends.ceildiv(1000) + tiles * minimum(tile.ceildiv(1000), MOST), MOST)


def memory_time(
    work: Work, grid: Index, waves: Index, resident: Index, moved: Index, kept: Index, hardware: Hardware
) -> Index:
    """Nanoseconds of the traffic with memory. What a launch leaves for the next one stays in L2, as much as fits.

    What else a launch moves comes from memory once. Where L2 does not hold it, blocks of a wave share what they read
    along a strip and across it, and no wave reads more again than what L2 does not hold.
    """
    rate, l2 = round(hardware.memory_gb_per_s), hardware.l2_bytes
    once = moved // rate
    if kept != ZERO:
        near = round(hardware.costs.l2_bytes * hardware.clock_ghz)
        once = once + maximum(0, kept - l2) // rate + kept // (near * V(THREADS))
    if not work.strip:
        return once
    together = resident * THREADS
    sharing = maximum(1, 2 * work.strip * together // (work.strip**2 + together))
    step = ceil(1000 * work.traffic / rate)
    block = minimum((minimum(work.steps, MOST) * step).ceildiv(1000) * minimum(work.tiles, MOST), MOST)
    read = minimum(grid, MOST) * block // sharing
    again = minimum(maximum(0, moved - l2) // rate, MOST) * waves
    return once + minimum(maximum(0, read - once), again)


def resident_blocks(threads: int, registers: int, smem: Index, hardware: Hardware) -> Index:
    """Blocks that a multiprocessor holds at a time (TSCompiler 6, with floors); at least one, so that it divides."""
    most = max(1, hardware.resident_blocks(threads, registers, 0))
    by_memory = Index.of(hardware.smem_per_sm) // hardware.block_bytes(smem)
    return maximum(1, minimum(most, by_memory))


def ends_time(work: Work, threads: int, hardware: Hardware) -> tuple[int, int]:
    """Picoseconds of the end of a tile: what it takes of a full multiprocessor, and of a block by itself.

    Its results pass through shared memory and on to L2, beside the arithmetic of epilogues. A block by itself waits
    for memory and for its cluster, too; it may have fewer warps than there are schedulers.
    """
    c = hardware.costs
    moved = max(work.elements * RESULT_BYTES / c.shared_bytes, work.results / c.l2_bytes)
    least = _together(work.last / c.issued, moved, c)
    alone = _together(work.last / min(c.issued, threads / 32), moved, c) + 2 * c.meeting_clocks * (work.cluster > 1)
    return ceil(1000 * least / hardware.clock_ghz), ceil(1000 * (work.ends * c.latency_ns + alone / hardware.clock_ghz))


def step_time(work: Work, threads: int, hardware: Hardware) -> tuple[int, int]:
    """Picoseconds of a step: what it takes of a multiprocessor that has enough blocks, and of a block by itself."""
    c = hardware.costs
    share = c.mma_share if work.by_warps and work.unit != "f32" else 1.0
    rate = hardware.peak_tflops[work.unit] * 1000 / hardware.multiprocessors * share  # operations in a nanosecond
    few = max(1.0, SCHEDULERS / (threads / 32)) if work.by_warps else 1.0
    compute = max(work.flops / rate, work.instructions / c.issued / hardware.clock_ghz)
    copied = max(work.traffic / c.l2_bytes, work.shared / c.shared_bytes) / hardware.clock_ghz
    wait = work.waits * c.latency_ns / work.flight
    lone = max(wait, _together(compute * few, copied, c) + c.barrier_clocks * work.by_warps / hardware.clock_ghz)
    return max(1, ceil(1000 * _together(compute, copied, c))), max(1, ceil(1000 * lone))


def _together(a: float, b: float, costs: Costs) -> float:
    """What arithmetic and copies take that are beside each other."""
    return max(a, b) + min(a, b) * (1 - costs.hidden)


def estimated(plan: HostPlan, hardware: Hardware, resources: Resources | None = None) -> HostPlan:
    """The plan with its launches' candidates compared by estimates of their time on a device.

    ``resources``: what the compiler said of kernels for its architecture, as far as they were compiled.
    """
    of = _Estimates(hardware, resources or {})
    return replace(plan, launches=tuple(map(of.launch, plan.launches)))


class _Estimates:
    """The estimates of a plan; those of equal launches are one object."""

    def __init__(self, hardware: Hardware, resources: Resources) -> None:
        self.hardware, self.resources = hardware, resources
        self._memo: dict[tuple[object, ...], Index] = {}

    def launch(self, x: Launch) -> Launch:
        """The launch with its candidates compared by their times."""
        return replace(x, decision=with_costs(x.decision, lambda k: self.candidate(x.candidates[k], x.bytes)))

    def candidate(self, c: Candidate, moved: Index) -> Index:
        """The time of a candidate and those after it; 0 when the work of its blocks is not known."""
        b = c.block
        if b is None or b.work is None:
            return ZERO
        total = self._one(c, b, moved, c.workspace)
        for x in c.after:
            if x.block is not None:  # no blocks: left out
                total = total + minimum(1, x.tasks) * self._one(x, x.block, ZERO, c.workspace)
        return total if b.factor == UNIT else minimum(total, LONGEST) * b.factor // UNIT

    def _one(self, c: Candidate, b: Block, moved: Index, kept: Index) -> Index:
        if b.work is None:
            return V(round(self.hardware.costs.launch_ns))
        registers = self.resources.get(c.kernel, {}).get(self.hardware.arch, {}).get("registers")
        arguments = (b.work, b.threads, c.tasks, c.scratch, moved)
        key = (*arguments, registers, kept)
        if key not in self._memo:
            self._memo[key] = launch_time(*arguments, self.hardware, registers, kept)
        return self._memo[key]

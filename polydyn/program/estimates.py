"""Launch times of CUDA kernels as closed forms over the symbols. The host program selects candidates by them.

The model combines the waves of TSCompiler with the recursion of Vortex (``cost.py`` has both as printed; this is the
form of ``cost.polydyn``). An SM holds a fixed number of blocks of a kernel at a time. Its time is at least its number
of blocks times the time of one block on a full SM, and at least the number of waves times the time of a lone block. The
launch takes at least the time of its memory traffic. The kernel generator specifies the work of a block
(``codegen.cuda_work``); a hardware description gives rates and limits.

Times are whole nanoseconds; times inside a block are picoseconds. No sum or product of an estimate exceeds 64 bits at
any size: counts, and the time of a block, are limited to ``MAX_COUNT``.
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
from polydyn.schedules.decision import Decision, members, with_costs
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum

V = Index.of
Resources: TypeAlias = "Mapping[str, Mapping[str, Mapping[str, int]]]"
"""Maps kernel -> architecture -> compiler report (``registers``)."""

MAX_COUNT = 2**30
"""Upper limit of the counts of waves and blocks and of the nanoseconds of a block; larger values count as this."""
MAX_NANOSECONDS = 2**40
"""Upper limit in nanoseconds of an estimate before it is multiplied by a measured factor."""
RESULT_BYTES = 8
"""Bytes of shared-memory traffic per result: one store and one load."""
EXPOSED_PARTS = 8
"""Denominator of the fraction of a launch's shorter time that is not hidden."""
SCHEDULERS = 4
"""Warp schedulers per SM, each with its own tensor cores. A warp uses only its scheduler's."""


def launch_time(
    work: Work, threads: int, grid: Index, smem: Index, moved: Index, hardware: Hardware,
    registers: int | None = None, workspace: Index = ZERO,
) -> Index:  # fmt: skip
    """Return the nanoseconds of one launch, over the symbols of its arguments and ``nth``, the number of SMs.

    ``threads``: threads per block; ``grid``: number of blocks; ``smem``: shared memory per block in bytes; ``moved``:
    minimum bytes that the launch moves; ``workspace``: bytes of workspace, which stay in L2 for the next launch;
    ``registers``: registers per thread from the compiler report, or None for those that ``work`` assumes.
    """
    resident = resident_blocks(threads, registers or work.registers, smem, hardware)
    full, alone = step_time(work, threads, hardware)
    least, end = ends_time(work, threads, hardware)
    steps, tiles = minimum(work.steps, MAX_COUNT), minimum(work.tiles, MAX_COUNT)
    share = minimum(grid.ceildiv(THREADS), MAX_COUNT)
    waves = minimum(share.ceildiv(resident), MAX_COUNT)
    busy = share * _nanoseconds(maximum(V(end).ceildiv(resident), least), tiles, _tile(work, steps * full, end))
    busy = maximum(busy, waves * _nanoseconds(V(end), tiles, _tile(work, steps * alone, end)))
    traffic = memory_time(work, grid, waves, resident, moved, workspace, hardware)
    exposed = round(EXPOSED_PARTS * (1 - hardware.costs.hidden_memory))
    return round(hardware.costs.launch_ns) + maximum(busy, traffic) + minimum(busy, traffic) // EXPOSED_PARTS * exposed


def _tile(work: Work, steps: Index, end: int) -> Index:
    """Return the picoseconds of a tile. With several tiles per block, the end of one overlaps the steps of the next."""
    return steps if work.tiles == ONE else maximum(steps, (steps + end) // 2)


def _nanoseconds(ends: Index, tiles: Index, tile: Index) -> Index:
    """Return the nanoseconds of a block, from the picoseconds of its ends and of its tiles."""
    if tiles == ONE:
        return minimum((ends + tile).ceildiv(1000), MAX_COUNT)
    return minimum(ends.ceildiv(1000) + tiles * minimum(tile.ceildiv(1000), MAX_COUNT), MAX_COUNT)


def memory_time(
    work: Work, grid: Index, waves: Index, resident: Index, moved: Index, workspace: Index, hardware: Hardware
) -> Index:
    """Return the nanoseconds of the memory traffic. The workspace of the next launch stays in L2, as far as it fits.

    All other data is loaded from memory once. If L2 cannot hold it, the blocks of a wave share what they read along a
    strip and across it, and a wave reloads at most the part that L2 does not hold.
    """
    rate, l2 = round(hardware.memory_gb_per_s), hardware.l2_bytes
    once = moved // rate
    if workspace != ZERO:
        near = round(hardware.costs.l2_bytes * hardware.clock_ghz)
        once = once + maximum(0, workspace - l2) // rate + workspace // (near * V(THREADS))
    if not work.strip:
        return once
    together = resident * THREADS
    sharing = maximum(1, 2 * work.strip * together // (work.strip**2 + together))
    step = ceil(1000 * work.traffic / rate)
    block = minimum((minimum(work.steps, MAX_COUNT) * step).ceildiv(1000) * minimum(work.tiles, MAX_COUNT), MAX_COUNT)
    read = minimum(grid, MAX_COUNT) * block // sharing
    again = minimum(maximum(0, moved - l2) // rate, MAX_COUNT) * waves
    return once + minimum(maximum(0, read - once), again)


def resident_blocks(threads: int, registers: int, smem: Index, hardware: Hardware) -> Index:
    """Return the number of resident blocks per SM (TSCompiler 6, with floors). It is at least 1, as it is a divisor."""
    most = max(1, hardware.resident_blocks(threads, registers, 0))
    by_memory = Index.of(hardware.smem_per_sm) // hardware.block_bytes(smem)
    return maximum(1, minimum(most, by_memory))


def ends_time(work: Work, threads: int, hardware: Hardware) -> tuple[int, int]:
    """Return the picoseconds of the end of a tile: its time on a full SM, and the time of a lone block.

    The results pass through shared memory to L2, in parallel with the arithmetic of epilogues. A lone block also waits
    for memory and for its cluster, and may have fewer warps than there are schedulers.
    """
    c = hardware.costs
    moved = max(work.elements * RESULT_BYTES / c.shared_bytes, work.results / c.l2_bytes)
    least = _overlapped(work.last / c.issued, moved, c)
    alone = _overlapped(work.last / min(c.issued, threads / 32), moved, c) + 2 * c.meeting_clocks * (work.cluster > 1)
    return ceil(1000 * least / hardware.clock_ghz), ceil(1000 * (work.ends * c.latency_ns + alone / hardware.clock_ghz))


def step_time(work: Work, threads: int, hardware: Hardware) -> tuple[int, int]:
    """Return the picoseconds of a step: its time on an SM with enough blocks, and the time of a lone block."""
    c = hardware.costs
    share = c.mma_share if work.by_warps and work.unit != "f32" else 1.0
    rate = hardware.peak_tflops[work.unit] * 1000 / hardware.multiprocessors * share  # operations in a nanosecond
    few = max(1.0, SCHEDULERS / (threads / 32)) if work.by_warps else 1.0
    compute = max(work.flops / rate, work.instructions / c.issued / hardware.clock_ghz)
    copied = max(work.traffic / c.l2_bytes, work.shared / c.shared_bytes) / hardware.clock_ghz
    wait = work.waits * c.latency_ns / work.flight
    lone = max(wait, _overlapped(compute * few, copied, c) + c.barrier_clocks * work.by_warps / hardware.clock_ghz)
    return max(1, ceil(1000 * _overlapped(compute, copied, c))), max(1, ceil(1000 * lone))


def _overlapped(a: float, b: float, costs: Costs) -> float:
    """Return the time of arithmetic and copies that overlap partly."""
    return max(a, b) + min(a, b) * (1 - costs.hidden)


def estimated(plan: HostPlan, hardware: Hardware, resources: Resources | None = None) -> HostPlan:
    """Return the plan with decisions that compare the estimated times of candidates on a device.

    ``resources``: the compiler reports of the kernels that were compiled for the device's architecture.
    """
    estimates = _Estimates(hardware, resources or {})
    launches = tuple(map(estimates.launch, plan.launches))
    notes = (f"{k} is not launched: ptxas serialises its products (C75xx)" for k in sorted(estimates.rejected))
    return replace(plan, launches=launches, notes=(*plan.notes, *notes))


class _Estimates:
    """The estimates of a plan. Equal launches share one object."""

    def __init__(self, hardware: Hardware, resources: Resources) -> None:
        self.hardware, self.resources = hardware, resources
        self.rejected: set[str] = set()
        self._memo: dict[tuple[object, ...], Index] = {}

    def launch(self, x: Launch) -> Launch:
        """Return the launch with a decision that compares the times of its candidates."""
        decision = self._without_serialised(x)
        return replace(x, decision=with_costs(decision, lambda k: self.candidate(x.candidates[k], x.bytes)))

    def _without_serialised(self, x: Launch) -> Decision:
        """Return the decision without candidates whose products ptxas serialises, unless there is no other."""
        slow = {k for k, c in enumerate(x.candidates) if self._use(c).get("serialised")}
        if not slow or len(slow) == len(x.candidates):
            return x.decision
        self.rejected |= {x.candidates[k].kernel for k in slow}
        return members(x.decision, lambda named: named - slow or set(range(len(x.candidates))) - slow)

    def _use(self, c: Candidate) -> Mapping[str, int]:
        return self.resources.get(c.kernel, {}).get(self.hardware.arch, {})

    def candidate(self, c: Candidate, moved: Index) -> Index:
        """Return the time of a candidate and of the kernels after it; 0 if the work of its blocks is unknown."""
        b = c.block
        if b is None or b.work is None:
            return ZERO
        total = self._one(c, b, moved, c.workspace)
        for x in c.after:
            if x.block is not None:  # a kernel without blocks is skipped
                total = total + minimum(1, x.tasks) * self._one(x, x.block, ZERO, c.workspace)
        return total if b.factor == UNIT else minimum(total, MAX_NANOSECONDS) * b.factor // UNIT

    def _one(self, c: Candidate, b: Block, moved: Index, workspace: Index) -> Index:
        if b.work is None:
            return V(round(self.hardware.costs.launch_ns))
        registers = self._use(c).get("registers")
        arguments = (b.work, b.threads, c.tasks, c.scratch, moved)
        key = (*arguments, registers, workspace)
        if key not in self._memo:
            self._memo[key] = launch_time(*arguments, self.hardware, registers, workspace)
        return self._memo[key]

"""Assumptions about a GPU, in addition to its peaks and limits, for estimating launch times."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """The default values are assumptions for devices whose description has none (``Hardware.costs``).

    ``launch_ns``: from the end of one kernel to the first instruction of the next one on a stream. ``latency_ns``: of a
    load from memory under load; 400 clocks (PMC10448217, Table 3: A100, H100) are 230 to 280 ns. ``barrier_clocks``:
    time that a single block loses in each step, waiting for its own loads of fragments and for its warps.
    ``meeting_clocks``: time until a block of a cluster sees a write of another (arXiv 2402.13499: between
    multiprocessors). Per multiprocessor and clock: ``l2_bytes`` from L2 (7219 GB/s of an A100, same table),
    ``shared_bytes`` from shared memory, ``issued`` instructions. ``mma_share``: the fraction of the tensor peak that
    warp-level instructions reach. ``hidden``: a step overlaps its arithmetic and its copies; this is the overlapped
    fraction of the shorter one. ``hidden_memory``: the same for a launch's memory traffic and its blocks' work.
    """

    launch_ns: float = 1500
    latency_ns: float = 350
    barrier_clocks: float = 50
    meeting_clocks: float = 180
    l2_bytes: float = 48
    shared_bytes: float = 128
    issued: float = 4
    mma_share: float = 1.0
    hidden: float = 0.75
    hidden_memory: float = 0.875

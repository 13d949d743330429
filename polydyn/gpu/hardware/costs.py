"""What estimates of launch times suppose of a GPU beside its peaks and limits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """The defaults are suppositions, for devices whose description has nothing better (``Hardware.costs``).

    ``launch_ns``: between the end of one kernel and the first instruction of the next one on a stream. ``latency_ns``:
    of a load from memory that is in use; 400 clocks (PMC10448217, Table 3: A100, H100) are 230 to 280.
    ``barrier_clocks``: what a block by itself loses in each step: it waits for its own loads of fragments, and for its
    warps. ``meeting_clocks``: until a block of a cluster sees what another one says (arXiv 2402.13499: between
    multiprocessors). Of a multiprocessor in a clock: ``l2_bytes`` from L2 (7219 GB/s of an A100, same table),
    ``shared_bytes`` from shared memory, ``issued`` instructions. ``mma_share``: the part of the tensor peak that warps'
    own instructions reach. ``hidden``: the part of the shorter of a step's arithmetic and copies that is beside the
    longer one; ``hidden_memory``: likewise of a launch's traffic with memory and all that its blocks do.
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

"""A generated CUDA kernel: text, and what its launcher must know."""

from __future__ import annotations

from dataclasses import dataclass, field

from polydyn.schedules.index import Index

SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory a block may have on every device from sm_80 on (sm_86 and sm_89 have the least)."""


@dataclass(frozen=True)
class CudaKernel:
    """One version of a group's kernel.

    The parameters are the ``buffers`` (pointers) and then the ``symbols`` (int64). ``grid``: blocks, a one-dimensional
    grid; ``smem``: bytes of dynamic shared memory; both over the symbols. A version may be launched where every index
    of ``multiples`` is a multiple of its number (elements) and ``smem`` fits the device. ``version`` names the choice.
    """

    name: str
    text: str
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]
    threads: int
    grid: Index
    smem: Index
    version: str
    multiples: tuple[tuple[Index, int], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def fits(self, env: dict[str, int], limit: int = SHARED_LIMIT) -> bool:
        """Whether this version may be launched for these values of the symbols."""
        whole = all(i.evaluate(env) % n == 0 for i, n in self.multiples)
        return whole and self.smem.evaluate(env) <= limit

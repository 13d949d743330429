"""The symbols of a host program that are none of the model's, and conditions on sizes. Standard library only."""

from __future__ import annotations

from typing import TypeAlias

from polydyn.schedules.index import Index

THREADS = "nth"
"""Number of threads of the context; on a device, of its multiprocessors."""

SHARED, ARCH, LACKING = "%shared", "%arch", "%lacking"
"""Bytes of shared memory that a block may have; the compute capability whose own instructions may be used, 0: none's;
what the device does wrong, a bit for each of ``capability.FEATURES``. No model has symbols of these names. They are 0
on a CPU, where nothing asks for them."""

Condition: TypeAlias = tuple[Index, str, Index]
"""Two sizes and the relation that must hold between them, one of a ``Guard``'s."""


def holds(a: int, relation: str, b: int) -> bool:
    """Whether the relation of a guard or condition holds."""
    return {"==": a == b, "<=": a <= b, ">=": a >= b, "%==": a % b == 0 if b else a == 0}[relation]

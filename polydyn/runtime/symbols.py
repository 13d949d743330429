"""The symbols of a host program that are not the model's, and conditions on sizes. Standard library only."""

from __future__ import annotations

from typing import TypeAlias

from polydyn.schedules.index import Index

THREADS = "nth"
"""Number of threads of the context, or of SMs of a device."""

SHARED, ARCH, LACKING = "%shared", "%arch", "%lacking"
"""Maximum bytes of shared memory per block; the compute capability whose special instructions may be used, or 0; the
features that the device does not support correctly, one bit for each of ``capability.FEATURES``. No model has symbols
with these names. On a CPU they are 0 and unused."""

Condition: TypeAlias = tuple[Index, str, Index]
"""Two sizes and the relation that must hold between them, one of a ``Guard``'s relations."""


def holds(a: int, relation: str, b: int) -> bool:
    """Return whether the relation of a guard or condition holds."""
    return {"==": a == b, "<=": a <= b, ">=": a >= b, "%==": a % b == 0 if b else a == 0}[relation]

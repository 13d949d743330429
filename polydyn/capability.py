"""Which devices have the instructions of which CUDA architecture."""

from __future__ import annotations

__all__ = ["capability", "runs_on"]


def capability(arch: str) -> int:
    """The compute capability of an architecture: 90 for sm_90a."""
    return int("".join(c for c in arch if c.isdigit()))


def runs_on(arch: str, device: int) -> bool:
    """Whether a device of a compute capability has the instructions of an architecture.

    Those of a name that ends in a letter (sm_90a) no other has; all else newer devices have too.
    """
    return capability(arch) == device if arch[-1].isalpha() else capability(arch) <= device

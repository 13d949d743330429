"""The device side of generated CUDA kernels: C++ headers (read ``README.md`` here first), and who has what of them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HEADERS", "capability", "runs_on"]

HEADERS = Path(__file__).parent
"""The folder of ``pd_device.cuh`` and its companions."""


def capability(arch: str) -> int:
    """The compute capability of an architecture: 90 for sm_90a."""
    return int("".join(c for c in arch if c.isdigit()))


def runs_on(arch: str, device: int) -> bool:
    """Whether a device of a compute capability has the instructions of an architecture.

    Those of a name that ends in a letter (sm_90a) no other has; all else newer devices have too.
    """
    return capability(arch) == device if arch[-1].isalpha() else capability(arch) <= device

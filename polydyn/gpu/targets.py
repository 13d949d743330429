"""The names of CUDA targets and their architectures."""

from __future__ import annotations

from polydyn.capability import capability, runs_on
from polydyn.errors import UnsupportedError

__all__ = [
    "ARCHITECTURES", "BASE", "CUDA_TARGETS", "EMULATED", "SPECIAL", "architectures", "is_cuda", "named",
    "newest", "single", "special_arch", "special_runs",
]  # fmt: skip

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")
"""The architectures for which kernels are compiled."""

EMULATED = "emulated"
"""The architecture of the CPU libcuda, for which kernels are compiled for strict emulation."""

SPECIAL = "sm_90a"
"""The architecture with special instructions that kernels use (wgmma, TMA)."""

FLOAT8 = "sm_89"
"""The first architecture whose tensor cores multiply 8-bit floats."""

BASE = "sm_80"
"""Every program also contains its kernels as PTX for this architecture, for devices that are not listed."""

CUDA_TARGETS = ("cuda", *(f"cuda:{a}" for a in (*ARCHITECTURES, EMULATED)))
"""Targets of ``polydyn.compile``; ``cuda`` means every architecture."""


def special_arch(arch: str) -> int:
    """Return the compute capability that a kernel with special instructions needs (90 for sm_90a), else 0."""
    return 0 if arch == BASE else capability(arch)


def special_runs(arch: str, special: int) -> bool:
    """Whether a kernel runs if instructions of the capability ``special`` may be used (0: only those of ``BASE``)."""
    return arch == BASE or runs_on(arch, special)


def named(device: int) -> str:
    """Return the architecture for a device's compute capability (90: sm_90a); empty if it is not supported."""
    return next((a for a in ARCHITECTURES if capability(a) == device), "")


def is_cuda(target: str) -> bool:
    """Whether a target is a CUDA target. UnsupportedError: it starts with ``cuda`` but is unknown."""
    if target.partition(":")[0] != "cuda":
        return False
    if target not in CUDA_TARGETS:
        raise UnsupportedError(
            f"unknown target {target}", rule="known targets", remedy=f"use {', '.join(CUDA_TARGETS)}"
        )
    return True


def architectures(target: str) -> tuple[str, ...]:
    """Return the architectures for which a CUDA target is compiled."""
    is_cuda(target)
    return ARCHITECTURES if target == "cuda" else (target.partition(":")[2],)


def single(target: str) -> str:
    """Return the only architecture of a target. UnsupportedError: it has several."""
    names = architectures(target)
    if len(names) != 1:
        raise UnsupportedError(
            f"target {target} has several architectures",
            rule="records belong to one architecture",
            remedy=f"use one of {CUDA_TARGETS[1:]}",
        )
    return names[0]


def newest(target: str) -> str:
    """Return the architecture whose special instructions some of a target's kernels may use; else ``BASE``.

    The CPU libcuda presents itself as an H200.
    """
    found = architectures(target)
    if {SPECIAL, EMULATED} & {*found}:
        return SPECIAL
    return FLOAT8 if any(runs_on(FLOAT8, capability(a)) for a in found) else BASE

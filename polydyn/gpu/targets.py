"""The names of CUDA targets and what each stands for."""

from __future__ import annotations

from polydyn.capability import capability, runs_on
from polydyn.errors import UnsupportedError

__all__ = [
    "ARCHITECTURES", "BASE", "CUDA_TARGETS", "EMULATED", "SPECIAL", "architectures", "is_cuda", "named",
    "newest", "single", "special_arch", "special_runs",
]  # fmt: skip

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")
"""What kernels are compiled for."""

EMULATED = "emulated"
"""The architecture of the CPU libcuda: kernels are compiled for strict emulation."""

SPECIAL = "sm_90a"
"""The architecture whose special instructions kernels use (wgmma, TMA)."""

FLOAT8 = "sm_89"
"""The architecture from which on tensor cores multiply floats of 8 bits."""

BASE = "sm_80"
"""Every program has its kernels as PTX for this architecture too, for devices that it does not name."""

CUDA_TARGETS = ("cuda", *(f"cuda:{a}" for a in (*ARCHITECTURES, EMULATED)))
"""Targets of ``polydyn.compile``: ``cuda`` is every architecture."""


def special_arch(arch: str) -> int:
    """The compute capability that a kernel with special instructions needs (90 for sm_90a); 0 for other kernels."""
    return 0 if arch == BASE else capability(arch)


def special_runs(arch: str, special: int) -> bool:
    """Whether a kernel runs where instructions of the compute capability ``special`` may be used (0: of ``BASE``)."""
    return arch == BASE or runs_on(arch, special)


def named(device: int) -> str:
    """The architecture of a device's compute capability (90: sm_90a); empty for an unsupported one."""
    return next((a for a in ARCHITECTURES if capability(a) == device), "")


def is_cuda(target: str) -> bool:
    """Whether a target is a CUDA one. UnsupportedError: it begins like one but names no architecture."""
    if target.partition(":")[0] != "cuda":
        return False
    if target not in CUDA_TARGETS:
        raise UnsupportedError(
            f"unknown target {target}", rule="known targets", remedy=f"use {', '.join(CUDA_TARGETS)}"
        )
    return True


def architectures(target: str) -> tuple[str, ...]:
    """The architectures that a CUDA target is compiled for."""
    is_cuda(target)
    return ARCHITECTURES if target == "cuda" else (target.partition(":")[2],)


def single(target: str) -> str:
    """The one architecture of a target. UnsupportedError: it has several."""
    names = architectures(target)
    if len(names) != 1:
        raise UnsupportedError(
            f"target {target} is several architectures", rule="records are of one", remedy=f"one of {CUDA_TARGETS[1:]}"
        )
    return names[0]


def newest(target: str) -> str:
    """The architecture whose special instructions some versions of a target's kernels may use; else ``BASE``.

    The CPU libcuda calls itself an H200.
    """
    found = architectures(target)
    if {SPECIAL, EMULATED} & {*found}:
        return SPECIAL
    return FLOAT8 if any(runs_on(FLOAT8, capability(a)) for a in found) else BASE

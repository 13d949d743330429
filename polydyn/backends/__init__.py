"""Targets: the parts of a compilation that depend on the machine a program is for."""

from __future__ import annotations

from polydyn.backends.base import Options, Target
from polydyn.backends.cpu import Cpu
from polydyn.backends.cuda import Cuda
from polydyn.gpu.targets import is_cuda

__all__ = ["Options", "Target", "target_of"]


def target_of(name: str, options: Options | None = None) -> Target:
    """Return the target of a name. UnsupportedError: no target has this name, or it does not support the options."""
    return (Cuda if is_cuda(name) else Cpu)(name, options or Options())

"""Targets: what a compilation asks of the machine that a program is for."""

from __future__ import annotations

from polydyn.backends.base import Options, Target
from polydyn.backends.cpu import Cpu
from polydyn.backends.cuda import Cuda
from polydyn.gpu.targets import is_cuda

__all__ = ["Options", "Target", "target_of"]


def target_of(name: str, options: Options | None = None) -> Target:
    """The target of a name. UnsupportedError: there is none of that name, or it cannot do what the options say."""
    return (Cuda if is_cuda(name) else Cpu)(name, options or Options())

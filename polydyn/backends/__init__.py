"""Targets: the parts of a compilation that depend on the machine a program is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polydyn.backends.options import Options
from polydyn.errors import UnsupportedError, WrongTypeError

if TYPE_CHECKING:
    from polydyn.backends.base import Target
    from polydyn.schedules.handmade.document import Written

__all__ = ["Options", "target_of"]


def target_of(name: str, options: Options | None = None, schedules: Sequence[Written] = ()) -> Target:
    """Return the target of a name. UnsupportedError: no target has this name, or it does not support the options or
    ``schedules``. WrongTypeError: the options are of another class."""
    if options is not None and not isinstance(options, Options):
        raise WrongTypeError(
            f"options is a {type(options).__name__}", rule="polydyn.Options", remedy="pass polydyn.Options(...)"
        )
    from polydyn.gpu.targets import is_cuda

    if is_cuda(name):
        if schedules:
            raise UnsupportedError(
                f"schedules written by hand on {name}",
                rule="schedules",
                remedy="use a CPU target, or leave the schedules out",
            )
        from polydyn.backends.cuda import Cuda

        return Cuda(name, options or Options())
    from polydyn.backends.cpu import Cpu

    return Cpu(name, options or Options(), schedules)

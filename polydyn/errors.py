"""The error hierarchy of polydyn. Its root is in ``schedules/errors.py``, the lowest room.

Every error names its subject (node, tensor, dim, rule) and a remedy for the user. Most errors are also one of Python's
(ValueError, NotImplementedError, FileNotFoundError ...), so that code which catches those catches them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy

from polydyn.debug import DebugError
from polydyn.schedules.errors import (
    CodegenError,
    Declined,
    LegalityError,
    PolydynError,
    ScheduleError,
    ScheduleNameError,
)

__all__ = [
    "ArtifactError",
    "BuildError",
    "CodegenError",
    "DebugError",
    "Declined",
    "InputError",
    "LegalityError",
    "MissingFileError",
    "MissingModelError",
    "MissingPackageError",
    "ModelError",
    "PolydynError",
    "ScheduleError",
    "ScheduleNameError",
    "ShapeError",
    "UnknownNameError",
    "UnsupportedError",
    "UnwritableError",
    "WrongTypeError",
]


class ModelError(PolydynError, ValueError):
    """The input violates ONNX: not a protobuf, truncated, unsorted, undefined names."""


class UnsupportedError(PolydynError, NotImplementedError):
    """A valid model uses something that is not supported (operator, attribute, dtype). The error names it."""


class ShapeError(PolydynError, ValueError):
    """Dims contradict each other, or a comparison that is needed at compile time is undecidable."""


class InputError(PolydynError, ValueError):
    """A call's inputs do not fit the program: name, dtype, rank, or a dim that violates a constraint."""


class BuildError(PolydynError, RuntimeError):
    """A C compiler is missing or rejected generated code."""


class ArtifactError(PolydynError, ValueError):
    """A saved program is damaged, or was compiled for another version or processor."""


class WrongTypeError(InputError, TypeError):
    """An argument has another type than the interface takes."""


class UnknownNameError(InputError, KeyError):
    """A name that the object does not have."""


class MissingModelError(ModelError, FileNotFoundError):
    """The file of a model does not exist."""


class MissingFileError(ArtifactError, FileNotFoundError):
    """The file of a saved program, or of records, does not exist."""


class UnwritableError(ArtifactError, InputError, OSError):
    """A file cannot be written: no folder, no permission, no space."""

    @classmethod
    def of(cls, path: object, error: OSError) -> UnwritableError:
        """Return the error for a path that the system refused with ``error``."""
        reason = error.strerror or str(error)
        return cls(f"cannot write {path}: {reason}", remedy="choose a writable folder with free space")


class MissingPackageError(UnsupportedError, ModuleNotFoundError):
    """A package that this function needs is not installed. A saved program runs with numpy alone."""


@contextmanager
def needing_extra(task: str, extra: str) -> Iterator[None]:
    """Raise MissingPackageError if a package is not installed. ``extra``: the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("polydyn"):
            raise
        remedy = f"pip install 'polydyn[{extra}]'"
        raise MissingPackageError(f"{task} needs the package {e.name}", rule=f"extra {extra}", remedy=remedy) from e


@contextmanager
def needing_packages(task: str) -> Iterator[None]:
    """Raise MissingPackageError if a package that polydyn depends on is not installed. ``task``: what needs it."""
    try:
        yield
    except ModuleNotFoundError as e:
        if e.name not in DEPENDENCIES:
            raise
        raise MissingPackageError(
            f"{task} needs the package {e.name}", rule="a saved program runs with numpy alone",
            remedy="pip install polydyn, with its dependencies",
        ) from e  # fmt: skip


DEPENDENCIES = ("click", "islpy", "numpy", "onnx", "rich")
PLACES = ("node", "tensor", "dim", "rule", "remedy")
"""Keyword arguments of ``PolydynError``."""
NOT_OF_PLANS = (MemoryError, DebugError, BuildError, InputError, ArtifactError)
"""Errors about the machine or the user's arguments, not about a plan."""
MAX_NODES_SHOWN = 5
"""Maximum nodes that an error names. It counts the others."""


@contextmanager
def planning(step: str, nodes: Iterable[str] = ()) -> Iterator[None]:
    """Name a step of planning (``pass NAME``), the model's ``nodes`` and a remedy in all errors raised inside.

    An exception of another class becomes a PolydynError; ``NOT_OF_PLANS`` pass unchanged.
    """
    try:
        yield
    except NOT_OF_PLANS:
        raise
    except Exception as e:
        named = failed_plan(e, step, tuple(dict.fromkeys(filter(None, nodes))))
        if named is e:
            raise
        raise named from e


def failed_plan(error: Exception, step: str, nodes: tuple[str, ...]) -> PolydynError:
    """Add the step, the nodes and a remedy to an error that lacks them."""
    known = error if isinstance(error, PolydynError) else None
    if known is None:
        known = PolydynError(f"{step} failed: {type(error).__name__}: {error}")
    more = f" and {len(nodes) - MAX_NODES_SHOWN} more" if len(nodes) > MAX_NODES_SHOWN else ""
    defaults = {"node": ", ".join(nodes[:MAX_NODES_SHOWN]) + more}
    if not isinstance(known, (ModelError, ShapeError, UnsupportedError)):
        without = f"Options(without={{{step[5:]!r}}}) or " if step.startswith("pass ") else ""
        remedy = f"compile with {without}Options(fallback='onnxruntime'), and report this: it is a bug in polydyn"
        defaults |= {"rule": step, "remedy": remedy}
    places = {k: getattr(known, k) or defaults.get(k) or None for k in PLACES}
    if known is error and bool(known.origins) >= bool(nodes) and places == {k: getattr(known, k) for k in PLACES}:
        return known
    again = copy(known)
    PolydynError.__init__(again, known.message, **places)
    again.origins = known.origins or nodes
    return again


class FallbackWarning(UserWarning):
    """Warns that another runtime computes a node of the model (``Options(fallback=...)``)."""

"""The one error hierarchy of polydyn (its root lives in ``schedules/errors.py``, the lowest room).

Every error names what it is about (node, tensor, dim, rule) and what the user can do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy

from polydyn.debug import DebugError
from polydyn.schedules.errors import CodegenError, Declined, LegalityError, PolydynError, ScheduleError

__all__ = [
    "ArtifactError",
    "BuildError",
    "CodegenError",
    "DebugError",
    "Declined",
    "InputError",
    "LegalityError",
    "ModelError",
    "PolydynError",
    "ScheduleError",
    "ShapeError",
    "UnsupportedError",
]


class ModelError(PolydynError):
    """The input is not a model that ONNX allows: not a protobuf, truncated, unsorted, undefined names."""


class UnsupportedError(PolydynError):
    """A valid model uses something that is not built yet (operator, attribute, dtype); refused by name."""


class ShapeError(PolydynError):
    """Dims contradict each other, or a comparison that is needed at compile time cannot be decided."""


class InputError(PolydynError):
    """A call's inputs do not fit the program: name, dtype, rank, or a dim that breaks a constraint."""


class BuildError(PolydynError):
    """A C compiler is missing or refused generated code."""


class ArtifactError(PolydynError):
    """A saved program is damaged, or was made for another version or processor."""


PLACES = ("node", "tensor", "dim", "rule", "remedy")
"""Keyword arguments of ``PolydynError``."""
NOT_OF_PLANS = (MemoryError, DebugError, BuildError, InputError, ArtifactError)
"""Errors that name the machine or the user's arguments, not a plan."""
MAX_NODES_SHOWN = 5
"""Nodes that an error names; it counts the others."""


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
    """Return an error with the step, the nodes and a remedy where it does not name them yet."""
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
    """A node of the model is not compiled: another runtime computes it, as ``Options(fallback=...)`` asks."""

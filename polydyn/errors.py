"""The one error hierarchy of polydyn (its root lives in ``schedules/errors.py``, the lowest room).

Every error names what it is about (node, tensor, dim, rule) and what the user can do about it.
"""

from __future__ import annotations

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


class FallbackWarning(UserWarning):
    """A node of the model is not compiled: another runtime computes it, as ``Options(fallback=...)`` asks."""

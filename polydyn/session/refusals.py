"""Refusing by name what ONNX Runtime has and polydyn has not."""

from __future__ import annotations

from typing import Any

from polydyn.errors import UnsupportedError

DOCUMENT = "docs/switching.md lists what sessions have; InferenceSession.program is the polydyn.Program"


class MissingNameError(UnsupportedError, AttributeError):
    """A name of ONNX Runtime that polydyn does not have; an AttributeError, so that ``hasattr`` says so too."""


def missing(where: str, name: str) -> MissingNameError:
    """The error for a name that ``where`` does not have."""
    return MissingNameError(f"{where} has no '{name}'", rule="what polydyn has of ONNX Runtime", remedy=DOCUMENT)


class Refusing:
    """A class whose missing attributes are refused by name."""

    def __getattr__(self, name: str) -> Any:
        raise missing(type(self).__name__, name)

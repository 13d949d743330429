"""Errors for names that ONNX Runtime has and polydyn does not."""

from __future__ import annotations

from typing import Any

from polydyn.errors import UnsupportedError

DOCUMENT = "docs/switching.md lists what sessions have; InferenceSession.program is the polydyn.Program"


class MissingNameError(UnsupportedError, AttributeError):
    """A name of ONNX Runtime that polydyn does not have. It is an AttributeError, so that ``hasattr`` returns False."""


def missing(where: str, name: str) -> MissingNameError:
    """Return the error for a name that ``where`` does not have."""
    return MissingNameError(f"{where} has no '{name}'", rule="what polydyn has of ONNX Runtime", remedy=DOCUMENT)


class Refusing:
    """A class whose missing attributes raise an error that names them."""

    def __getattr__(self, name: str) -> Any:
        raise missing(type(self).__name__, name)

"""polydyn: compiles an ONNX model once, for every shape.

>>> import polydyn
>>> model = polydyn.compile("bert.onnx")          # doctest: +SKIP
>>> out = model(input_ids=ids, attention_mask=mask)   # doctest: +SKIP
"""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False  # type checkers know this name; ``typing`` takes longer to import than this module

if sys.platform != "linux":
    raise ImportError(
        f"polydyn runs on Linux (x86-64 and arm64), not on {sys.platform}: its threads wait on futexes. Use a "
        "container (docs/serving.md), a virtual machine or WSL 2"
    )

if TYPE_CHECKING:
    from polydyn import backend as backend
    from polydyn import errors as errors
    from polydyn import explore as explore
    from polydyn import extend as extend
    from polydyn import ort as ort
    from polydyn import session as session
    from polydyn.backends.options import Options as Options
    from polydyn.errors import PolydynError as PolydynError
    from polydyn.generation import generate as generate
    from polydyn.measure import tune as tune
    from polydyn.origins.pretrained import from_pretrained as from_pretrained
    from polydyn.origins.torch_modules import from_torch as from_torch
    from polydyn.program_cache import compile as compile
    from polydyn.quantization import quantize as quantize
    from polydyn.quantization import to_half as to_half
    from polydyn.runtime.opening import load as load
    from polydyn.runtime.program import Program as Program
    from polydyn.session import InferenceSession as InferenceSession
    from polydyn.session import OrtValue as OrtValue
    from polydyn.session import RunOptions as RunOptions
    from polydyn.session import SessionOptions as SessionOptions
    from polydyn.shapes.sizes import Sizes as Sizes

__version__ = "0.1.0"

IMPORTED_NS = time.time_ns()
"""When this process imported polydyn."""

_LAZY = {
    "compile": "polydyn.program_cache",
    "Options": "polydyn.backends.options",
    "from_pretrained": "polydyn.origins.pretrained",
    "from_torch": "polydyn.origins.torch_modules",
    "load": "polydyn.runtime.opening",
    "Program": "polydyn.runtime.program",
    "tune": "polydyn.measure",
    "Sizes": "polydyn.shapes.sizes",
    "PolydynError": "polydyn.errors",
    "generate": "polydyn.generation",
    "quantize": "polydyn.quantization",
    "to_half": "polydyn.quantization",
    "InferenceSession": "polydyn.session",
    "SessionOptions": "polydyn.session",
    "RunOptions": "polydyn.session",
    "OrtValue": "polydyn.session",
}
"""Maps a public name to its module, imported at first use: loading a saved program needs only numpy."""

_MODULES = ("backend", "errors", "explore", "extend", "ort", "session")
"""Modules that are imported at first use."""

__all__ = [
    "InferenceSession", "Options", "OrtValue", "PolydynError", "Program", "RunOptions", "SessionOptions", "Sizes",
    "compile", "from_pretrained", "from_torch", "generate", "load", "quantize", "to_half", "tune",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


if not TYPE_CHECKING:  # a type checker reports names that polydyn does not have

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _LAZY and name not in _MODULES:
            raise AttributeError(f"module 'polydyn' has no attribute {name!r}")
        from polydyn.errors import needing_packages

        with needing_packages(f"polydyn.{name}"):
            return import_module(f"polydyn.{name}") if name in _MODULES else getattr(import_module(_LAZY[name]), name)

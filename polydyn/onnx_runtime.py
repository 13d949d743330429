"""ONNX Runtime's own classes, even after ``polydyn.session``'s have replaced them in ``onnxruntime``."""

from __future__ import annotations

import importlib
from typing import Any

from polydyn.errors import UnsupportedError

FALLBACK = "onnxruntime"
"""The value of ``Options.fallback``, and the kind of the host's steps that ONNX Runtime computes."""
RUNS = "runs in ONNX Runtime"
"""Text of every note about a node that ONNX Runtime computes."""


def ort_session(model: bytes | str, threads: int | None = None, spin: bool = True) -> Any:
    """Open a session of ONNX Runtime on the CPU.

    ``model``: its bytes or its path. ``threads``: threads of a call, None for ONNX Runtime's default. ``spin``: whether
    they wait actively. UnsupportedError: see ``ort_classes``. Other exceptions are ONNX Runtime's.
    """
    session_class, options_class = ort_classes()
    options = options_class()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return session_class(model, options, providers=["CPUExecutionProvider"])


def ort_classes() -> tuple[Any, Any]:
    """Return InferenceSession and SessionOptions from the modules that define them.

    ``docs/switching.md`` replaces the names in ``onnxruntime``, which only imports them. UnsupportedError: ONNX Runtime
    is not installed, or its classes cannot be found.
    """
    try:
        importlib.import_module("onnxruntime")
        sessions = importlib.import_module("onnxruntime.capi.onnxruntime_inference_collection")
        found = sessions.InferenceSession, importlib.import_module("onnxruntime.capi._pybind_state").SessionOptions
    except (ImportError, AttributeError) as e:
        raise UnsupportedError(
            f"ONNX Runtime is not installed, or not found: {e}", rule="fallback",
            remedy="pip install polydyn[fallback]; import onnxruntime before something takes its place in sys.modules",
        ) from e  # fmt: skip
    for name, kind in zip(("InferenceSession", "SessionOptions"), found, strict=True):
        if kind.__module__.partition(".")[0] == "polydyn":
            raise UnsupportedError(
                f"{name} of {sessions.__package__} is polydyn's", rule="fallback",
                remedy="replace the names in the module onnxruntime only, as docs/switching.md says",
            )  # fmt: skip
    return found

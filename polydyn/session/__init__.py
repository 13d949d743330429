"""The names of ``onnxruntime`` that sessions need: ``import polydyn.session as ort``.

>>> import polydyn.session as ort
>>> session = ort.InferenceSession("bert.onnx")                     # doctest: +SKIP
>>> session.run(None, {"input_ids": ids, "attention_mask": mask})   # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from polydyn import __version__ as __version__
from polydyn.session.binding import IOBinding
from polydyn.session.missing_names import MissingNameError, missing
from polydyn.session.options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from polydyn.session.session import CUDA, InferenceSession, get_available_providers
from polydyn.session.values import ModelMetadata, NodeArg, OrtDevice, OrtValue

__all__ = [
    "ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "IOBinding", "InferenceSession", "MissingNameError",
    "ModelMetadata", "NodeArg", "OrtDevice", "OrtValue", "RunOptions", "SessionOptions", "disable_telemetry_events",
    "get_all_providers", "get_available_providers", "get_device", "get_version_string", "set_default_logger_severity",
]  # fmt: skip


def get_device() -> str:
    """Return ``GPU`` if there is a CUDA device, else ``CPU``."""
    return "GPU" if CUDA in get_available_providers() else "CPU"


def get_all_providers() -> list[str]:
    """Return the providers that polydyn supports on any machine."""
    return [CUDA, "CPUExecutionProvider"]


def get_version_string() -> str:
    """Return polydyn's version."""
    return __version__


def set_default_logger_severity(severity: int) -> None:
    """Has no effect: nothing is logged."""


def disable_telemetry_events() -> None:
    """Has no effect: nothing is sent anywhere."""


def __getattr__(name: str) -> Any:
    raise missing("polydyn.session", name)

"""Sessions of ONNX Runtime with the provider: models, options, and what a session's log says."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnxruntime

import polydyn.ort
from tests.support.compile_server import stub
from tests.support.tiny import model, node

F = "float32"
NAME = "PolydynExecutionProvider"
WEIGHT = np.random.default_rng(5).standard_normal((3, 4)).astype(F)


def layer() -> onnx.ModelProto:
    """Return a model with a free number of rows: x [B, 3] -> y [B, 4]."""
    nodes = [node("MatMul", "x w", "a"), node("Tanh", "a", "b"), node("Softmax", "b", "y", axis=-1)]
    return _old(model(nodes, {"x": (F, ["B", 3])}, ["y"], {"w": WEIGHT}))


def equal_sizes() -> onnx.ModelProto:
    """Return a model of which polydyn rejects calls that ONNX Runtime computes: both dims are called N."""
    nodes = [node("Exp", "x", "a"), node("ReduceSum", "z", "s", keepdims=0), node("Mul", "a s", "y")]
    return _old(model(nodes, {"x": (F, ["N"]), "z": (F, ["N"])}, ["y"]))


def divided() -> onnx.ModelProto:
    """Return a model with an operator between two sets that polydyn does not have."""
    nodes = [
        node("MatMul", "x w", "a"), node("Relu", "a", "b"), node("Cast", "b", "i", to=6),
        node("TfIdfVectorizer", "i", "v", max_gram_length=1, max_skip_count=0, min_gram_length=1, mode="TF",
             ngram_counts=[0], ngram_indexes=[0, 1, 2], pool_int64s=[0, 1, 2]),
        node("Mul", "v v", "s"), node("Exp", "s", "y"),
    ]  # fmt: skip
    return _old(model(nodes, {"x": (F, ["B", 3])}, ["y"], {"w": 2 * WEIGHT}, opset=17))


def found() -> onnx.ModelProto:
    """Return a model with outputs whose sizes depend on the data."""
    nodes = [node("Relu", "x", "r"), node("NonZero", "r", "k"), node("Transpose", "k", "t")]
    return _old(model(nodes, {"x": (F, ["A", "B"])}, ["t", "r"]))


def _old(m: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with a version that every ONNX Runtime reads."""
    m.ir_version = 9
    return m


def rows(count: int) -> dict[str, Any]:
    """Return the input of ``layer`` and ``divided``."""
    return {"x": np.random.default_rng(count).standard_normal((count, 3)).astype(F)}


def session(m: onnx.ModelProto | str, level: int = 4, **options: Any) -> Any:
    """Open a session with the provider that raises the errors of calls."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = level
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    made = polydyn.ort.InferenceSession(m if isinstance(m, str) else m.SerializeToString(), settings, **options)
    made.disable_fallback()
    return made


def plain(m: onnx.ModelProto) -> Any:
    """Open a session of ONNX Runtime alone."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    return onnxruntime.InferenceSession(m.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def messages(text: str) -> list[str]:
    """Return the messages of polydyn in a log."""
    return re.findall(r"polydyn:0 polydyn\] polydyn: (.*?)(?:\x1b|$)", text, re.MULTILINE)


CODES = ["main()"]
"""Codes of compiling processes; the last one is in use."""


@contextmanager
def compiling_process(code: str) -> Iterator[None]:
    """Start compiling processes with other code, in which ``main`` is the worker's."""
    CODES.append(code)
    _use_last_code()
    try:
        yield
    finally:
        CODES.pop()
        _use_last_code()


def _use_last_code() -> None:
    library = ctypes.CDLL(polydyn.ort.get_library_path())
    code = stub(f"from polydyn.ort.worker import main\n{CODES[-1]}")
    library.PolydynSetDefaults(os.fsencode(sys.executable), code.encode(), os.cpu_count() or 1)

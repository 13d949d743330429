"""Error of outputs against ONNX Runtime, and a count of processes started in between."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from polydyn.testing.inputs import Shape, feeds

TOLERANCE = 1e-4
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "os.system"}
Outputs = Mapping[str, npt.NDArray[Any]]


class Starts:
    """Counts the processes that this one starts, from now on."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._event)

    def _event(self, event: str, _: tuple[Any, ...]) -> None:
        self.count += event in STARTS


def reference(path: str, shapes_to_run: Sequence[Shape], threads: int = 1) -> list[Outputs]:
    """Return ONNX Runtime's outputs at every shape; the session is closed afterwards, which full-size models require.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # without VNNI it would add pairs of products of bytes in 16 bits, which saturate
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    model = onnx.load(path)
    return [dict(zip(names, session.run(names, feeds(model, shape)), strict=True)) for shape in shapes_to_run]


def error(outputs: Outputs, expected: Outputs) -> float:
    """Return the worst error over outputs, relative to its scale; infinite if shape or dtype differ or NaN appears."""
    worst = 0.0
    for name, reference_array in expected.items():
        array = np.asarray(outputs[name])
        if array.shape != reference_array.shape or array.dtype != reference_array.dtype:
            return float("inf")
        if reference_array.size == 0:
            continue
        difference = np.abs(array.astype(np.float64) - reference_array).max()
        scale = np.abs(reference_array).max()
        worst = max(worst, float(difference / scale) if scale > 0 else float(difference))
        if not np.isfinite(difference):
            return float("inf")
    return worst

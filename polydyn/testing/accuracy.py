"""Error of outputs against ONNX Runtime, distances to float64, and a count of processes started in between."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from polydyn.testing.inputs import Shape, feeds

TOLERANCE = 1e-4
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "os.system"}
Outputs = Mapping[str, npt.NDArray[Any]]
ULP = (0.5, 1.0, 2.0, 4.0, 16.0, 256.0, float("inf"))
"""Upper limits of the classes of a histogram of ulp."""


@dataclass(frozen=True)
class Distance:
    """How far floats are from exact ones.

    ``largest``, ``mean``: absolute differences over the largest exact value of each output; the worst output, and the
    mean over all elements. ``ulp``: counts of elements by difference in units of the last place of the exact value, in
    the classes of ``ULP``. An element near 0 may be off by many of its own ulp, and by little of the output's scale.
    """

    largest: float
    mean: float
    ulp: tuple[int, ...]


def distance(outputs: Outputs, exact: Outputs) -> Distance | None:
    """Return how far floats are from float64; None if no output has finite floats, a shape differs, or a float is not
    finite where the exact one is.

    ``exact``: by the names of ``outputs``, of any float type. Elements that are not finite in ``exact`` are left out.
    """
    largest, total, count = 0.0, 0.0, 0
    ulp = np.zeros(len(ULP), np.int64)
    for name, array in outputs.items():
        got, want = np.asarray(array), np.asarray(exact[name])
        if got.shape != want.shape:
            return None
        inside = np.isfinite(want)
        if got.dtype.kind != "f" or not inside.any():
            continue
        got, want = got[inside], want[inside]
        if not np.isfinite(got).all():
            return None
        apart = np.abs(got.astype(np.float64) - want)
        scale = float(np.abs(want).max()) or 1.0
        largest, total = max(largest, float(apart.max()) / scale), total + float(apart.sum()) / scale
        count += want.size
        units = apart / np.abs(np.spacing(want.astype(got.dtype))).astype(np.float64)
        ulp += np.bincount(np.searchsorted(ULP[:-1], units), minlength=len(ULP))
    return Distance(largest, total / count, tuple(map(int, ulp))) if count else None


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

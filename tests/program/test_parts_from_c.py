"""Programs of several parts from C, without Python: their results equal those in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.build.cache import library_file
from polydyn.build.compiler import find_compiler
from polydyn.errors import FallbackWarning
from polydyn.runtime.artifact import read_artifact
from polydyn.testing.from_c import RefusedError, build, run
from tests.program.test_control_flow import LOOP, NESTED_LOOPS
from tests.program.test_fallback import pooled
from tests.program.test_parts import LATE_GUARD, MASKED_ROWS
from tests.program.test_recurrent import f32, recurrent
from tests.support.tiny import model, node

Feeds = Mapping[str, Any]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(build(find_compiler().command, tmp_path_factory.mktemp("c")))]


def saved(m: onnx.ModelProto, folder: Path, **options: Any) -> tuple[polydyn.Program, Path]:
    program = polydyn.compile(m, threads=2, **options)
    program.save(folder / "m.polydyn")
    return program, folder / "m.polydyn"


def loop(count: int, size: int) -> Feeds:
    return {"m": np.array(count), "c": np.array(True), "x": f32(size), "b": np.abs(f32(size)) + 90}


def nested(outer: int, inner: int, size: int) -> Feeds:
    return {"m": np.array(outer), "k": np.array(inner), "x": f32(size)}


SMALL_PART_FIRST = model(
    [
        node("Greater", "a zero", "m"), node("NonZero", "m", "i"), node("Cast", "i", "f", to=1),
        node("ReduceSum", "f", "s", keepdims=0), node("Mul", "x s", "p"), node("Tanh", "p", "y"),
    ],
    {"a": ("float32", ["N"]), "x": ("float32", ["B", 64])}, ["y"], {"zero": np.float32(0)},
)  # fmt: skip
"""The first part lends its threads, and is too small to start them: the second part does, and is unloaded first."""

CASES: dict[str, tuple[onnx.ModelProto, list[Feeds]]] = {
    "sizes": (MASKED_ROWS, [{"x": f32(*s)} for s in [(5, 6), (0, 3), (31, 33), (1, 1)]]),
    "threads": (SMALL_PART_FIRST, [{"a": f32(3), "x": f32(4000, 64)}] * 20),
    "counts": (LOOP, [loop(5, 3), loop(40, 7), loop(0, 2), loop(1, 1)]),
    "bodies of parts": (NESTED_LOOPS, [nested(3, 2, 4), nested(0, 3, 2), nested(4, 1, 9)]),
    "different ones": (
        model([node("Unique", "x", "y i j c", axis=1)], {"x": ("float32", ["H", "W"])}, ["y", "i", "j", "c"]),
        [{"x": np.round(f32(*s))} for s in [(1, 9), (2, 40), (3, 0)]],
    ),
    "recurrence": (recurrent("LSTM", "B"), [{"x": f32(t, b, 3)} for t, b in [(4, 2), (9, 3), (1, 1)]]),
}


@pytest.mark.parametrize("case", CASES)
def test_they_run_from_c(case: str, runner: list[str], tmp_path: Path) -> None:
    """Sizes of the results of the loop and the suppression of zeros are known only in a run."""
    m, calls = CASES[case]
    program, path = saved(m, tmp_path)
    for got, feeds in zip(run(runner, path, calls), calls, strict=True):
        for name, want in program.run(feeds).items():
            assert np.array_equal(got[name], want) and got[name].shape == want.shape, name


def test_wrong_calls_say_why_from_c(runner: list[str], tmp_path: Path) -> None:
    _, path = saved(LATE_GUARD, tmp_path)
    with pytest.raises(RefusedError, match="Add_y"):
        run(runner, path, [{"m": np.ones(3, bool), "x": f32(2)}])


def test_what_needs_python_is_refused_by_name(runner: list[str], tmp_path: Path) -> None:
    with pytest.warns(FallbackWarning):
        _, path = saved(pooled(), tmp_path, options=polydyn.Options(fallback="onnxruntime"))
    with pytest.raises(RefusedError, match="onnxruntime of MaxRoiPool_p needs Python"):
        run(runner, path, [])


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    _, path = saved(MASKED_ROWS, tmp_path)
    library, opened = ctypes.CDLL(str(library_file(read_artifact(path).library))), ctypes.c_void_p(1)
    library.pd_error.restype = ctypes.c_char_p
    path.write_bytes(path.read_bytes()[:9000])
    assert library.pd_open(str(path).encode(), None, ctypes.c_int64(4096), ctypes.c_int64(64), ctypes.byref(opened))
    assert b"truncated" in library.pd_error() and opened.value is None

"""Accuracy of the vector math functions, in units in the last place, for lanes and for scalar tails."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest

from polydyn.build.compiler import compile_flags, find_compiler
from tests.support.paths import ROOT

LEAF = ROOT / "codegen" / "leaf"
TARGETS = {16: "cpu:avx512", 8: "cpu:avx2", 4: "cpu:baseline"}
BOUNDS = {
    "exp": 1.1, "tanh": 2.7, "erf": 1.6, "sigmoid": 2.5, "expm1": 1.5, "log": 1.0, "log1p": 1.7, "atan": 2.2,
    "sin": 1.6, "cos": 1.6, "asin": 2.3, "acos": 1.5,
}  # fmt: skip
OUTLINED = ("log", "log1p", "sin", "cos", "atan", "asin", "acos")
REFERENCES = {
    "exp": np.exp,
    "tanh": np.tanh,
    "expm1": np.expm1,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "log": np.log,
    "log1p": np.log1p,
    "atan": np.arctan,
    "sin": np.sin,
    "cos": np.cos,
    "asin": np.arcsin,
    "acos": np.arccos,
    "sigmoid": lambda x: np.where(x < 0, np.exp(-abs(x)), 1) / (1 + np.exp(-abs(x))),
}


def arguments() -> np.ndarray:
    """Return every exponent of both signs, denormals, infinities, NaN, and the range of high curvature."""
    bits = np.arange(0, 0x7F800001, 16411, dtype=np.uint32).view(np.float32)
    bent = np.concatenate([np.linspace(-110, 110, 60001), np.linspace(-4.5, 4.5, 60001)]).astype(np.float32)
    x = np.concatenate([bits, -bits, bent, np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)])
    return np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the distance in units of the last place of ``want`` (float64); equal infinities and NaNs are 0 apart."""
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(want), 2.0**-126))), -126)
        apart = np.abs(got.astype(np.float64) - want) / np.exp2(exponent - 23)
        same = (got == want.astype(np.float32)) | (np.isnan(got) & np.isnan(want))
    return np.where(same, 0, np.where(np.isnan(apart), np.inf, apart))


@pytest.mark.parametrize("width", TARGETS)
def test_math_functions_are_within_a_few_ulp(width: int, tmp_path: Path) -> None:
    if width == 16 and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX-512")
    text = f'#define PD_W {width}\n#include "pd_cpu.h"\n'
    for name in BOUNDS:
        text += (
            f"void v_{name}(const float *x, float *y, i64 n) {{ for (i64 i = 0; i < n; i += PD_W)"
            f" vstore_f32(y, i, pd_{name}{'' if name in OUTLINED else '_inline'}_vf32(vload_f32(x, i))); }}\n"
            f"void s_{name}(const float *x, float *y, i64 n) {{ for (i64 i = 0; i < n; ++i)"
            f" y[i] = pd_{name}_f32(x[i]); }}\n"
        )
    source, library = tmp_path / f"math{width}.c", tmp_path / f"math{width}.so"
    source.write_text(text)
    flags = [*compile_flags(find_compiler(), TARGETS[width]), "-fvisibility=default", "-shared", f"-I{LEAF}"]
    subprocess.run([*find_compiler().command, *flags, str(source), "-o", str(library), "-lm"], check=True)
    functions = ctypes.CDLL(str(library))
    x = arguments()
    worst = {}
    for name, exact in REFERENCES.items():
        with np.errstate(all="ignore"):
            want = np.asarray(exact(x.astype(np.float64)))
        for form in "vs":
            y = np.empty_like(x)
            getattr(functions, f"{form}_{name}")(
                x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(x))
            )
            worst[form, name] = float(ulps(y, want).max())
            zeros = (x == 0) & (want == 0)
            assert (np.signbit(y[zeros]) == np.signbit(want[zeros])).all(), (form, name)
    assert {k: w for k, w in worst.items() if w > BOUNDS[k[1]]} == {}

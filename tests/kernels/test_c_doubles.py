"""Functions on vectors of float64: accuracy in units in the last place, and special values."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from polydyn.build.compiler import compile_flags, find_compiler
from polydyn.schedules.expr import OPS
from tests.support.paths import ROOT

LEAF = ROOT / "codegen" / "leaf"
TARGETS = {16: "cpu:avx512", 8: "cpu:avx512", 4: "cpu:avx2"}
"""Lanes -> target. 8 and 4 are the lanes of kernels of float64; 16 is a vector of two registers."""
BOUNDS = {"exp": 1.0, "sigmoid": 2.5}
UNARY = {"sqrt": np.sqrt, "floor": np.floor, "ceil": np.ceil, "rint": np.rint, "abs": np.abs, "sign": np.sign}
BINARY = {"max": np.maximum, "min": np.minimum}
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 709.7827, 709.7828, -745.13, -745.14, 2.5)


def arguments() -> np.ndarray:
    """Return all exponents of both signs, the range of exp, and special values; a multiple of 16."""
    random = np.random.default_rng(0)
    scaled = np.ldexp(random.uniform(1, 2, 2048), np.arange(-1024, 1024)) * random.choice([-1, 1], 2048)
    x = np.concatenate([scaled, random.uniform(-746, 710, 60000), random.uniform(-1, 1, 20000), SPECIAL])
    return np.concatenate([x, np.zeros(-len(x) % 16)])


def library(width: int, folder: Path) -> ctypes.CDLL:
    """Compile a function ``test_NAME(x, y, n)`` for each function."""
    target = TARGETS[width]
    if "avx512" in target and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX-512")
    text = f'#define PD_W {width}\n#include "pd_cpu.h"\n#define EXPORT __attribute__((visibility("default")))\n'
    for name in (*BOUNDS, *UNARY, *BINARY):
        again = ", vload_f64(x, n - PD_W - i)" if name in BINARY else ""
        text += (
            f"EXPORT void test_{name}(const f64 *x, f64 *y, i64 n) {{\n"
            f"  for (i64 i = 0; i < n; i += PD_W) vstore_f64(y, i, pd_{name}_vf64(vload_f64(x, i){again}));\n}}\n"
        )
    (folder / "doubles.c").write_text(text)
    compiler = find_compiler()
    flags = [*compile_flags(compiler, target), f"-I{LEAF}", "-shared", "-o", str(folder / "d.so")]
    subprocess.run([*compiler.command, *flags, str(folder / "doubles.c"), "-lm"], check=True)
    return ctypes.CDLL(str(folder / "d.so"))


def called(function: ctypes._CFuncPtr, x: np.ndarray) -> np.ndarray:  # type: ignore[name-defined]
    """Return the results of a function for all elements."""
    y = np.empty_like(x)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(len(x)))
    return y


def truth(name: str, x: np.ndarray) -> np.ndarray:
    """Return a function in extended precision."""
    wide = x.astype(np.longdouble)
    e = np.exp(-np.abs(wide))
    return np.exp(wide) if name == "exp" else np.where(wide < 0, e, 1) / (1 + e)


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the distances in units of the last place of ``want``; equal infinities and NaN are 0 apart."""
    rounded = want.astype(np.float64)
    unit = np.spacing(np.abs(np.where(np.isfinite(rounded), rounded, 1)))
    apart = np.abs(got.astype(np.longdouble) - want) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    return np.where(same, 0, np.where(np.isnan(apart), np.inf, apart)).astype(np.float64)


@pytest.mark.parametrize("width", TARGETS)
def test_functions_are_within_a_few_units(width: int, tmp_path: Path) -> None:
    c, x = library(width, tmp_path), arguments()
    with np.errstate(all="ignore"):
        for name, bound in BOUNDS.items():
            apart = ulps(called(c[f"test_{name}"], x), truth(name, x))
            assert apart.max() <= bound, f"{name} of {x[apart.argmax()]!r}: {apart.max()} ulp"
        for name, exact in UNARY.items():
            np.testing.assert_array_equal(called(c[f"test_{name}"], x), exact(x), name)
        for name, exact in BINARY.items():
            other = x.reshape(-1, width)[::-1].ravel()
            np.testing.assert_array_equal(called(c[f"test_{name}"], x), exact(x, other), name)


def test_every_function_of_float64_has_a_vector_form() -> None:
    unit = '#include "pd_cpu.h"\n'
    command = [*find_compiler().command, "-E", "-DPD_W=4", f"-I{LEAF}", "-xc", "-"]
    text = subprocess.run(command, input=unit, check=True, capture_output=True, text=True).stdout
    scalar = [name for name in OPS if f" pd_{name}_f64(" in text]
    assert len(scalar) > 30
    assert not [name for name in scalar if f" pd_{name}_vf64(" not in text]

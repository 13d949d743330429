"""Functions for 16-bit results: at every 16-bit float, with the largest instruction errors that PTX allows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polydyn.codegen.ir import Reg
from polydyn.codegen.printers.cuda_values import CudaValues
from polydyn.gpu.emulator import EmulatedModule, compile_emulated
from polydyn.schedules.expr import const, op

Array = np.ndarray[Any, Any]
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp, "log": np.log, "tanh": np.tanh, "erf": np.vectorize(math.erf), "sqrt": np.sqrt,
    "erfc": np.vectorize(math.erfc), "one_plus_tanh": lambda x: 2 / (1 + np.exp(-2 * x)),
    "sigmoid": lambda x: np.where(x > 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x))),
}  # fmt: skip
BOUND = 2.0**-16
"""Relative error; results of 16 bits are rounded by up to 2^-12 (float16), 2^-9 (bfloat16)."""
MIN_RESULT = {np.float16: 2.0**-25, ml_dtypes.bfloat16: 2.0**-125}
"""Results below may be flushed: half of the smallest float16; float32 itself ends there."""
INSTRUCTION = 2.0**-22
"""Relative error of ex2, lg2 (absolute between 1/2 and 2), rcp, sqrt."""


@functools.cache
def module(error: float) -> EmulatedModule:
    stores = "".join(f"    pd_stg(out + {k} * n + i, pd_{f}_fast(x));\n" for k, f in enumerate(FUNCTIONS))
    text = f"""#define PD_ERROR {error!r}f
#include "pd_device.cuh"
PD_KERNEL(fast, 64, 1)(const float *in, int n, float *out) {{
  for (int i = pd_tid(); i < n; i += 64) {{
    float x = pd_ldg(in + i);
{stores}  }}
}}
PD_EXPORT(fast, 64);
"""
    return EmulatedModule(compile_emulated(text))


def worst(dtype: Any, error: float) -> dict[str, float]:
    """Return the largest error of each function over all floats of a type, relative for results that are not tiny."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    got = np.zeros((len(FUNCTIONS), len(x)), np.float32)
    module(error).launch("fast", (1, 1, 1), 64, [x, np.int32(len(x)), got])
    found = {}
    for (name, f), y in zip(FUNCTIONS.items(), got, strict=True):
        with np.errstate(all="ignore"):
            want = f(x.astype(np.float64))
            largest = float(np.finfo(np.float32).max) * (1 - BOUND)
            ends = ~np.isfinite(want) | (want > largest)
            assert np.array_equal(y[ends], want.astype(np.float32)[ends], equal_nan=True), name
            smallest = MIN_RESULT[np.float16] if name == "erfc" else MIN_RESULT[dtype]  # the range of its series
            off = np.abs(y - want) / np.maximum(np.abs(want), smallest / BOUND)
        found[name] = float(off[~ends].max())
    return found


@pytest.mark.parametrize("dtype", MIN_RESULT)
@pytest.mark.parametrize("error", [INSTRUCTION, -INSTRUCTION])
def test_fast_functions(dtype: Any, error: float) -> None:
    found = worst(dtype, error)
    assert max(found.values()) <= BOUND, found


def test_a_coarser_instruction_is_noticed() -> None:
    assert all(e > BOUND for e in worst(np.float16, 2.0**-14).values())


@pytest.mark.parametrize(("name", "text"), [("erf", "pd_erfc_fast(-x)"), ("tanh", "pd_one_plus_tanh_fast(x)")])
def test_sums_with_one_do_not_cancel(name: str, text: str) -> None:
    one = const(1.0, "float32")
    sums = [op("add", *pair) for f in [op(name, Reg("float32", "x"))] for pair in ((one, f), (f, one))]
    assert [CudaValues({}, fast=True).text(v) for v in sums] == [text, text]
    assert CudaValues({}, fast=False).text(sums[0]) != text

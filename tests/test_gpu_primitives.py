"""Every device primitive, emulated, against numpy; and what the emulation must refuse."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu.cases import HERE, Case, all_cases, mismatch
from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.gpu.errors import DeviceError

CASES = {c.name: c for c in all_cases()}


def run(case: Case, module: EmulatedModule, reverse: bool) -> tuple[dict[int, np.ndarray], Counters]:
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in case.args]
    counters = module.launch(case.kernel, case.grid, case.threads, args, smem=case.smem, reverse=reverse)
    return {i: args[i] for i in case.expect}, counters


@pytest.fixture(scope="module")
def primitives() -> EmulatedModule:
    return EmulatedModule(compile_emulated((HERE / "primitives.cu").read_text()))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_primitive_equals_numpy(name: str, reverse: bool, primitives: EmulatedModule) -> None:
    got, _ = run(CASES[name], primitives, reverse)
    for position, array in got.items():
        assert mismatch(CASES[name], position, array) <= CASES[name].tolerance, (name, position)

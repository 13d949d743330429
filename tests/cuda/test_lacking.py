"""Broken features of a device: kernels avoid them, and programs name them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydyn.capability import FEATURES
from polydyn.errors import BuildError, InputError
from polydyn.gpu.lacking import LACKING, keep, lacking
from polydyn.program.assemble import build_program
from polydyn.runtime.cuda.native import CudaNative
from polydyn.schedules.index import ZERO, Index
from tests.support.cuda_programs import add, one_launch, version, with_block

V = Index.of
X = np.zeros((3, 32), np.float32)


def test_what_failed_is_kept_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path))
    assert lacking("A B") == frozenset()
    path = keep("A B", {"cluster_load_2d": False, "cluster_load_3d": True, "tma_store_2d": False, "mma_f16": False})
    assert lacking("A B") == {"clusters", "tma_stores"} and not lacking("A") and "cluster_load_2d" in path.read_text()
    keep("A B", {"tma_store_2d": True})
    assert lacking("A B") == {"clusters"}, "what was not tested again stays"
    monkeypatch.setenv(LACKING, "float8")
    assert lacking("A B") == {"float8"}
    monkeypatch.setenv(LACKING, "float9")
    with pytest.raises(InputError, match=r"POLYDYN_LACKING names unknown features: .'float9'"):
        lacking("A B")
    monkeypatch.delenv(LACKING)
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        lacking("A B")
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot create"):
        keep("A B", {})


def test_a_program_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that uses two features is taken if the device has both; one of them is in a kernel after it."""
    after = with_block(version("a", V(0)), features=("tma_stores",))
    first = with_block(
        replace(version("a", V(7)), name="both", after=(replace(after, tasks=ZERO),)), features=("clusters",)
    )
    plan = one_launch(first, replace(version("a", V(1)), name="plain"), kernels=(add("a"),))
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    for said, by in (("", 7), ("clusters", 1), ("tma_stores,float8", 1), ("float8", 7)):
        monkeypatch.setenv(LACKING, said)
        program = build_program(plan, target="cuda:emulated")
        assert (program.run({"x": X})["y"] == by).all(), said
        details = program.explain(B=3).details()
        assert ("not both: the device does not conform in " in details) == (by == 1), said


def test_programs_of_older_versions_use_no_special_instructions() -> None:
    """The libraries of such programs have no interface for a list of features."""
    told: list[int] = []
    native: Any = SimpleNamespace(library=SimpleNamespace(), program=None)
    assert CudaNative._leave_out(native, frozenset()) and not CudaNative._leave_out(native, frozenset({"clusters"}))

    def without(program: object, bits: ctypes.c_int64) -> None:
        told.append(bits.value)

    native.library.pd_cuda_without = without
    assert CudaNative._leave_out(native, frozenset({"warpgroups", "clusters"}))
    assert told == [1 + 2 ** list(FEATURES).index("clusters")]

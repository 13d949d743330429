"""Sanitizers and static analysis: one model is clean, and planted faults of the run time are found."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import polydyn.runtime.c as run_time
from polydyn.compiler import compile_to
from polydyn.program import assemble
from polydyn.testing.from_c import RefusedError, run_and_listen
from tests.support.analyzed import GCC, PROVIDER, texts, warnings
from tests.support.sanitized import SETTINGS, Sanitized, instrumented, reports
from tests.support.sanitized_provider import run
from tests.support.tiny import model, node

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
CALLS = [{"x": np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)} for rows in (3, 1, 0, 40)]


def softmax() -> Any:
    return model([node("Softmax", "x", "y", axis=-1)], {"x": ("float32", ["B", 5])}, ["y"])


@pytest.fixture(scope="module", params=["memory", "threads"])
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    return Sanitized(request.param, tmp_path_factory.mktemp(request.param))


def test_a_small_model_is_clean(sanitized: Sanitized) -> None:
    result = sanitized.check("softmax", softmax(), CALLS)
    assert (result.compared, result.findings, result.rejected) == (len(CALLS), [], 0)


FAULTS = {
    "memory": [
        ("calloc((size_t)plan->launch_count + 1, sizeof *x->parts)", "calloc(1, 8)", "heap-buffer-overflow"),
        ("int64_t threads = x->most_threads;",
         "int64_t threads = x->most_threads; volatile int64_t sum = INT64_MAX; sum = sum + threads;",
         "runtime error: signed integer overflow"),
    ],
    "threads": [("atomic_exchange_explicit(&w->state, IDLE, acq_rel) != WAITED",
                 "atomic_exchange_explicit(&w->state, IDLE, relaxed) != WAITED", "data race")],
}  # fmt: skip


def said_with(sanitized: Sanitized, before: str, after: str, calls: Sequence[Any]) -> list[str]:
    """Return the reports of the model whose run time has a fault."""

    def broken(place: str = "cpu") -> dict[str, str]:
        files = run_time.sources(place)
        assert sum(text.count(before) for text in files.values()) == 1
        return {name: text.replace(before, after) for name, text in files.items()}

    path = sanitized.folder / "broken.polydyn"
    with instrumented(sanitized.kind), mock.patch.object(assemble, "sources", broken):
        compile_to(path, softmax())
    try:
        return list(reports(run_and_listen(sanitized.command, path, calls, 2, SETTINGS)[1]))
    except RefusedError as e:
        return list(reports(str(e)))


def test_planted_faults_of_the_run_time_are_reported(sanitized: Sanitized) -> None:
    many = [{"x": np.zeros((20000 + k, 5), np.float32)} for k in range(20)]
    for before, after, expected in FAULTS[sanitized.kind]:
        said = said_with(sanitized, before, after, many)
        assert any(expected in report for report in said), (expected, said)


@pytest.mark.parametrize(("place", "unit"), [("parts", "host_steps.c"), (PROVIDER, "message.c")])
def test_a_planted_fault_is_found_by_analysis(place: str, unit: str, tmp_path: Path) -> None:
    leak = "\n#include <stdlib.h>\nint pd_planted(int n) { int *p = malloc(8); return p ? *p = n : 0; }\n"
    changed = {unit: texts(place)[unit] + leak}
    found = [(file, said) for file, _, said in warnings(GCC, tmp_path, place, changed)]
    assert any(file == unit and "leak" in said for file, said in found), found


LEAK = """
from polydyn.ort import library
original = library.sources
def planted():
    units, headers = original()
    kept = units["unit.c"].replace("    free(u->input_at);\\n    free(u->output_at);\\n    pthread", "    pthread")
    assert kept != units["unit.c"]
    return {**units, "unit.c": kept}, headers
library.sources = planted
"""


@pytest.mark.slow
def test_a_planted_leak_of_the_provider_is_reported() -> None:
    code, found = run(["tests/ort/test_ort_sessions.py", "-k", "bits_of_the_program"], LEAK)
    assert code == 0 and found and all("leak of" in f and "find_places" in f and "unit.c" in f for f in found), found

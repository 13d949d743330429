"""The logger ``polydyn``, its switch, and the progress of a compilation."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys

import numpy as np
import onnx
import pytest

import polydyn
from polydyn import logs
from polydyn.compiler import plan_program
from polydyn.errors import DebugError
from polydyn.logs import CompileProgress, note, progress, reporting, shown
from tests.support.tiny import model, node


def product() -> onnx.ModelProto:
    nodes = [node("MatMul", "x w", "y"), node("Relu", "y", "z")]
    return model(nodes, {"x": ("float32", ["N", 4])}, ["z"], {"w": np.ones((4, 3), "f4")})


def test_a_switch_names_subjects() -> None:
    assert shown("") == frozenset() and shown("all") == frozenset(logs.SUBJECTS)
    assert shown(" cache, fusion") == {"cache", "fusion"}
    with pytest.raises(DebugError, match=r"(?s)names 'cach'.*remedy: write all, or names among cache"):
        shown("cach")


def test_notes_are_records_of_children(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "polydyn"):
        plan_program(product())
        note("cache", "%s is there", "x")
    said = [(r.name, r.getMessage()) for r in caplog.records]
    assert ("polydyn.cache", "x is there") in said and ("polydyn.fusion", "pass epilogue: 1 groups") in said
    assert {name for name, _ in said} <= {f"polydyn.{s}" for s in logs.SUBJECTS}


def test_the_variable_shows_what_it_names() -> None:
    code = "from polydyn.logs import activate, note; activate(); note('cache', 'a %d', 1); note('tune', 'b')"
    for switch, expected in (("cache", "[polydyn.cache] a 1\n"), ("", "")):
        environment = {"POLYDYN_LOGS": switch} if switch else {}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env={"PYTHONPATH": ":".join(sys.path), **environment})  # fmt: skip
        assert done.stderr == expected and done.stdout == ""


def test_a_note_does_not_import_logging() -> None:
    code = "import sys; from polydyn.logs import note; note('cache', 'a'); assert 'logging' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_progress_has_stages_steps_and_times() -> None:
    seen: list[CompileProgress] = []
    with reporting(seen.append):
        plan_program(product())
    progress("outside")
    stages = [p.stage for p in seen]
    assert [*dict.fromkeys(stages)] == ["rewriting", "fusing", "generating kernels"]
    kernels = [(p.done, p.total) for p in seen if p.stage == "generating kernels"]
    assert kernels == [(0, 1), (1, 1)]
    assert all(a.elapsed <= b.elapsed for a, b in itertools.pairwise(seen))
    assert all((p.left is None) == (p.done == 0) for p in seen) and seen[-1].left == 0


@pytest.mark.compiler
def test_compile_reports_from_the_model_to_the_program() -> None:
    seen: list[CompileProgress] = []
    polydyn.compile(product(), cache=False, report=seen.append)
    stages = [*dict.fromkeys(p.stage for p in seen)]
    assert stages[0] == "reading the model" and stages[-1] == "opening"

    def refuse(p: CompileProgress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        polydyn.compile(product(), cache=False, report=refuse)

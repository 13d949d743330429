"""``polydyn.compile(deadline=...)`` and ``polydyn compile --deadline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.build.compiler import build_library
from polydyn.cli.group import main
from polydyn.clock import DeadlineExceeded, seconds_left, section, until
from polydyn.errors import InputError, UnsupportedError
from polydyn.program_cache import within
from tests.support.tiny import model, node


def relu() -> onnx.ModelProto:
    return model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"])


def test_a_compilation_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    assert polydyn.compile(relu(), cache=False, deadline=600).run is not None
    with pytest.raises(UnsupportedError, match="takes longer than 1e-06 s"):
        polydyn.compile(relu(), cache=False, deadline=1e-6)
    onnx.save(relu(), tmp_path / "m.onnx")
    command = ["compile", str(tmp_path / "m.onnx"), "--no-cache", "-o", str(tmp_path / "p"), "--deadline", "1e-6"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code and "takes longer than 1e-06 s" in f"{result.output}{result.exception}"
    assert not (tmp_path / "p").exists()


@pytest.mark.compiler
def test_a_deadline_ends_the_wait_for_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path))
    slow = {"a.c": "".join(f"int f{k}(int x) {{ return x * {k}; }}\n" for k in range(20_000))}
    with pytest.raises(UnsupportedError, match=r"takes longer than 0\.3 s"), within(0.3):
        build_library(slow, {})


@pytest.mark.parametrize("deadline", [0, -1, "5", float("nan")])
def test_deadlines_that_are_no_time_are_refused(deadline: Any) -> None:
    with pytest.raises(InputError, match="deadline is"):
        polydyn.compile(relu(), deadline=deadline)


def test_no_stage_takes_the_end_of_the_time_for_its_own_failure() -> None:
    assert not issubclass(DeadlineExceeded, Exception)
    with pytest.raises(DeadlineExceeded), until(1e-9), section("a"):
        pass
    with until(100), until(None):
        assert (seconds_left() or 0) > 90
    with until(100), until(1000):
        assert (seconds_left() or 1000) <= 100
    assert seconds_left() is None

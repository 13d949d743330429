"""Measuring workers: the tuner survives any failure of a kernel."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polydyn.errors import BuildError, InputError
from polydyn.measure.workers import Workers

TASKS = """
import os, subprocess, sys, time

def run(what, x=0):
    if what == "ok":
        print("noise on standard output")
        return x * x
    if what == "raise":
        raise ValueError("spilled")
    if what == "crash":
        os.kill(os.getpid(), 11)
    if what == "quit":
        os._exit(3)
    if what == "nan":
        return float("nan")
    if what == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(x, "w") as f:
            f.write(str(child.pid))
        time.sleep(600)

def cost(compile, launch):
    if compile["w"] == 3:
        raise RuntimeError("no")
    return compile["w"] + launch["b"] / 10
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "measured_tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    yield tmp_path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_answers_come_in_order_and_failures_say_why(tasks: Path) -> None:
    pid = tasks / "pid"
    jobs = [
        {"what": "ok", "x": 3},
        {"what": "crash"},
        {"what": "raise"},
        {"what": "hang", "x": str(pid)},
        {"what": "quit"},
        {"what": "nan"},
        {"what": "ok", "x": 5},
    ]
    with Workers("measured_tasks:run", count=2, timeout=2.0) as w:
        got = w.map(jobs)
        assert w.map([]) == []
        assert [a.value for a in w.map([{"what": "ok", "x": n} for n in range(5)])] == [0, 1, 4, 9, 16]
    assert [got[0].value, got[6].value] == [9, 25]
    assert got[1].failure == "killed by SIGSEGV"
    assert got[2].failure == "ValueError: spilled"
    assert got[3].failure == "no answer within 2 s"
    assert got[4].failure == "exited with status 3"
    assert got[5].failure.startswith("ValueError")
    time.sleep(0.05)
    assert not alive(int(pid.read_text()))  # children of the task have ended too


def test_a_function_that_cannot_be_imported_is_an_error_not_a_failure(tasks: Path) -> None:
    with pytest.raises(InputError, match="does not name"):
        Workers("measured_tasks.run")
    with Workers("measured_tasks:missing") as w, pytest.raises(BuildError, match="cannot run measured_tasks:missing"):
        w.map([{"what": "ok"}])

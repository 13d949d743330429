"""The rule by which `make test` leaves out cases, and the plugin that measures them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import rare
from tests.support.paths import ROOT
from tests.support.processor import FIXTURES, PROPERTY


def test_every_value_of_a_parameter_stays_while_the_time_allows() -> None:
    seconds = {"t.py::x[1-2]": 3.0, "t.py::x[1-3]": 1.5, "t.py::x[2-3]": 1.6, "t.py::x[1-4]": 0.1, "t.py::y[a]": 0.6}
    assert rare.choose(seconds | {"t.py::y[b]": 0.6, "t.py::y[c]": 0.6}, {}) == ["t.py::x[1-2]", "t.py::x[1-3]"]


def test_long_cases_and_shared_fixtures_leave_except_the_fastest_of_a_file_and_pinned_bugs() -> None:
    bug, cuda = "tests/kernels/test_bugs.py::b", "tests/cuda/t.py::"
    seconds = {"t.py::long": 9.0, "t.py::short": 6.0, bug: 20.0, f"{cuda}a": 0.1, f"{cuda}b": 0.2, f"{cuda}c": 0.3}
    assert rare.choose(seconds, {f"{cuda}b": 9.0, f"{cuda}c": 2.0}) == ["t.py::long", f"{cuda}b"]


def test_a_report_has_the_seconds_of_cases_and_of_their_shared_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_times.py").write_text(
        "import time, pytest\n"
        "def work(): [0 for _ in iter(lambda: time.process_time() < END[0], False)]\n"
        "END = [0.0]\n"
        "def spend(seconds): END[0] = time.process_time() + seconds; work()\n"
        "@pytest.fixture(scope='module')\n"
        "def slow(): spend(0.4)\n"
        "@pytest.mark.parametrize('k', [0, 1])\n"
        "def test_it(k, slow): spend(0.1)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.processor", "--junitxml=times.xml"]
    environment = {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "test_times.py"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    own, shared = (rare.measured(tmp_path / "times.xml", name) for name in (PROPERTY, FIXTURES))
    assert len(own) == 2 and all(0.1 <= x < 0.4 for x in own.values()), own
    assert all(0.4 <= x < 0.8 for x in shared.values())
    with pytest.raises(ValueError, match=r"-p tests\.support\.processor"):
        rare.measured(tmp_path / "times.xml", "another")

"""A full disk: every command ends with one line that names the file, and leaves nothing half-written."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result

import polydyn
from polydyn.cli import main
from polydyn.cli.group import COMMANDS
from polydyn.jobs.ledger import Ledger, folder_of
from polydyn.search.records import Records
from tests.support.tiny import model, node

WRITING = {
    "batch": ["batch", "{in}/jobs.yaml"],
    "batch report": ["batch", "report", "{in}/jobs.yaml", "-o", "{out}/r.html"],
    "bench": ["bench", "{in}/m.onnx", "--shape", "N=2", "--rounds", "1", "--plot", "{out}/p.svg"],
    "compile": ["compile", "{in}/m.onnx", "-o", "{out}/a.polydyn"],
    "dump": ["dump", "{in}/m.onnx", "-o", "{out}/dump"],
    "dump of a program": ["dump", "{in}/m.polydyn", "-o", "{out}/dump"],
    "explain": ["explain", "{in}/m.polydyn", "--shape", "N=2", "--html", "{out}/e.html"],
    "extract": ["extract", "{in}/m.polydyn", "-o", "{out}"],
    "fuzz": ["fuzz", "--models", "0", "--coverage", "{out}/c.md"],
    "quantize": ["quantize", "{in}/m.onnx", "-o", "{out}/q.onnx"],
    "records": ["records", "merge", "{out}/m.db", "{in}/r.db"],
    "run": ["run", "{in}/m.polydyn", "--shape", "N=2", "--output-dir", "{out}"],
    "to-half": ["to-half", "{in}/m.onnx", "-o", "{out}/h.onnx"],
    "trace": ["trace", "{in}/m.polydyn", "--shape", "N=2", "-o", "{out}/t.json"],
    "try": ["try", "{in}/m.onnx", "--shape", "N=2", "--rounds", "4", "-o", "{out}/t.html"],
    "tune": ["tune", "{in}/m.onnx", "--records", "{out}/r.db", "--trials", "1", "--threads", "1"],
}
WRITES_NO_FILE = {"cache", "compare", "completion", "doctor", "generate", "inspect", "profile", "verify", "minimise"}
"""``minimise`` writes after minutes of search; it uses the function that ``explain`` uses."""


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow; Python ignores the signal, so that writing raises OSError (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its program, records and a job file that was run once."""
    path = tmp_path_factory.mktemp("in")
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 4])}, ["y"]), str(path / "m.onnx"))
    polydyn.compile(path / "m.onnx").save(path / "m.polydyn")
    Records.open(path / "r.db").close()
    (path / "jobs.yaml").write_text("jobs: [{model: m.onnx, output: m.polydyn}]\n")
    (path / "jobs.yaml.batch").mkdir()
    ledger = Ledger.open(folder_of(path / "jobs.yaml") / "ledger.db")
    ledger.end(ledger.begin(ledger.begin_run("1 local"), "m.polydyn", "", 1), {"outcome": "failed", "error": "x"})
    ledger.close()
    return path


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_is_one_error(name: str, folder: Path, tmp_path: Path) -> None:
    words = [w.replace("{in}", str(folder)).replace("{out}", str(tmp_path)) for w in WRITING[name]]
    with full_disk():
        done = call(*words)
    assert done.exit_code == 1 and done.output.count("error (") == 1 and "remedy: " in done.output, done.output
    assert "Traceback" not in done.output and "POLYDYN_DUMP_DIR" not in done.output
    assert [f for f in tmp_path.rglob("*") if f.is_file()] == []


def test_every_command_is_tried_or_writes_no_file() -> None:
    assert {name.split()[0] for name in WRITING} | WRITES_NO_FILE == {*COMMANDS}


def test_a_full_cache_is_one_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The origins of this error form a circle, in which the command line once searched forever."""
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    with full_disk():
        done = call("compile", str(folder / "m.onnx"), "-o", str(tmp_path / "a"))
    assert done.exit_code == 1 and "error (BuildError)" in done.output and not (tmp_path / "a").exists()

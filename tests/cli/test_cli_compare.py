"""Commands that compare: bench, compare, verify, trace; --json everywhere; exit codes."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import polydyn.verification
from polydyn.cli import main, progress
from polydyn.cli.machine import DIFFERENT
from polydyn.cli.timing import Plan, Times, alternating
from polydyn.verification import compare, verify_model
from tests.support.stored import one_head_scaled, path_of
from tests.support.tiny import model, node

BERT = path_of("bert_tiny")
SHAPE = ("--shape", "B=2,L=5")


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def data(*args: object) -> Any:
    done = call(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "bert.polydyn"
    found = data("compile", BERT, "-o", path, "--threads", 1)
    assert found["bytes"] == path.stat().st_size and found["kernels"] > 0
    return path


def test_bench_times_and_compares() -> None:
    found = data("bench", BERT, *SHAPE, "--shape", "B=1,L=9", "--rounds", 2, "--threads", 1)
    assert [r["shape"] for r in found["shapes"]] == [{"B": 2, "L": 5}, {"B": 1, "L": 9}]
    assert all(r["ms"]["onnxruntime"] > 0 and r["error"]["onnxruntime"] < 1e-5 for r in found["shapes"])
    table = call("bench", BERT, *SHAPE, "--rounds", 1)
    assert "times polydyn's" in table.output and "B=2,L=5" in table.output and "p99 ms" in table.output


def test_bench_for_a_time_with_callers_and_a_table(tmp_path: Path) -> None:
    small = tmp_path / "relu.onnx"
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), small)
    table = tmp_path / "t.csv"
    options = ("--shape", "N=2", "-t", 0.05, "--warmup", 3, "--concurrency", 2, "--threads", 1, "--csv", table)
    (found,) = data("bench", small, *options)["shapes"]
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert [x["runtime"] for x in lines] == ["polydyn", "onnxruntime"] and {x["shape"] for x in lines} == {"N=2"}
    for x in lines:
        name = x["runtime"]
        assert 0 < float(x["p50_ms"]) <= float(x["p90_ms"]) <= float(x["p99_ms"]) == found["p99_ms"][name]
        assert float(x["calls_per_second"]) > 0 and int(x["calls"]) >= 8
    alone = data("bench", small, "--shape", "N=2", "--rounds", 5, "--against", "none")
    assert alone["shapes"][0]["calls"] == 5 and alone["shapes"][0]["error"] == {}
    done = call("bench", small, "--shape", "N=2", "--csv", tmp_path / "nowhere" / "t.csv")
    assert done.exit_code == 1 and "cannot write" in done.output


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    times = Times([0.004, 0.001, 0.003, 0.002], 0.02)
    assert [times.percentile(p) for p in (1, 25, 50, 90, 99)] == [0.001, 0.001, 0.002, 0.004, 0.004]
    assert times.throughput == 200 and times.median == 0.0025 and Times([0.5]).percentile(99) == 0.5
    assert round(times.spread, 9) == 1.0 and Times([0.1]).spread == 0


def test_every_runtime_is_called_as_often() -> None:
    counts = {"a": 0, "b": 0}

    def called(name: str) -> Callable[[Any], Any]:
        def run(feeds: Any) -> Any:
            with lock:
                counts[name] += 1
            return {}

        return run

    lock = threading.Lock()
    for plan, expected in ((Plan(rounds=3, warmup=2), 5), (Plan(rounds=3, warmup=1, concurrency=2), 9)):
        counts.update(a=0, b=0)
        times, results = alternating({n: called(n) for n in counts}, {}, plan)
        assert counts == {"a": expected, "b": expected} and {*times} == {*results} == {"a", "b"}
        assert all(len(t.seconds) == expected - plan.warmup for t in times.values())


def test_compare_says_when_results_differ(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "other.onnx").write_bytes(one_head_scaled(3.0).SerializeToString())
    same = data("compare", saved, BERT, *SHAPE, "--rounds", 1)
    assert same["shapes"][0]["ok"] and same["programs"][0]["kernels"] == same["programs"][1]["kernels"]
    done = call("compare", saved, tmp_path / "other.onnx", *SHAPE, "--rounds", 1)
    assert done.exit_code == DIFFERENT and "differs" in done.output


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """Build two products with an operator in between, for any number of rows."""
    rng = np.random.default_rng(0)
    v, w = (rng.standard_normal(s).astype(np.float32) for s in ((6, 8), (8, 5)))
    nodes = [node("MatMul", "x v", "a"), node("Relu", "a", "b"), node("MatMul", "b w", "c"), node("Softmax", "c", "y")]
    onnx.save(model(nodes, {"x": ("float32", ["N", 6])}, ["y"], {"v": v, "w": w}), str(tmp_path / "layers.onnx"))
    return tmp_path / "layers.onnx"


def test_verify_recomputes_every_group(layers: Path) -> None:
    found = data("verify", layers, "--shape", "N=7")
    assert found["checked"] >= 2 and not found["different"] and found["worst"] < 1e-4


def test_verify_names_the_first_tensor_that_differs(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = {"x": np.ones((3, 6), np.float32)}
    good = verify_model(layers, feeds)
    assert all(c.ok for c in good)
    victim = good[0].tensor
    tensors = polydyn.verification.CheckedProgram.tensors

    def damaged(self: Any, feeds: Any) -> Any:
        found = tensors(self, feeds)
        found[victim].reshape(-1)[-1] += 1
        return found

    monkeypatch.setattr(polydyn.verification.CheckedProgram, "tensors", damaged)
    bad = [c for c in verify_model(layers, feeds) if not c.ok]
    assert bad[0].tensor == victim and bad[0].error > 1e-4
    done = call("verify", layers, "--shape", "N=3")
    assert done.exit_code == DIFFERENT and f"{victim} " in done.output and "differs first" in done.output


def test_comparing_tensors() -> None:
    nan = np.array([1.0, np.nan, np.inf], np.float32)
    assert compare("t", nan, nan, 0.0).ok
    assert not compare("t", nan, np.array([1.0, 0.0, np.inf], np.float32), 1.0).ok
    assert not compare("t", np.array([3]), np.array([4]), 1.0).ok, "integers are exact"
    assert compare("t", np.zeros((0, 3)), np.zeros((0, 3)), 0.0).ok


def test_trace_is_what_chrome_reads(saved: Path, tmp_path: Path) -> None:
    found = data("trace", saved, "--shape", "B=4,L=61", "--threads", 2, "-o", tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())
    assert len(events) == found["spans"] > 5
    assert all(e["ph"] == "X" and e["ts"] >= 0 and e["dur"] >= 0 and e["args"]["kernel"] for e in events)
    assert {e["tid"] for e in events} <= {1, 2}, "a row for each thread"


def test_every_command_prints_json(saved: Path) -> None:
    assert data("run", saved, *SHAPE)["outputs"]["last_hidden_state"] == {"dtype": "float32", "shape": [2, 5, 32]}
    assert data("inspect", saved)["inputs"]["input_ids"] == "int64[B, L]"
    assert data("explain", saved, *SHAPE)["launches"][0]["kernel"]
    assert data("profile", saved, *SHAPE)["launches"][0]["nanoseconds"] >= 0
    assert {f["what"] for f in data("doctor")} >= {"compiler", "processor"}


def test_a_terminal_shows_what_takes_its_time(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress goes to standard error, so that the output is only the result, and only to a terminal."""
    shown = StringIO()
    monkeypatch.setattr(progress, "terminal", Console(file=shown, force_terminal=True, width=100))
    done = call("bench", layers, "--shape", "N=3", "--shape", "N=4", "--rounds", 1)
    assert all(x in shown.getvalue() for x in ("compiling ", "N=3", "N=4")) and "compiling" not in done.output
    quiet = StringIO()
    monkeypatch.setattr(progress, "terminal", Console(file=quiet, force_terminal=False))
    assert call("verify", layers, "--shape", "N=3").exit_code == 0 and not quiet.getvalue()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    done = call("completion", shell)
    assert done.exit_code == 0 and "_POLYDYN_COMPLETE" in done.output


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("bench", "SAVED", *SHAPE), 1, "is a saved program"),
        (("verify", "SAVED", *SHAPE), 1, "is a saved program"),
        (("verify", BERT, *SHAPE, "--target", "cuda:sm_80"), 1, "not verified here"),
        (("bench", BERT, *SHAPE, "--against", "nothing"), 1, "unknown baseline 'nothing'"),
        (("bench", BERT), 2, "--shape"),
        (("tune", BERT), 2, "--records names no file"),
        (("compile", BERT, "-o", "x", "--tf32"), 1, "tf32"),
        (("run", "SAVED", *SHAPE, "--tf32"), 1, "is already compiled"),
        (("run", "SAVED", *SHAPE, "--records", "r.db"), 1, "is already compiled"),
        (("compile", BERT, "-o", "x", "--records", "missing.db"), 1, "does not exist"),
        (("compile", BERT, "-o", "x", "--strategy", "best"), 2, "best"),
        (("trace", "SAVED", *SHAPE, "-o", "no/such/folder.json"), 1, "cannot write"),
    ],
)
def test_wrong_input_has_a_code_and_a_remedy(saved: Path, args: tuple[str, ...], code: int, message: str) -> None:
    done = call(*(saved if a == "SAVED" else a for a in args))
    assert done.exit_code == code and message in done.output, done.output
    assert "Traceback" not in done.output and (code == 2 or "remedy" in done.output)

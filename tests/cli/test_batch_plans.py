"""Batches without a cluster: what would be done, selections, failures first, models and targets, JUnit XML."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
from click.testing import CliRunner, Result
from distributed.deploy.spec import SpecCluster

from polydyn.cli import main
from polydyn.errors import InputError
from polydyn.jobs.cluster import _dashboard, _local
from polydyn.jobs.junit import write_junit
from polydyn.jobs.ledger import Ledger, StepRow, folder_of, latest, matrix
from polydyn.jobs.report import write_report
from polydyn.jobs.run import Batch
from tests.support.tiny import model, node

JOBS = """
jobs:
  - model: [a.onnx, b.onnx, bad.onnx]
    output: out/{name}-{target}.polydyn
    matrix: {target: [cpu:avx2, cpu:neon]}
  - {model: a.onnx, output: out/tuned.polydyn, records: r.db, tune: {trials: 1}}
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), str(tmp_path / f"{name}.onnx"))
    (tmp_path / "jobs.yaml").write_text(JOBS)
    return tmp_path / "jobs.yaml"


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def states(jobs: Path, *only: str) -> dict[str, str]:
    return {s.name.partition(" <-")[0]: what for s, what in Batch(jobs, only=only).plan()}


def test_a_plan_says_what_would_be_done_and_writes_nothing(jobs: Path) -> None:
    before = sorted(jobs.parent.rglob("*"))
    planned = states(jobs)
    assert planned["out/a-cpu-avx2.polydyn"] == planned["r.db"] == "to do"
    assert planned["out/tuned.polydyn"] == "to do, after tuning"
    assert planned["out/bad-cpu-neon.polydyn"].startswith("cannot begin (MissingModelError): cannot read")
    done = call("batch", jobs, "--dry-run")
    assert done.exit_code == 3 and "8 steps: 6 to do, 2 cannot begin" in done.output.replace("\n", " ")
    rows = json.loads(call("batch", jobs, "--dry-run", "--json").output)["steps"]
    assert {r["target"] for r in rows} == {"cpu", "cpu:avx2", "cpu:neon"} and rows[0]["kind"] == "tune"
    assert sorted(jobs.parent.rglob("*")) == before


def test_what_was_done_before_is_seen(jobs: Path) -> None:
    batch = Batch(jobs)
    step = next(s for s, _ in batch.plan() if s.name == "out/a-cpu-avx2.polydyn")
    folder_of(jobs).mkdir()
    ledger = Ledger.open(folder_of(jobs) / "ledger.db")
    attempt = ledger.begin(ledger.begin_run("1 local"), step.name, batch._key(step), 1)
    ledger.end(attempt, {"outcome": "done", "error": ""})
    ledger.close()
    assert states(jobs)[step.name] == "to do", "its output is gone"
    (jobs.parent / "out").mkdir()
    (jobs.parent / step.name).write_bytes(b"")
    assert states(jobs)[step.name] == "done before" and states(jobs)["out/b-cpu-avx2.polydyn"] == "to do"


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["out/a*"], {"out/a-cpu-avx2.polydyn", "out/a-cpu-neon.polydyn"}),
        (["cpu:neon"], {f"out/{n}-cpu-neon.polydyn" for n in ("a", "b", "bad")}),
        (["b.onnx", "r.db"], {"out/b-cpu-avx2.polydyn", "out/b-cpu-neon.polydyn", "r.db", "out/tuned.polydyn"}),
    ],
)
def test_only_some_jobs(only: list[str], names: set[str], jobs: Path) -> None:
    assert states(jobs, *only).keys() == names


def test_a_pattern_without_a_job_is_refused(jobs: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)no job matches nothing\*.*--only.*out/a-cpu-avx2"):
        Batch(jobs, only=["nothing*"]).plan()
    assert call("batch", jobs, "--only", "nothing*").exit_code == 1 and not folder_of(jobs).exists()


@pytest.fixture
def ledger(jobs: Path) -> Ledger:
    """One run: a done for two targets, b failed for one and lost for none, one step done before."""
    folder_of(jobs).mkdir()
    opened = Ledger.open(folder_of(jobs) / "ledger.db")
    run = opened.begin_run("1 local")
    steps = (("a", "cpu", "done"), ("a", "cuda", "done"), ("b", "cpu", "failed"), ("c", "cpu", ""))
    for name, target, outcome in steps:
        opened.take_part(run, f"{name}-{target}", "compile", f"{name}.onnx", target)
        if outcome:
            log = "said \x1b[1m<this>\x00\n"
            answer = {"outcome": outcome, "error": "InputError: a & b\n  remedy: c" * (outcome == "failed"), "log": log}
            opened.end(opened.begin(run, f"{name}-{target}", name, 1), answer)
    opened.end_run(run)
    return opened


def test_models_and_targets_are_a_table(ledger: Ledger, jobs: Path, tmp_path: Path) -> None:
    targets, rows = matrix(ledger.steps(), latest(ledger.attempts()))
    assert targets == ["cpu", "cuda"]
    assert rows == [("a.onnx", ["done", "done"]), ("b.onnx", ["failed", ""]), ("c.onnx", ["waiting", ""])]
    twice = [StepRow("x", "tune", "m", "cpu", 1), StepRow("a-cpu", "compile", "m", "cpu", 1)]
    assert matrix(twice, latest(ledger.attempts())) == (["cpu"], [("m", ["waiting"])])
    write_report(ledger, "jobs.yaml", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "Models and targets" in text and '<td>b.onnx<td class="failed">failed' in text
    assert "name=viewport" in text and "prefers-color-scheme: dark" in text and "type=search" in text
    ledger.close()
    lines = call("batch", "status", jobs).output.splitlines()
    assert lines[2].startswith("b-cpu"), "failures first"
    assert any(line.split() == ["model", "cpu", "cuda"] for line in lines)


def test_junit_has_a_case_for_each_step(ledger: Ledger, jobs: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    write_junit(ledger, "jobs.yaml", path)
    (suite,) = ElementTree.parse(path).getroot()
    assert {n: suite.get(n) for n in ("tests", "failures", "skipped", "name")} == {
        "tests": "4", "failures": "1", "skipped": "1", "name": "jobs.yaml"}  # fmt: skip
    cases = {c.get("name"): c for c in suite}
    assert cases["b-cpu"].get("classname") == "compile.cpu" and cases["c-cpu"].find("skipped") is not None
    failure = cases["b-cpu"].find("failure")
    assert failure is not None and failure.get("message") == "InputError: a & b" and "remedy" in str(failure.text)
    assert cases["a-cuda"].find("failure") is None
    assert cases["a-cuda"].findtext("system-out") == "said ?[1m<this>?\n"
    ledger.close()
    assert call("batch", "report", jobs, "-o", tmp_path / "y.xml").exit_code == 0
    assert (tmp_path / "y.xml").read_bytes() == path.read_bytes()


def test_the_address_of_the_dashboard_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(dashboard_link="http://127.0.0.1:8787/status")
    for spec, end in ((None, "the package bokeh on the scheduler)"), (object(), "/status")):
        monkeypatch.setattr("polydyn.jobs.cluster.find_spec", lambda name, spec=spec: spec)
        assert _dashboard(client).startswith("dashboard: http://127.0.0.1:8787/status")
        assert _dashboard(client).endswith(end)
    assert _dashboard(SimpleNamespace()) == ""


def test_ctrl_c_while_workers_start_leaves_no_worker_and_no_message() -> None:
    """A cluster that Dask cannot close is not closed at the end of the process; its processes end. Others stay."""
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    began: list[Any] = []

    class Made:
        shutdown_on_close = True

        def __init__(self) -> None:
            SpecCluster._instances.add(self)
            worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
            worker.start()
            began.extend((self, worker))

    def interrupted(**_: Any) -> Any:
        Made()
        raise KeyboardInterrupt

    level = logging.getLogger("asyncio").level
    try:
        with pytest.raises(KeyboardInterrupt):
            _local(interrupted, 2)
        made, worker = began
        assert not made.shutdown_on_close and not worker.is_alive() and other.is_alive()
    finally:
        logging.getLogger("asyncio").setLevel(level)
        SpecCluster._instances.discard(began[0])
        other.kill()
        other.join()

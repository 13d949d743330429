"""Offline jobs: contents of job files, rejections, and survival of killed workers, killed batches and limits."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import polydyn
from polydyn.build.features import architecture
from polydyn.cli import main
from polydyn.compiler import Options
from polydyn.errors import InputError, UnsupportedError
from polydyn.jobs import Batch, BatchResult, read_jobs
from polydyn.jobs.child import compile_step
from polydyn.jobs.cluster import ClusterError
from polydyn.jobs.ledger import Ledger, folder_of, latest
from polydyn.jobs.report import _short
from polydyn.jobs.spec import KEYS, TUNE_KEYS
from polydyn.jobs.work import execute, resident_bytes
from polydyn.program_key import Arguments, program_key
from polydyn.search.records import Records
from tests.support.paths import ROOT
from tests.support.tiny import model, node


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Make a folder with two models, and one file that is not a model."""
    for name, op in (("relu", "Relu"), ("neg", "Neg")):
        onnx.save(model([node(op, "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), str(tmp_path / f"{name}.onnx"))
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    return tmp_path


def write(folder: Path, text: str, name: str = "jobs.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# -- job files -------------------------------------------------------------------------------------------------------


def test_globs_defaults_and_matrices_are_written_out(models: Path) -> None:
    found = read_jobs(write(models, """
defaults:
  dims: {N: "1:64"}
  retries: 5
jobs:
  - model: [relu.onnx, n*.onnx]
    output: out/{name}-{target}-{threads}.polydyn
    memory: 2G
    matrix:
      target: [cpu:avx2, cpu:avx512]
      threads: [1, 2]
  - model: relu.onnx
    target: cuda:sm_80
    tf32: true
    dims: {N: {low: 8, high: 64, multiple: 8, likely: [16]}}
    records: "{name}.db"
    tune: {trials: 4, seed: 3}
    timeout: 1.5
"""))  # fmt: skip
    assert [j.output and j.output.name for j in found[:4]] == [
        "relu-cpu-avx2-1.polydyn", "neg-cpu-avx2-1.polydyn", "relu-cpu-avx2-2.polydyn", "neg-cpu-avx2-2.polydyn",
    ]  # fmt: skip
    assert len(found) == 9 and found[0].arguments.dims == {"N": polydyn.Sizes(1, 64)}
    assert (found[0].retries, found[0].memory, found[0].threads) == (5, 2_000_000_000, 1)
    last = found[-1]
    assert last.arguments.options.tf32 and last.arguments.dims["N"].multiple == 8  # type: ignore[union-attr]
    assert last.tune and (last.tune.trials, last.tune.seed, last.timeout) == (4, 3, 1.5)
    assert last.output is None and last.arguments.records == models / "relu.db"


def test_json_and_yaml_say_the_same(models: Path) -> None:
    said = {"jobs": [{"model": "relu.onnx", "output": "a.polydyn", "dims": {"N": [0, None]}, "without": ["stitch"]}]}
    (a,) = read_jobs(write(models, json.dumps(said, indent="\t"), "jobs.json"))
    (b,) = read_jobs(write(models, "- {model: relu.onnx, output: a.polydyn, dims: {N: '0:'}, without: stitch}"))
    assert a.arguments == b.arguments and a.output == b.output


def test_every_argument_of_compile_and_tune_is_a_key() -> None:
    arguments = {*inspect.signature(polydyn.compile).parameters, *inspect.signature(polydyn.tune).parameters}
    keys = {*KEYS, *TUNE_KEYS, *("options", "report", "cache")}
    others = {"seen", "start", "deadline"}  # keys shapes of tune and timeout; a batch has no quick start
    assert arguments - keys == others
    assert {f.name for f in fields(Options)} <= set(KEYS)


@pytest.mark.slow
def test_a_static_export_becomes_dynamic(models: Path) -> None:
    """The names of axes reach compiling and tuning, and programs with other names are other programs."""
    w = np.ones((8, 16), np.float32)
    made = model([node("MatMul", "x w", "y")], {"x": ("float32", [4, 8])}, ["y"], {"w": w})
    onnx.save(made, models / "static.onnx")
    text = "- {model: static.onnx, output: a.polydyn, symbols: {x: [N, null]}, records: r.db, tune: {trials: 1}}"
    (job,) = read_jobs(write(models, text))
    assert job.arguments.symbols == {"x": ["N", None]}
    assert program_key(models / "static.onnx", replace(job.arguments, records=None)) != program_key(
        models / "static.onnx", replace(job.arguments, records=None, symbols={})
    )
    assert Batch(models / "jobs.yaml").run().state.failed == 0
    program = polydyn.load(models / "a.polydyn")
    assert program.run({"x": np.ones((7, 8), np.float32)})["y"].shape == (7, 16)
    assert "tuned by" in program.explain(N=7).details()


JOB = "- {model: relu.onnx, output: a.polydyn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "jobs.yaml is empty"),
        ("{}", "jobs.yaml:1: there is no list of jobs"),
        ("jobs: []", "jobs.yaml:1: jobs is not a list, or empty"),
        ("jobs: 3", "jobs.yaml:1: jobs is not a list, or empty"),
        ("- 1", "jobs.yaml:1: 1 is not a mapping"),
        ("jobs:\n- model: a.onnx\n\tx: 1", "jobs.yaml:3: neither YAML nor JSON"),
        ("jobs: [", "neither YAML nor JSON"),
        ("- {output: a.polydyn}", "jobs.yaml:1: the job has no model"),
        ("- {model: relu.onnx}", "jobs.yaml:1: the job writes nothing"),
        ("jobs:\n- model: relu.onnx\n  ouput: a", "jobs.yaml:3: unknown key 'ouput'\n  rule: job files\n  remedy: did"),
        (f"{JOB}}}\n{JOB}}}", "is written twice, also by the job at line 1"),
        (f"{JOB}, output: b}}", "jobs.yaml:1: the key 'output' occurs twice"),
        ("- {model: '*.onx', output: a}", "jobs.yaml:1: no file matches *.onx"),
        ("- {model: 3, output: a}", "jobs.yaml:1: model is 3"),
        (f"{JOB}, threads: 0}}", "jobs.yaml:1: threads is 0"),
        (f"{JOB}, threads: two}}", "jobs.yaml:1: threads is 'two'"),
        (f"{JOB}, dims: {{N: [9, 3]}}}}", "jobs.yaml:1: dims.N is [9, 3]: the range 9..3 holds no size"),
        (f"{JOB}, dims: {{N: nine}}}}", "jobs.yaml:1: dims.N is 'nine'"),
        (f"{JOB}, symbols: {{x: N}}}}", "jobs.yaml:1: symbols.x is 'N'"),
        (f"{JOB}, symbols: {{x: [N, 3]}}}}", "jobs.yaml:1: symbols.x is ['N', 3]"),
        (f"{JOB}, dims: 3}}", "jobs.yaml:1: 3 is not a mapping"),
        (f"{JOB}, without: [speed]}}", "jobs.yaml:1: unknown pass: speed"),
        (f"{JOB}, strategy: best}}", "jobs.yaml:1: unknown strategy 'best'"),
        (f"{JOB}, tf32: 1}}", "jobs.yaml:1: tf32 is 1"),
        (f"{JOB}, target: cpu:avx9}}", "jobs.yaml:1: unknown target cpu:avx9"),
        (f"{JOB}, matrix: {{target: [cpu, cuda:sm_7]}}}}", "jobs.yaml:1: unknown target cuda:sm_7"),
        (f"{JOB}, tf32: true}}", "jobs.yaml:1: tf32 on cpu"),
        (f"{JOB}, tune: true}}", "jobs.yaml:1: there are no records to tune into"),
        (f"{JOB}, records: r.db, tune: {{trails: 3}}}}", "jobs.yaml:1: unknown key 'trails'"),
        (f"{JOB}, records: r.db, tune: {{shapes: no.json}}}}", "jobs.yaml:1: no.json is not a log of shapes"),
        (f"{JOB}, memory: much}}", "jobs.yaml:1: memory is 'much'"),
        (f"{JOB}, timeout: -1}}", "jobs.yaml:1: timeout is -1"),
        (f"{JOB}, retries: 1.5}}", "jobs.yaml:1: retries is 1.5"),
        (f"{JOB}, matrix: {{target: cpu}}}}", "jobs.yaml:1: the matrix has no values for 'target'"),
        (f"{JOB}, matrix: {{speed: [1]}}}}", "jobs.yaml:1: the matrix has an unknown key 'speed'"),
        ("- {model: relu.onnx, output: '{size}.polydyn'}", "jobs.yaml:1: cannot replace the keys in {size}.polydyn"),
        ("defaults: {speed: 1}\njobs: [{model: a, output: b}]", "jobs.yaml:1: unknown key 'speed'"),
    ],
)
def test_what_a_file_may_not_say(models: Path, text: str, message: str) -> None:
    path = write(models, text)
    with pytest.raises(InputError) as e:
        read_jobs(path)
    assert message in str(e.value) and e.value.remedy
    done = call("batch", path)
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert not folder_of(path).exists(), "nothing was begun"


# -- running ---------------------------------------------------------------------------------------------------------


def run(path: Path, **more: Any) -> tuple[BatchResult, list[str]]:
    lines: list[str] = []
    result = Batch(path, say=lambda line, _: lines.append(line), **more).run()
    return result, [line for line in lines if not line.startswith("dashboard:")]


def attempts(path: Path) -> list[tuple[str, str, int]]:
    ledger = Ledger.open(folder_of(path) / "ledger.db")
    try:
        return [(a.job, a.outcome, a.number) for a in ledger.attempts()]
    finally:
        ledger.close()


def test_a_batch_in_which_all_is_done_begins_no_cluster(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(models, "- {model: relu.onnx, output: a.polydyn}")
    assert run(path)[0].state.done == 1
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert run(path)[0].state.skipped == 1
    (models / "a.polydyn").unlink()
    with pytest.raises(UnsupportedError, match="batch needs Dask"):
        run(path)
    assert attempts(path) == [("a.polydyn", "gone", 1)], "nothing was begun"


@pytest.mark.slow
def test_a_batch_goes_on_after_a_failure_and_resumes(models: Path) -> None:
    path = write(models, "- {model: [bad.onnx, relu.onnx, neg.onnx], output: 'out/{name}.polydyn', dims: {N: '0:'}}")
    done = call("batch", path)
    assert done.exit_code == 3, done.output
    assert "out/bad.polydyn: failed: ModelError" in done.output and "2 done, 0 done before, 1 failed" in done.output
    assert polydyn.load(models / "out" / "relu.polydyn").kernel_count > 0
    assert sorted(p.name for p in (models / "out").iterdir()) == ["neg.polydyn", "relu.polydyn"]
    (models / "out" / "relu.polydyn").unlink()
    result, _ = run(path)
    assert (result.state.done, result.state.skipped, result.state.failed) == (1, 1, 1), "what is gone is made again"
    write(models, "- {model: relu.onnx, output: 'out/{name}.polydyn', dims: {N: '1:4'}}")
    assert run(path)[0].state.done == 1, "other arguments are another job"
    relus = [outcome for job, outcome, _ in attempts(path) if "relu" in job]
    assert relus == ["gone", "done", "done"]
    status = call("batch", "status", path)
    assert status.exit_code == 0 and "out/bad.polydyn" in status.output and "3 runs" in status.output
    data = json.loads(call("batch", "status", path, "--json").output)
    outcomes = {s["step"]: s["outcome"] for s in data["steps"]}
    assert outcomes == {"out/bad.polydyn": "failed", "out/neg.polydyn": "done", "out/relu.polydyn": "done"}
    page = (folder_of(path) / "report.html").read_text()
    assert "out/relu.polydyn" in page and "http" not in page and "kernels" in page
    assert call("batch", "report", path, "-o", models / "copy.html").exit_code == 0


@pytest.mark.slow
def test_tunings_share_records_and_come_first(models: Path) -> None:
    product(models / "product.onnx")
    path = write(models, """
- model: product.onnx
  target: cuda:sm_80
  records: r.db
  tune: {trials: 2}
  output: out/{tf32}.polydyn
  matrix: {tf32: [false, true]}
""")  # fmt: skip
    result, lines = run(path, workers=2)
    assert result.state.done == 4, lines
    assert [("tuned" in line) for line in lines] == [True, True, False, False]
    with Records.open(models / "r.db", readonly=True) as records:
        first = records.digest()
        assert {r.source for r in records.rows()} == {"model"}
    assert run(path)[0].state.skipped == 4
    for name in ("False", "True"):
        notes = polydyn.load(models / "out" / f"{name}.polydyn").manifest["notes"]
        assert not any("no search" in n for n in notes), notes
    (models / "r.db").unlink()
    assert run(path)[0].state.skipped == 4, "what was tuned is put together again"
    with Records.open(models / "r.db", readonly=True) as records:
        assert records.digest() == first
    (models / "r.db").unlink()
    for shard in (folder_of(path) / "shards").iterdir():
        shard.unlink()
    assert run(path)[0].state.done == 2, "tuned again, with the same result"
    with Records.open(models / "r.db", readonly=True) as records:
        assert records.digest() == first


def product(path: Path) -> None:
    """Write a model that is one matrix product."""
    w = np.ones((16, 16), np.float32)
    onnx.save(model([node("MatMul", "x w", "y")], {"x": ("float32", ["M", 16])}, ["y"], {"w": w}), str(path))


def test_compiling_does_not_begin_after_a_failed_tuning(models: Path) -> None:
    path = write(models, "- {model: bad.onnx, records: r.db, tune: true, output: a.polydyn}")
    result, lines = run(path)
    assert result.state.failed == 2 and "its tuning failed: r.db <- bad.onnx" in lines[1]


def test_one_client_at_a_time(models: Path) -> None:
    path = write(models, "- {model: relu.onnx, output: a.polydyn}")
    from polydyn.jobs.ledger import only_one

    with only_one(folder_of(path)), pytest.raises(InputError, match="another batch is at work"):
        run(path)


# -- workers ---------------------------------------------------------------------------------------------------------


def stub(request: dict[str, Any]) -> dict[str, Any]:
    """Stand in for compiling: write the model's content."""
    text = Path(request["model"]).read_bytes()
    folder = Path(request["folder"])
    folder.mkdir(parents=True)
    if text.startswith(b"kill once") and not (marker := Path(request["model"]).with_suffix(".killed")).exists():
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    if text.startswith(b"slow"):
        time.sleep(0.3)
    (folder / "artifact").write_bytes(b"artifact of " + text)
    return {"outcome": "done", "error": "", "facts": {"seconds": 0.0}, "worker": str(os.getpid()), "log": ""}


def test_a_killed_worker_costs_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.utils._CollectErrorThread", None)  # Dask's own loop has 10 seconds to begin
    for k in range(4):
        (tmp_path / f"{k}.onnx").write_bytes(b"kill once" if k == 1 else b"slow %d" % k)
    path = write(tmp_path, "- {model: '*.onnx', output: '{name}.polydyn', retries: 1}")
    result, lines = run(path, workers=2, execute=stub)
    assert result.state.done == 4 and sum("lost" in line for line in lines) == 1, lines
    found = attempts(path)
    assert sorted(o for _, o, _ in found) == ["done"] * 4 + ["lost"]
    assert ("1.polydyn", "done", 2) in found
    assert (tmp_path / "1.polydyn").read_bytes() == b"artifact of kill once"


def test_a_worker_killed_while_it_begins_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra [jobs] is not installed")
    (tmp_path / "a.onnx").write_bytes(b"")
    path = write(tmp_path, "- {model: a.onnx, output: a.polydyn}")
    make, ends = distributed.LocalCluster, [RuntimeError("Nanny failed to start.")] * 3

    def begin(**said: Any) -> Any:
        if ends:
            raise ends.pop()
        return make(**said)

    monkeypatch.setattr(distributed, "LocalCluster", begin)
    with pytest.raises(ClusterError, match="no worker starts: Nanny failed"):
        run(path, execute=stub)
    ends.append(RuntimeError("Nanny failed to start."))
    assert run(path, execute=stub)[0].state.done == 1
    assert attempts(path) == [("a.polydyn", "done", 1)]


def request_for(folder: Path, **more: Any) -> dict[str, Any]:
    arguments = {"target": "cpu", "dims": {}, "options": {}, "records": None, "symbols": {}, "schedules": []}
    base = {"step": "compile", "threads": None, "tune": None, "timeout": None, "memory": None}
    return base | {"model": str(folder / "relu.onnx"), "arguments": arguments, "folder": str(folder / "w")} | more


def test_an_attempt_has_limits(models: Path) -> None:
    assert execute(request_for(models, timeout=0.05))["outcome"] == "timeout"
    answer = execute(request_for(models, memory=1_000_000))
    assert answer["outcome"] == "memory" and "more than 1 MB" in answer["error"]
    assert resident_bytes(os.getsid(0)) > 1_000_000
    died = execute(request_for(models, step="compile", threads="two"))
    assert died["outcome"] in ("failed", "died")


def test_a_target_of_another_machine_is_compiled_and_not_opened(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact equals the one that ``Program.save`` writes where the program runs."""
    arguments = Arguments(target="cpu:baseline" if architecture() != "x86_64" else "cpu:avx2")
    polydyn.compile(models / "relu.onnx", target=arguments.target, threads=2).save(models / "here")
    monkeypatch.setattr("polydyn.build.compiler.why_elsewhere", lambda target: "it is for arm64")
    monkeypatch.setattr("polydyn.runtime.opening.open_program", None)
    facts = compile_step({
        "model": str(models / "relu.onnx"), "arguments": arguments.to_json(), "threads": 2,
        "artifact": str(models / "there"),
    })  # fmt: skip
    assert facts["kernels"] == 1 and (models / "there").read_bytes() == (models / "here").read_bytes()


def test_labels_of_a_report_differ() -> None:
    """Folders that all share are left out, and long names lose their middle, so that model and target stay."""
    names = [f"out/{'a' * 40}/model{k}/{t}/x.polydyn" for k in (1, 2) for t in ("cpu-avx2", "cpu-neon")]
    short = _short(names)
    assert len({*short}) == 4 and max(map(len, short)) <= 44 and short[0] == "model1/cpu-avx2/x.polydyn"
    (long,) = _short([f"bert_{'b' * 60}_neon.polydyn"])
    assert long.startswith("bert_") and long.endswith("_neon.polydyn") and len(long) <= 44
    assert _short(["/a/x", "y"]) == ["/a/x", "y"] and _short(["a.x"]) == ["a.x"]


def test_files_travel_by_content(models: Path) -> None:
    request = request_for(models, model="model.onnx", files={"model.onnx": (models / "relu.onnx").read_bytes()})
    answer = execute({k: v for k, v in request.items() if k != "folder"})
    assert answer["outcome"] == "done", answer
    (models / "out.polydyn").write_bytes(answer["files"]["artifact"])
    assert polydyn.load(models / "out.polydyn").kernel_count == answer["facts"]["kernels"]


@pytest.mark.slow
def test_a_scheduler_by_its_address(models: Path) -> None:
    """Workers that share nothing with the client: files are sent both ways by content; artifacts equal a local run's.
    """
    distributed = pytest.importorskip("distributed", reason="the extra [jobs] is not installed")
    path = write(models, "- {model: [relu.onnx, neg.onnx], output: '{name}.polydyn'}")
    run(path)
    local = [(models / f"{n}.polydyn").read_bytes() for n in ("relu", "neg")]
    for n in ("relu", "neg"):
        (models / f"{n}.polydyn").unlink()
    with distributed.LocalCluster(1, threads_per_worker=2, dashboard_address="127.0.0.1:0", memory_limit=0) as cluster:
        result, lines = run(path, scheduler=cluster.scheduler_address, share=False)
    assert result.state.done == 2, lines
    assert local == [(models / f"{n}.polydyn").read_bytes() for n in ("relu", "neg")]


def test_nobody_at_the_address(models: Path) -> None:
    path = write(models, "- {model: relu.onnx, output: a.polydyn}")
    done = call("batch", path, "--scheduler", "tcp:/nowhere")
    assert done.exit_code == 1 and "no scheduler answers" in done.output


def test_a_killed_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    for k in range(12):
        (tmp_path / f"{k:02}.onnx").write_bytes(b"slow %d" % k)
    path = write(tmp_path, "- {model: '*.onnx', output: '{name}.polydyn'}")
    code = f"from pathlib import Path; from polydyn.jobs import Batch; from test_jobs import stub\n" \
           f"if __name__ == '__main__':\n" \
           f"    state = Batch(Path({str(path)!r}), 2, execute=stub).run().state\n" \
           f"    print(state.skipped, state.done)"  # fmt: skip
    script = write(tmp_path, code, "go.py")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'cli'}"}
    client = subprocess.Popen([sys.executable, str(script)], env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.polydyn"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    client.kill()
    client.wait()
    again = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    skipped, finished = map(int, again.stdout.split()[-2:])
    assert skipped >= 3 and finished + skipped == 12
    done = [job for job, outcome, _ in attempts(path) if outcome == "done"]
    assert len(done) == len(set(done)) == 12, "none twice"
    assert any(outcome == "interrupted" for _, outcome, _ in attempts(path))
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "nothing half-written"
    ledger = Ledger.open(folder_of(path) / "ledger.db")
    assert all(a.outcome == "done" for a in latest(ledger.attempts()).values())
    ledger.close()


# -- records ---------------------------------------------------------------------------------------------------------


def test_records_are_shown_merged_copied_and_thinned(models: Path) -> None:
    product(models / "p.onnx")
    for seed in (0, 1):
        polydyn.tune(models / "p.onnx", models / f"{seed}.db", target="cuda:sm_80", trials=2, seed=seed)
    assert call("records", "merge", models / "all.db", models / "0.db", models / "1.db").exit_code == 0
    shown = json.loads(call("records", "show", models / "all.db", "--json").output)
    assert shown["records"] > 0 and {c["source"] for c in shown["counts"]} == {"model"}
    assert call("records", "export", models / "all.db", models / "copy.db").exit_code == 0
    assert json.loads(call("records", "show", models / "copy.db", "--json").output)["digest"] == shown["digest"]
    kinds = {c["kind"] for c in shown["counts"]}
    assert "search" in kinds
    done = call("records", "prune", models / "all.db", models / "few.db", "--kind", "search")
    assert done.exit_code == 0, done.output
    few = json.loads(call("records", "show", models / "few.db", "--json").output)
    assert {c["kind"] for c in few["counts"]} == {"search"}
    for args in (("prune", "all.db", "x.db"), ("prune", "all.db", "x.db", "--kind", "no"), ("merge", "x.db", "no.db")):
        bad = call("records", *(models / a if a.endswith(".db") else a for a in args))
        assert bad.exit_code == 1 and "remedy" in bad.output
    assert not (models / "x.db").exists(), "nothing half-written"

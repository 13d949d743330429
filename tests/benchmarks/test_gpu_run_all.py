"""The script for a day with a GPU, on the CPU libcuda: every stage answers, failures stay isolated."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.gpu import calibration, compare, conformance, cpu, pack, processes, rehearsal, run_all, stage
from polydyn.capability import FEATURES
from polydyn.gpu.errors import DeviceLostError
from polydyn.gpu.lacking import LACKING
from tests.support.paths import ROOT
from tests.support.tiny import model, node

STAGES = ["loading", "calibration", "kernels", "models", "gemm", "layers", "attention", "stitch", "variants",
          "selector", "overhead", "timeline"]  # fmt: skip
"""test_gpu_driver runs the conformance; other stages need a device or missing tools."""
PACK_CASES = ["softmax_float32", "gemm", "layer_gelu_72x64", "attention_causal_2x64", "bert_tiny"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack")
    small = path / "bert_tiny.onnx"  # the name of a model whose dims are known
    nodes = [node("Relu", "x", "t"), node("Softmax", "t", "y", axis=-1)]
    onnx.save(model(nodes, {"x": ("float32", ["B", "L"])}, ["y"]), small)
    command = [sys.executable, "-m", "benchmarks.gpu.pack", str(path), "--target", "cuda:emulated", "--quick"]
    subprocess.run([*command, "--models", str(small), "--only", *PACK_CASES], check=True, cwd=ROOT)
    return path


def run(folder: Path, out: Path, *stages: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "benchmarks.gpu.run_all", "--emulate", "--pack", str(folder), "--out", str(out)]
    done = subprocess.run([*command, "--stages", *stages], capture_output=True, text=True, cwd=ROOT)
    assert (out / "log").read_text() == done.stdout, done.stderr
    return done.returncode, json.loads((out / "report.json").read_text()), done.stdout + done.stderr


@pytest.mark.slow
def test_every_stage_answers(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "pack.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(folder, "pack")
    code, report, said = run(tmp_path / "pack.tar.gz", tmp_path / "out", *STAGES)
    stages = report["stages"]
    assert code == 0, said
    assert list(stages) == STAGES and report["date"] and report["versions"]["numpy"] and report["pack"]["polydyn"]
    assert all(s["arch"] == 90 and "failed" not in s and s["cut"] == 0 for s in stages.values())
    assert all(s["results"] for s in stages.values())
    assert all(r["ok"] for name in ("kernels", "models") for r in stages[name]["results"])
    assert stages["gemm"]["results"][0]["tflops"] > 0 and len(stages["stitch"]["results"]) == 2
    assert all(r["cold_us"] > 0 and r["host_us"] > 0 for r in stages["layers"]["results"])
    assert {r["constant"] for r in stages["calibration"]["results"]} >= {*calibration.MEASURABLE_COSTS}
    assert any("two-blocks" in r["name"] for r in stages["variants"]["results"])
    cost = stages["overhead"]["results"][0]
    assert cost["ok"] and all(cost[k] > 0 for k in ("device_us", "kept_us", "graph_on_device_us", "graph_apart_us"))
    taken = stages["selector"]["results"][0]
    assert taken["loss"] >= 1 and taken["ok"] and len(taken["versions"]) > 1 and stages["selector"]["geomean loss"] >= 1
    assert "FAIL" not in said


@pytest.mark.slow
def test_a_failing_case_stops_nothing(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "pack"
    broken.mkdir()
    for path in filter(Path.is_file, folder.iterdir()):
        damaged = path.name == "gemm-gemm.polydyn"
        (broken / path.name).write_bytes(path.read_bytes()[:-100] if damaged else path.read_bytes())
    code, report, said = run(broken, tmp_path / "out", "gemm", "stitch")
    gemm = report["stages"]["gemm"]["results"]
    assert code == 1 and gemm and not any(r["ok"] for r in gemm) and "damaged" in gemm[0]["message"]
    assert "wrong: gemm M33xN64xK72" in said and said.count("FAIL gemm: gemm") == len(gemm)
    assert all(r.get("ok", True) for r in report["stages"]["stitch"]["results"])


CASES = """import json, os, subprocess, sys, time
first = int(sys.argv[sys.argv.index("--first") + 1])
def say(**event): print(json.dumps(event), flush=True)
def child():
    return subprocess.Popen(["sleep", "60"]).pid
def hang():
    time.sleep(60)
def crash():
    os._exit(3)
def right():
    return first
print("{not an event}", flush=True)
say(waiting=True)
for i, f in list(enumerate([child, hang, crash, right]))[first:]:
    say(begin=i, name=f.__name__, patience=1 if f is hang else None)
    say(end=i, ok=True, value=f(), blocking=os.environ.get("CUDA_LAUNCH_BLOCKING", ""))
say(done=True, cut=2)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_case_that_hangs_or_ends_its_process_costs_itself(capfd: pytest.CaptureFixture[str]) -> None:
    child, hang, crash, right, about = processes.results([sys.executable, "-c", CASES], 30, 9)
    assert child["ok"] and not hang["ok"] and "silent for 1 s" in hang["message"]
    said = {"message": "hangs, or ends its process: the process ended with 3", "blocking": "the process ended with 3"}
    assert crash == {"name": "crash", "ok": False, **said}
    assert right == {"name": "right", "ok": True, "value": 3, "blocking": ""} and about == {"about": {"cut": 2}}
    assert not alive(child["value"]), "what a stopped process has started goes with it"
    assert capfd.readouterr().out.count("{not an event}") == 4


def test_a_process_that_does_not_begin_fails_its_stage() -> None:
    (event,) = processes.results([sys.executable, "-c", "raise SystemExit(5)"], 30)
    assert event == {"failed": "the process ended with 5, before its first case: see above"}


def test_a_lost_context_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    def lose() -> None:
        raise DeviceLostError("gone")

    jobs: list[processes.Job] = [("bug", lambda: {"x": 1 // 0}), ("none", lambda: None), ("lose", lose)]
    processes.work([*jobs, ("never", dict)], 0, 60)
    processes.work(jobs, 1, -1)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["name"] for e in said if "begin" in e] == ["bug", "none", "lose"]
    bug, none, lost = (e for e in said if "end" in e)
    assert not bug["ok"] and "ZeroDivisionError" in bug["message"] and none["left out"]
    assert not lost["ok"] and "gone" in lost["message"] and said[-1] == {"done": True, "cut": 2}


def test_each_call_ends_within_its_ten_minutes(tmp_path: Path) -> None:
    assert run_all.LIMIT + run_all.SLACK < 600 and sorted(x for c in run_all.CALLS.values() for x in c) == sorted(
        run_all.STAGES
    )
    calls = [sum(run_all.STAGES[s] for s in stages) for stages in run_all.CALLS.values()]
    assert max(calls) <= run_all.LIMIT and sum(calls) + len(calls) * run_all.STARTING + cpu.LIMIT <= run_all.LENT
    options = argparse.Namespace(pack=tmp_path, driver="ctypes", emulate=True, only=[], patience=9)
    report = run_all.Report(tmp_path / "out")
    late = run_all.run_stage("gemm", options, time.monotonic() + run_all.SLACK, report)
    assert late["failed"] == "no time was left" and late["results"] == []
    assert json.loads(report.path.read_text())["stages"]["gemm"]["failed"] == "no time was left"
    report.close()


def test_every_case_beyond_the_base_tests_one_feature() -> None:
    """Every feature must be tested, because only a failed test switches it off."""
    base, hopper = ({n for n, _ in conformance.jobs(arch, True)} for arch in (80, 90))
    found = {c: [n for n, f in FEATURES.items() if re.fullmatch(f.cases, c)] for c in (*base, *hopper)}
    assert not [c for c in base if found[c]] and not [c for c in hopper - base if len(found[c]) != 1]
    assert {n for c in found.values() for n in c} == {*FEATURES}


def test_where_a_primitive_fails_the_rest_goes_on_without_kernels_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answers(command: list[str], seconds: float, patience: float) -> Iterator[dict[str, Any]]:
        asked.append(os.environ[LACKING])
        yield {"name": "mma_f16", "ok": True}
        yield {"name": "tma_load_2d_tf32", "ok": "conformance" not in command[2]}
        yield {"name": "cluster_load_2d", "ok": "conformance" not in command[2]}
        yield {"name": "launches_early graph chains", "ok": "conformance" not in command[2]}

    monkeypatch.setenv(LACKING, "")

    monkeypatch.setattr(run_all, "results", answers)
    (tmp_path / "cases.json").write_text('{"left_out": [{"name": "conv", "failed": "refused"}]}')
    options = argparse.Namespace(
        pack=tmp_path, out=tmp_path / "out", stages=["conformance", "gemm"], limit=500, patience=9, driver="ctypes",
        emulate=True, only=[],
    )  # fmt: skip
    assert run_all.run(options) == 1
    assert asked == ["", "tf32_rounding,clusters,early_launches"]
    report, said = json.loads((tmp_path / "out/report.json").read_text()), (tmp_path / "out/log").read_text()
    assert report["lacking"] == {
        "tf32_rounding": ["tma_load_2d_tf32"],
        "clusters": ["cluster_load_2d"],
        "early_launches": ["launches_early graph chains"],
    }
    assert "not in the pack: conv: refused" in said


def test_a_device_that_does_not_answer_ends_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(command: list[str], seconds: float, patience: float) -> Iterator[dict[str, Any]]:
        yield {"about": {"arch": 80}}
        yield {"failed": "silent for 150 s, before its first case: see above"}

    monkeypatch.setattr(run_all, "results", silent)
    (tmp_path / "cases.json").write_text('{"target": "cuda:sm_90a"}')
    options = argparse.Namespace(
        pack=tmp_path, out=tmp_path / "out", stages=["kernels", "gemm"], limit=500, patience=9, driver="ctypes",
        emulate=True, only=[],
    )  # fmt: skip
    assert run_all.run(options) == 1
    report, said = json.loads((tmp_path / "out/report.json").read_text()), (tmp_path / "out/log").read_text()
    assert list(report["stages"]) == ["kernels"] and "left out" in report["stopped"]
    assert "the pack is for cuda:sm_90a: kernels for sm_80 are compiled there" in said


def test_our_times_stay_when_torch_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    here = stage.Stage(argparse.Namespace(emulate=True, pack=folder, driver="ctypes", only=[]))
    here.__dict__["torch"] = object()

    def refuses(name: str) -> Any:
        raise RuntimeError(f"no {name}")

    case = next(c for c in here.cases_of("stitch") if c["name"] == "softmax_float32")
    got = compare.compare(here, case, case["shapes"][0], refuses)
    assert got is not None and got["us"] > 0 and got["message"] == "torch: RuntimeError: no softmax_float32"
    assert got.get("ok", True)


def test_a_step_of_the_cpu_run_ends_in_time_with_what_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)"
    with (tmp_path / "log").open("w") as log:
        assert cpu.run([sys.executable, "-c", code], 1.5, os.environ, log) == 124
        assert cpu.run([sys.executable, "-c", "raise SystemExit(3)"], 20, os.environ, log) == 3
    assert not alive(int((tmp_path / "log").read_text()))
    names = [name for name, _, _ in cpu.steps("python", tmp_path, ["1"])]
    assert names == ["export", "bert_base", "resnet50", "gemm"]


def test_what_takes_long_says_that_it_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 0.04)
    with processes.patiently(0.3):
        time.sleep(0.6)
    count = capsys.readouterr().out.count('{"waiting": true}')
    assert 2 <= count <= 31, "and then no more"


def test_a_program_that_hangs_is_not_tried_at_other_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    jobs: list[processes.Job] = [("a M1", dict), ("b M1", dict), ("a M2", dict)]
    processes.work(jobs, 0, 60, skip=["a"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["name"] for e in said if "begin" in e] == ["b M1"] and said[-1] == {"done": True, "cut": 2}
    like = conformance.spared("tma_pixels_4d_same_last", ["tma_pixels_3d_line"])
    assert like is not None and like() == {"ok": False, "message": "not run, as tma_pixels_3d_line hangs"}
    assert conformance.spared("tma_load_2d_left", ["tma_pixels_3d_line"]) is None


def test_a_rehearsal_misses_what_is_not_said() -> None:
    named = [f.case.partition("-")[2] for f in rehearsal.FAULTS]
    found = [
        {"name": f"{n} M1", "ok": False, "message": f.message, "blocking": f.blocking}
        for n, f in zip(named, rehearsal.FAULTS, strict=True)
    ]
    report = {"stages": {"kernels": {"results": [*found, {"name": "gemm M1", "ok": True}]}}}
    assert rehearsal.shortcomings(report, ["kernels"], False) == []
    report["stages"]["kernels"]["results"] = [*found[1:], {"name": "gemm M1", "ok": False, "message": "error 1"}]
    lacking = rehearsal.shortcomings(report, ["kernels", "gemm"], False)
    assert (
        len(lacking) == 4 and f"{named[0]} should say 'silent for'" in lacking[1] and "gemm M1 is wrong" in lacking[2]
    )


def test_first_shapes_of_all_cases_come_before_second_ones() -> None:
    cases = [{"n": 1}, {"n": 3}, {"n": 2}]
    order = [(c["n"], k) for c, k in stage.in_turn(cases, lambda c: c["n"])]
    assert order == [(1, 0), (3, 0), (2, 0), (3, 1), (2, 1), (3, 2)]


def test_no_number_is_an_error() -> None:
    assert stage.error([np.nan, 1], [1, 1]) == stage.error([1], [1, 1]) == np.inf and stage.error([2], [2]) == 0
    assert stage.numbers(np.array([0x3F80], np.uint16), "bfloat16") == 1


def test_conformance_takes_its_kernels_from_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(text: str, arch: str, *, kind: str = "cubin") -> argparse.Namespace:
        return argparse.Namespace(image=f"{arch} {kind}".encode())

    monkeypatch.setattr(conformance, "compile_cuda", compiled)
    monkeypatch.setattr(pack, "programs", lambda target: iter(()))
    pack.write_conformance(tmp_path / "conformance", ("sm_80", "sm_90a"))
    assert len(list((tmp_path / "conformance").iterdir())) == 9  # three files for both, three for sm_90a
    machine = conformance.Machine(argparse.Namespace(arch=90), False, tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(conformance, "compile_cuda", lambda *a, **k: argparse.Namespace(image=b"compiled here"))
    text = conformance.text_of("primitives.cu")
    assert machine.image(text, "primitives.cu") == b"sm_90a cubin"
    assert machine.image(text + "\n", "primitives.cu") == b"compiled here"


def test_stages_need_only_numpy() -> None:
    blocked = ("islpy", "onnx", "sympy", "networkx", "click", "rich", "pycuda", "onnxruntime", "sklearn", "ml_dtypes")
    code = f"import sys\nfor m in {blocked}: sys.modules[m] = None\n"
    code += "from benchmarks.gpu import conformance, run_all, stages"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

"""The script for a day with a GPU, over the CPU libcuda: every stage answers, failures stay where they are."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny import model, node

from benchmarks.gpu import conformance, pack, processes, run_all, stages
from polydyn.gpu.errors import DeviceLostError

ROOT = Path(__file__).parents[1]
STAGES = [s for s in run_all.STAGES if s != "conformance"]  # test_gpu_driver runs that one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack")
    small = path / "bert_tiny.onnx"  # the name of a model whose dims are known
    nodes = [node("Relu", "x", "t"), node("Softmax", "t", "y", axis=-1)]
    onnx.save(model(nodes, {"x": ("float32", ["B", "L"])}, ["y"]), small)
    pack.pack(path, "cuda:emulated", True, [small], ["softmax_float32", "gemm", "bert_tiny"])
    return path


def run(folder: Path, out: Path, *stages: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "benchmarks.gpu.run_all", "--emulate", "--pack", str(folder), "--out", str(out)]
    done = subprocess.run([*command, "--stages", *stages], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_every_stage_answers(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "pack.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(folder, "pack")
    code, report, said = run(tmp_path / "pack.tar.gz", tmp_path / "r.json", *STAGES)
    stages = report["stages"]
    assert code == 0, said
    assert list(stages) == STAGES and report["date"] and report["versions"]["numpy"] and report["pack"]["polydyn"]
    assert all(s["arch"] == 90 and "failed" not in s and s["cut"] == 0 for s in stages.values())
    assert all(s["results"] for s in stages.values())
    assert len(stages["kernels"]["results"]) == 5 and all(r["ok"] for r in stages["kernels"]["results"])
    assert stages["gemm"]["results"][0]["tflops"] > 0 and len(stages["stitch"]["results"]) == 2
    cost = stages["overhead"]["results"][0]
    assert cost["ok"] and all(cost[k] > 0 for k in ("device_us", "bound_us", "run_on_device_us", "graph_on_device_us"))
    assert stages["selector"]["results"][0]["loss"] >= 1 and stages["selector"]["geomean loss"] >= 1
    assert "kernels            5/5" in said


def test_a_failing_case_stops_nothing(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "pack"
    broken.mkdir()
    for path in folder.iterdir():
        damaged = path.name == "gemm-gemm.polydyn"
        (broken / path.name).write_bytes(path.read_bytes()[:-100] if damaged else path.read_bytes())
    code, report, said = run(broken, tmp_path / "r.json", "gemm", "stitch")
    gemm = report["stages"]["gemm"]["results"]
    assert code == 1 and gemm and not any(r["ok"] for r in gemm) and "damaged" in gemm[0]["message"]
    assert "wrong: gemm M33xN64xK72" in said
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
for i, f in list(enumerate([child, hang, crash, right]))[first:]:
    say(begin=i, name=f.__name__)
    say(end=i, ok=True, value=f())
say(done=True, cut=2)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_case_that_hangs_or_ends_its_process_costs_itself(capfd: pytest.CaptureFixture[str]) -> None:
    child, hang, crash, right, about = processes.results([sys.executable, "-c", CASES], 30, 1.5)
    assert child["ok"] and not hang["ok"] and "silent for 2 s" in hang["message"]
    assert crash == {"name": "crash", "ok": False, "message": "hangs, or ends its process: the process ended with 3"}
    assert right == {"name": "right", "ok": True, "value": 3} and about == {"about": {"cut": 2}}
    assert not alive(child["value"]), "what a stopped process has started goes with it"
    assert capfd.readouterr().out.count("{not an event}") == 3


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


def test_eight_minutes_are_enough(tmp_path: Path) -> None:
    assert sum(run_all.STAGES.values()) <= run_all.LIMIT == 8 * 60
    options = argparse.Namespace(pack=tmp_path, driver="ctypes", emulate=True, only=[])
    late = run_all.run_stage("gemm", options, time.monotonic() + run_all.SLACK)
    assert late["failed"] == "no time was left" and late["results"] == []


def test_no_number_is_an_error() -> None:
    assert stages.error([np.nan, 1], [1, 1]) == stages.error([1], [1, 1]) == np.inf and stages.error([2], [2]) == 0
    assert stages.numbers(np.array([0x3F80], np.uint16), "bfloat16") == 1


def test_conformance_takes_its_kernels_from_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(text: str, arch: str, *, kind: str = "cubin") -> argparse.Namespace:
        return argparse.Namespace(image=f"{arch} {kind}".encode())

    monkeypatch.setattr(conformance, "compile_cuda", compiled)
    pack.write_conformance(tmp_path / "conformance", ("sm_80", "sm_90a"))
    assert len(list((tmp_path / "conformance").iterdir())) == 6  # two files for both, two for sm_90a
    machine = conformance.Machine.__new__(conformance.Machine)
    machine.emulate, machine.pack = False, tmp_path
    machine.driver = argparse.Namespace(arch=90)  # type: ignore[assignment]
    monkeypatch.setattr(conformance, "compile_cuda", lambda *a, **k: argparse.Namespace(image=b"compiled here"))
    text = (conformance.HERE / "primitives.cu").read_text()
    assert machine.image(text, "primitives.cu") == b"sm_90a cubin"
    assert machine.image(text + "\n", "primitives.cu") == b"compiled here"


def test_stages_need_only_numpy() -> None:
    blocked = ("islpy", "onnx", "sympy", "networkx", "click", "rich", "pycuda", "onnxruntime", "sklearn", "ml_dtypes")
    code = f"import sys\nfor m in {blocked}: sys.modules[m] = None\n"
    code += "from benchmarks.gpu import conformance, run_all, stages"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

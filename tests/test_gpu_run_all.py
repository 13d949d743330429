"""The script for a day with a GPU, over the CPU libcuda: every stage answers, failures stay where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from tiny import model, node

from benchmarks.gpu import pack, run_all

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
    code, report, said = run(folder, tmp_path / "r.json", *STAGES)
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


def test_a_failing_stage_stops_nothing(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "pack"
    broken.mkdir()
    for path in folder.iterdir():
        damaged = path.name == "gemm-gemm.polydyn"
        (broken / path.name).write_bytes(path.read_bytes()[:-100] if damaged else path.read_bytes())
    code, report, said = run(broken, tmp_path / "r.json", "gemm", "stitch")
    assert code == 1 and "failed" in report["stages"]["gemm"] and "damaged" in said
    assert all(r.get("ok", True) for r in report["stages"]["stitch"]["results"])


def test_a_hanging_process_is_stopped() -> None:
    code = 'import time; print("{\\"name\\": 1}", flush=True); time.sleep(60)'
    found = list(run_all.events([sys.executable, "-c", code], 1 - run_all.SLACK))
    assert found[0] == {"name": 1} and "was stopped" in found[1]["failed"]
    assert sum(run_all.STAGES.values()) <= 8 * 60


def test_stages_need_only_numpy() -> None:
    blocked = ("islpy", "onnx", "sympy", "networkx", "click", "rich", "pycuda", "onnxruntime", "sklearn")
    code = f"import sys\nfor m in {blocked}: sys.modules[m] = None\nfrom benchmarks.gpu import run_all, stages"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

"""torch's part of the first day, on the CPU libcuda: torch on the CPU replaces torch on the device."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polydyn
from benchmarks.gpu import compare, pack, real, transformers, twins
from benchmarks.gpu.stage import Output, Stage, torch_error
from benchmarks.gpu.timed import timed

torch = pytest.importorskip("torch")
CASES = ("layer_gelu_72x64", "attention_causal_2x64", "layernorm_float16")
SMALL_CONFIG = twins.Config(1, 32, 2, 50, 32, False)


class Graph:
    """A captured graph of torch: calls that are repeated on replay."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        time.sleep(1e-4)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1000


def tensor_of(array: Any) -> Any:
    """Return a tensor over the memory of the CPU libcuda, which it keeps alive."""
    kind = np.dtype(array.dtype)
    raw = (ctypes.c_char * array.nbytes).from_address(array.pointer)
    tensor = torch.from_numpy(np.frombuffer(raw, kind).reshape(array.shape))
    tensor.kept = array
    return tensor


class OnTheHost:
    """torch without its CUDA side."""

    cuda = SimpleNamespace(
        CUDAGraph=Graph, Event=Event, synchronize=lambda: None, graph=lambda made: contextlib.nullcontext()
    )
    from_dlpack = staticmethod(tensor_of)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack")
    entries = [e for c in timed(True) if c.name in CASES for e in pack.write(c, path, "cuda:emulated")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers, "CONFIGS", {"bert_base": SMALL_CONFIG})
        program: Any = polydyn.compile(transformers.build("bert_base", "float16"), target="cuda:emulated")
    program.save(path / "real-bert_base.polydyn")
    entries.append({"name": "bert_base", "kind": "real", "file": "real-bert_base", "shapes": [{"B": 2, "L": 9}],
                    "checked": 0, "dtype": "float16", "rival": "bert_base", "limit": 3e-2})  # fmt: skip
    (path / "cases.json").write_text(json.dumps({"cases": entries}))
    return path


@pytest.fixture
def stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    made = Stage(argparse.Namespace(emulate=True, pack=folder, driver="ctypes", only=[]))
    made.__dict__["torch"] = OnTheHost()
    yield made


@pytest.mark.parametrize("name", CASES)
def test_cases_agree_with_torch_and_stand_beside_it(stage: Stage, name: str) -> None:
    case = next(c for c in stage.cases if c["name"] == name)
    theirs = partial(compare.rival_of, stage)
    got = compare.compare(stage, case, case["shapes"][0], theirs)
    assert got is not None and "message" not in got and got["ok"], got
    assert got["over_torch"] == pytest.approx(got["torch_us"] / got["us"]) and got["torch_cold_us"] > 0


def test_a_model_agrees_with_its_twin(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "CONFIGS", {"bert_base": SMALL_CONFIG})
    (case,) = stage.cases_of("real")
    theirs = partial(real.function, stage, "bert_base", "torch")
    got = real.compare(stage, case, case["shapes"][0], "torch", theirs)
    assert got is not None and "message" not in got and got["ok"], got
    assert got["over_torch"] > 0 and got["calls_over_torch"] > 0 and got["torch_first_s"] > 0


def test_every_version_is_compared_on_the_device(stage: Stage) -> None:
    case = next(c for c in stage.cases if c["name"] == "layer_gelu_72x64")
    got = compare.select(stage, case, case["shapes"][0])
    assert got is not None and got["ok"] and len(got["versions"]) > 1


def test_what_is_not_a_number_or_stale_is_an_error(stage: Stage) -> None:
    program = stage.program(stage.cases_of("layers")[0])
    output = Output(stage, next(iter(compare.outputs(stage, program, {"M": 2}).values())))
    tensor_of(output.array).fill_(2)
    output.keep()
    assert output.error() == 0
    output.poison()
    assert output.error() == np.inf
    assert torch_error(torch, torch.ones(2), torch.full((2,), 2.0)) == 0.5
    assert torch_error(torch, torch.ones(2), torch.ones(3)) == np.inf

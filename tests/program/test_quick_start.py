"""A quick start: a stand-in answers calls until a process has compiled the model; nothing is lost if that fails."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn import program_cache, quick_start
from polydyn.build.cache import cache_dir
from polydyn.cli import main
from polydyn.errors import InputError, ModelError, PolydynError, UnsupportedError
from polydyn.program_cache import compile as compile_cached
from polydyn.program_key import Arguments, program_key
from polydyn.program_store import store_program
from polydyn.quick_start import Evaluator, OnnxRuntime, QuickProgram, _Compiling
from polydyn.runtime.program import Program
from tests.support.tiny import model, node

F = "float32"
X = np.arange(12, dtype=F).reshape(4, 3)


def square() -> onnx.ModelProto:
    return model([node("Mul", "x x", "q"), node("ReduceSum", "q", "y")], {"x": (F, ["N", 3])}, ["y"])


@pytest.fixture(scope="module")
def compiled() -> Program:
    return polydyn.compile(square(), threads=1)


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: Program) -> Iterator[threading.Event]:
    """Let "the process" save the compiled program once the event is set. Real processes are tested at the end."""
    for name in ("POLYDYN_VERIFY", "POLYDYN_DEBUG", "POLYDYN_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    own, ready = tmp_path / "cache", threading.Event()
    own.mkdir()
    (own / "objects").symlink_to(cache_dir("objects"))
    monkeypatch.setenv("POLYDYN_CACHE", str(own))

    class Held:
        problem = ""

        def __init__(self, *_: Any) -> None:
            self.program = tmp_path / "program"

        def wait(self) -> str:
            ready.wait()
            compiled.save(self.program)
            return self.problem

        def close(self) -> None:
            ready.set()

    monkeypatch.setattr(quick_start, "_Compiling", Held)
    yield ready
    ready.set()


def quick(m: Any, **arguments: Any) -> QuickProgram:
    program = compile_cached(m, threads=1, start="quick", **arguments)
    assert isinstance(program, QuickProgram)
    return program


def take_over(program: QuickProgram, ready: threading.Event) -> None:
    ready.set()
    program._taking_over.join()


@pytest.mark.parametrize("stand_in", [OnnxRuntime, Evaluator])
def test_the_compiled_program_takes_over_between_two_calls(
    stand_in: type, held: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if stand_in is Evaluator:
        monkeypatch.setattr(quick_start, "OnnxRuntime", _missing)
    caplog.set_level(logging.INFO, "polydyn.start")
    program = quick(square())
    assert isinstance(program._stand_in, stand_in) and "answers calls while" in program.start
    assert program.inputs == {"x": "float32[N, 3]"} and list(program.outputs) == ["y"]
    before, out = program.run({"x": X})["y"], np.empty((1, 1), F)
    assert program.run({"x": X}, {"y": out})["y"] is out
    take_over(program, held)
    after = program(x=X)["y"]
    np.testing.assert_allclose(before, after, rtol=1e-6)
    np.testing.assert_array_equal(out, before)
    assert program.start.startswith("the compiled program answers, after 2 calls") and program.start in caplog.messages
    assert program.kernel_count and program.explain(N=4) and program._stand_in is None


def test_inspect_shows_who_answered_before(held: threading.Event, tmp_path: Path, compiled: Program) -> None:
    program = quick(square())
    program.run({"x": X})
    take_over(program, held)
    note = "quick start: ONNX Runtime answered calls before this program (1), with other rounding"
    assert program.manifest["notes"] == [*compiled.manifest["notes"], note] and note in program.explain(N=4).details()
    program.save(tmp_path / "p.polydyn")
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "p.polydyn")])
    assert shown.exit_code == 0 and note in " ".join(shown.output.split())
    unused = quick(square())
    take_over(unused, held)
    assert unused.manifest["notes"] == compiled.manifest["notes"], "no call was answered by another implementation"


def _missing(*_: Any) -> Any:
    raise UnsupportedError("not installed")


def test_showing_a_program_does_not_wait(held: threading.Event) -> None:
    """A notebook or a debugger shows it, and IPython looks for methods that it may have."""
    program = quick(square())
    assert repr(program).startswith("<QuickProgram: ") and "while the model is compiled" in program._repr_html_()
    assert not hasattr(program, "_ipython_display_") and not hasattr(program, "_repr_png_") and not held.is_set()
    take_over(program, held)
    assert repr(program).startswith("<Program ") and "input" in program._repr_html_()


def test_calls_that_the_stand_in_cannot_answer_wait(held: threading.Event) -> None:
    program = quick(square(), dims={"N": (1, 8)})
    threading.Timer(0.2, held.set).start()
    begin = time.monotonic()
    for wrong in ({"x": X.astype(int)}, {"z": X}, {"x": X[0]}):
        with pytest.raises(InputError):
            program.run(wrong)
    assert time.monotonic() - begin >= 0.15
    assert program.guards == [] and program.run({"x": X})["y"].shape == (1, 1)


def test_sizes_outside_the_declared_ones_wait(held: threading.Event) -> None:
    stand_in = quick(square(), dims={"N": (1, 3)})._stand_in
    assert stand_in is not None and stand_in.run({"x": X[:2]})
    with pytest.raises(InputError, match="N is 4"):
        stand_in.run({"x": X})


def test_without_a_process_nothing_is_lost(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiled: Program
) -> None:
    monkeypatch.setattr(quick_start._Compiling, "problem", "UnsupportedError: it has ended")
    program = quick(square())
    take_over(program, held)
    assert "it has ended" in program.start and "could not be compiled: UnsupportedError" in caplog.text
    assert program.run({"x": X})["y"].shape == (1, 1)  # still by the stand-in
    monkeypatch.setattr(program_cache, "_compile", lambda *_: compiled)
    assert program.kernel_count == compiled.kernel_count  # compiled here
    assert program.start.startswith("the compiled program answers")


def test_a_forked_process_takes_the_stored_program(held: threading.Event, compiled: Program) -> None:
    program = quick(square())
    store_program(compiled, program._key)

    def check() -> None:
        same = np.array_equal(program.run({"x": X})["y"], compiled.run({"x": X})["y"])
        os._exit(0 if same and program.start.startswith("the compiled") and program.kernel_count else 1)

    child = multiprocessing.get_context("fork").Process(target=check)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_stored_programs_and_wrong_arguments(held: threading.Event, compiled: Program) -> None:
    store_program(compiled, program_key(square(), Arguments()))
    assert type(compile_cached(square(), start="quick")) is Program
    with pytest.raises(ModelError, match="cannot read missing"):  # no stand-in, so it is compiled at once
        compile_cached("missing.onnx", start="quick")
    for arguments, message in (
        ({"start": "slow"}, "'full' or 'quick'"), ({"target": "cuda:sm_80"}, "for the CPU"),
        ({"target": "cpu:none"}, "unknown target"), ({"dims": {"N": (3, 2)}}, "no size"),
    ):  # fmt: skip
        with pytest.raises(PolydynError, match=message):
            compile_cached(square(), **{"start": "quick", **arguments})


def test_sessions_start_quickly(held: threading.Event) -> None:
    options = polydyn.SessionOptions()
    options.add_session_config_entry("polydyn.start", "quick")
    session = polydyn.InferenceSession(square().SerializeToString(), options)
    assert isinstance(session.program, QuickProgram)
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [("x", "tensor(float)", ["N", 3])]
    (before,) = session.run(None, {"x": X})
    take_over(session.program, held)
    np.testing.assert_allclose(session.run(None, {"x": X})[0], before, rtol=1e-6)
    options.add_session_config_entry("polydyn.start", "slow")
    with pytest.raises(InputError, match="'full' or 'quick'"):
        polydyn.InferenceSession(square().SerializeToString(), options)


def test_a_process_writes_the_program_of_the_model(compiled: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("POLYDYN_VERIFY", "POLYDYN_DEBUG", "POLYDYN_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    data = square().SerializeToString(deterministic=True)
    store_program(compiled, program_key(data, Arguments()))  # the process only has to open it
    done, failed = (_Compiling(data, Arguments(), threads, True) for threads in (1, 0))
    assert done.wait() == "" and polydyn.load(done.program).kernel_count == compiled.kernel_count
    assert failed.wait().startswith("InputError: threads is 0")
    for process in (done, failed):
        process.close()
        assert not Path(process._folder).exists()


@pytest.mark.slow
def test_a_process_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    onnx.save(model([node("Exp", "x", "y")], {"x": (F, ["N", 3])}, ["y"]), str(path))
    text = f"""
import os, signal, polydyn
program = polydyn.compile({str(path)!r}, start="quick", cache=False)
print(program._process._process.pid, program._process._folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL
    pid, folder = run.stdout.split()
    end = time.monotonic() + 60
    while Path("/proc", pid).exists() or Path(folder).exists():
        assert time.monotonic() < end
        time.sleep(0.05)

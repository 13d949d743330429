"""Files, forks, threads and arguments that reach a program from outside: right, or rejected by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import polydyn
from polydyn.errors import ArtifactError, InputError, ModelError
from polydyn.graph.data_files import locations
from polydyn.program_key import external_files, model_digest
from polydyn.runtime import artifact
from tests.support.tiny import model, node

F = "float32"


def product(k: int = 1) -> onnx.ModelProto:
    weights = np.full((4, 300), k, np.float32)
    return model([node("MatMul", "x w", "y")], {"x": (F, ["N", 4])}, ["y"], {"w": weights})


# -- external data ---------------------------------------------------------------------------------------------------


def with_data_at(folder: Path, location: str, in_function: bool = False) -> Path:
    """Write a model whose weight is an external tensor, of the graph or of a function's Constant."""
    m = product()
    (weight,) = m.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    if in_function:
        constant = onnx.helper.make_node("Constant", [], ["w"], value=weight)
        body = [constant, onnx.helper.make_node("MatMul", ["x", "w"], ["y"])]
        opsets = [m.opset_import[0]]
        m.functions.append(onnx.helper.make_function("own", "Product", ["x"], ["y"], body, opsets))
        m.opset_import.append(onnx.helper.make_opsetid("own", 1))
        del m.graph.initializer[:], m.graph.node[:]
        m.graph.node.append(onnx.helper.make_node("Product", ["x"], ["y"], domain="own"))
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(m.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize("location", ["../" * 20 + "dev/zero", "fifo", "../outside", ".", "a\0b", "n" * 5000, "loop"])
@pytest.mark.parametrize("in_function", [False, True])
def test_external_data_is_not_read_before_its_place_is_checked(
    location: str, in_function: bool, tmp_path: Path
) -> None:
    """A pipe would hang, /dev/zero would take all memory."""
    path = with_data_at(tmp_path / "model", location, in_function)
    os.mkfifo(path.parent / "fifo")
    (path.parent / "loop").symlink_to("loop")
    (tmp_path / "outside").write_bytes(bytes(4800))
    calls: list[Callable[[], object]] = [lambda: model_digest(path), lambda: polydyn.InferenceSession(path)]
    for call in (*calls, lambda: polydyn.compile(path)):
        with pytest.raises(ModelError, match="data file"):
            call()


def test_data_of_functions_and_behind_links_count_in_the_key(tmp_path: Path) -> None:
    path = with_data_at(tmp_path / "model", "w.bin", in_function=True)
    (tmp_path / "link.onnx").symlink_to(path)
    keys = set()
    for k in (1, 2):
        (path.parent / "w.bin").write_bytes(np.full((4, 300), k, np.float32).tobytes())
        assert model_digest(path) == model_digest(tmp_path / "link.onnx")
        keys.add(model_digest(path))
    assert len(keys) == 2
    assert external_files(path.read_bytes(), path.parent) == {"w.bin": path.parent.resolve() / "w.bin"}
    assert locations(path.read_bytes()) == ["w.bin"]
    proto = onnx.load(str(path), load_external_data=False)
    proto.doc_string = "its location"  # only a parser knows that this is no data file
    assert locations(proto.SerializeToString()) is None
    assert external_files(proto.SerializeToString(), path.parent).keys() == {"w.bin"}


# -- saved programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [True, False])
def test_a_saved_program_that_is_overwritten_gives_no_other_numbers(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small weights are copied and stay unchanged; calls of a program with mapped ones are rejected."""
    one, two = tmp_path / "one", tmp_path / "two"
    polydyn.compile(product(1), threads=1).save(one)
    polydyn.compile(product(2), threads=1).save(two)
    monkeypatch.setattr(artifact, "MAX_COPIED_BYTES", artifact.MAX_COPIED_BYTES if copied else 0)
    program, x = polydyn.load(one), {"x": np.ones((1, 4), np.float32)}
    bound = program.bind(x)
    one.touch()
    assert program.run(x)["y"][0, 0] == bound()["y"][0, 0] == 4, "only the times of the file were changed"
    for change in (lambda: shutil.copyfile(two, one), lambda: os.truncate(one, 10)):
        change()
        for call in (lambda: program.run(x), bound):
            if copied:
                assert call()["y"][0, 0] == 4
            else:
                with pytest.raises(ArtifactError, match="was overwritten"):
                    call()
    program = polydyn.load(two)
    os.replace(one, two)  # another file of the same name, like Program.save
    assert program.run(x)["y"][0, 0] == 8


def test_a_program_of_parts_knows_that_its_file_was_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "MAX_COPIED_BYTES", 0)
    m = product()
    m.graph.node.extend([node("NonZero", "y", "z")])
    m.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.INT64, [2, "K"]))
    polydyn.compile(m, threads=1).save(tmp_path / "one")
    program, x = polydyn.load(tmp_path / "one"), {"x": np.ones((1, 4), np.float32)}
    bound = program.bind(x)
    assert program.run(x)["z"].shape == bound()["z"].shape == (2, 300)
    os.truncate(tmp_path / "one", 10)
    for call in (lambda: program.run(x), bound):
        with pytest.raises(ArtifactError, match="was overwritten"):
            call()


# -- forks and signals -----------------------------------------------------------------------------------------------

FORK = """
import os, signal, sys, threading, time, warnings
import numpy as np, polydyn
from tests.robustness.test_doors import product
warnings.simplefilter("ignore")
x = np.ones((2000, 4), np.float32)
program = polydyn.compile(product(), threads=2)
session = polydyn.InferenceSession(product().SerializeToString(), providers=["CPUExecutionProvider"])
binding = session.io_binding()
binding.bind_cpu_input("x", x)
binding.bind_ortvalue_output("y", polydyn.OrtValue.ortvalue_from_numpy(np.empty((2000, 300), np.float32)))
session.run_with_iobinding(binding)
bound = program.bind({"x": x})
for call in (bound, lambda: session.run_with_iobinding(binding)):
    ends = threading.Event()
    def work():
        while not ends.is_set(): call()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads: t.start()
    for _ in range(2):
        time.sleep(0.02)
        if not (child := os.fork()):
            signal.alarm(20)
            call()
            right = (bound.outputs["y"] == 4).all() and (binding.get_outputs()[0].numpy() == 4).all()
            os._exit(0 if right and (bound()["y"] == 4).all() else 3)
        print(os.waitpid(child, 0)[1])
    ends.set()
    for t in threads: t.join()
signal.signal(signal.SIGALRM, lambda *_: bound())
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
for _ in range(100): bound()
signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
"""


def test_bound_calls_work_in_a_child_and_in_a_signal_handler() -> None:
    done: Any = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0"] * 4 + ["done"], done.stdout + done.stderr


# -- sessions --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> polydyn.InferenceSession:
    m = model([node("Add", "a a", "o")], {"a": ("int64", ["self", 1])}, ["o"])
    return polydyn.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "feeds", [{}, {"a": [[1], [1, 2]]}, {"a": [["x"]]}, {"a": [[None]]}, {"a": [[2**70]]}, None, 3]
)
def test_run_async_always_calls_back(session: polydyn.InferenceSession, feeds: Any) -> None:
    done, said = threading.Event(), []
    session.run_async(None, feeds, lambda *given: (said.append(given), done.set()), "mine")
    assert done.wait(10) and said[0][:2] == ([], "mine") and said[0][2]
    with pytest.raises(InputError):
        session.run(None, feeds)


def test_run_async_reports_every_exception(session: polydyn.InferenceSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(session.program, "run", failing, raising=False)
    done, said = threading.Event(), []
    session.run_async(None, {"a": [[1]]}, lambda *given: (said.append(given), done.set()), None)
    assert done.wait(10) and said == [([], None, "MemoryError: no room")]
    with pytest.raises(InputError, match="callback"):
        session.run_async(None, {}, None, None)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused_by_name(session: polydyn.InferenceSession) -> None:
    value, binding = polydyn.OrtValue, session.io_binding()
    one = value.ortvalue_from_numpy(np.zeros((1, 1), np.int64))
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: session.run("o", {}), "output_names is the text 'o'"),
        (lambda: session.run_with_ort_values(None, [one]), "input_feed is a list"),  # type: ignore[arg-type]
        (lambda: value.ortvalue_from_numpy([1, 2]), "a list is not a numpy array"),  # type: ignore[arg-type]
        (lambda: value.ortvalue_from_numpy_with_onnx_type([1], 1), "not a numpy array"),  # type: ignore[arg-type]
        (lambda: one.update_inplace([[1]]), "not a numpy array"),  # type: ignore[arg-type]
        (lambda: value.from_dlpack([1]), "no __dlpack__"),
        (lambda: value.ortvalue_from_shape_and_type([-1], np.float32), "the shape"),
        (lambda: value.ortvalue_from_shape_and_type([1.5], np.float32), "the shape"),  # type: ignore[list-item]
        (lambda: value.ortvalue_from_shape_and_type([1], None), "None is not an element type"),
        (lambda: binding.bind_output("o", "cpu", 0, "foo", (1, 1), 64), "'foo' is not an element type"),
        (lambda: binding.bind_output("o", "cpu", 0, np.int64, (-1, 1), 64), "the shape"),
        (lambda: binding.bind_output("o", "cpu", 0, np.int64, (1, 1), 0), "the address is 0"),
        (lambda: binding.bind_input("a", "cpu", 0, np.int64, (1, 1), None), "the address"),  # type: ignore[arg-type]
        (lambda: polydyn.InferenceSession("a\0b"), "embedded null byte"),
    ]
    for call, message in wrong:
        with pytest.raises((InputError, ModelError), match=message):
            call()


def test_dims_may_have_the_name_of_a_parameter(session: polydyn.InferenceSession) -> None:
    assert "self=3" in str(session.program.explain(self=3))
    m = model([node("Add", "self self", "o")], {"self": (F, ["N"])}, ["o"])
    x = np.ones(2, np.float32)
    assert polydyn.compile(m, threads=1)(self=x)["o"].tolist() == [2, 2]


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_a_size_that_is_too_large_says_so() -> None:
    m = model([node("ConstantOfShape", "s", "o")], {"s": ("int64", [1])}, ["o"])
    with pytest.raises(InputError, match=r"(?s)element 0 of s is 4611686018427387904\n.*below 2\^62"):
        polydyn.compile(m, threads=1).run({"s": np.array([2**62])})


STEPS = [-(2**63), 2**63 - 1, -(2**31), -7, 6]


@pytest.mark.parametrize("fixed", [True, False])
def test_slices_by_steps_of_any_length(fixed: bool) -> None:
    """A step that is longer than the axis takes one element; its negative may not fit 64 bits."""
    x = np.arange(5, dtype=np.float32)
    ends = np.array([[0, 3], [-1, -(2**62)], [2, 0]])
    more = {n: ("int64", [1]) for n in "se"} | ({} if fixed else {"t": ("int64", [1])})
    for step in STEPS:
        constants = {"a": np.array([0])} | ({"t": np.array([step])} if fixed else {})
        if fixed or step == STEPS[0]:
            m = model([node("Slice", "x s e a t", "o")], {"x": (F, ["N"])} | more, ["o"], constants)
            program = polydyn.compile(m, threads=1)
            theirs = onnxruntime.InferenceSession(m.SerializeToString())
        for start, end in ends:
            feeds = {"x": x, "s": np.array([start]), "e": np.array([end])} | ({} if fixed else {"t": np.array([step])})
            wanted = theirs.run(None, feeds)[0] if step > -(2**63) else x[start:end:step]
            np.testing.assert_array_equal(program.run(feeds)["o"], wanted, err_msg=f"{start}:{end}:{step}")

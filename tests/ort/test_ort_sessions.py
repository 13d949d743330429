"""Sessions of ONNX Runtime in which polydyn computes: results, rejected calls, options, threads, bindings."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import polydyn
import polydyn.ort
from polydyn.errors import InputError
from tests.support.ort_sessions import (
    NAME,
    WEIGHT,
    compiling_process,
    divided,
    equal_sizes,
    found,
    layer,
    messages,
    plain,
    rows,
    session,
)
from tests.support.paths import ROOT
from tests.support.tiny import model, node

COUNTS = (0, 1, 2, 7, 33)


@pytest.fixture(scope="module")
def layers() -> Any:
    """Return a session whose program computes every call, or raises an error."""
    return session(layer(), strict=True, threads=2)


def test_results_have_the_bits_of_the_program(layers: Any) -> None:
    program, reference = polydyn.compile(layer(), threads=2), plain(layer())
    assert layers.get_providers()[0] == NAME
    for count in COUNTS:
        (got,) = layers.run(None, rows(count))
        assert got.tobytes() == program(**rows(count))["y"].tobytes()
        np.testing.assert_allclose(got, reference.run(None, rows(count))[0], atol=1e-6)


def test_the_provider_by_name_and_by_device(layers: Any) -> None:
    polydyn.ort.register()
    (device,) = polydyn.ort.devices()
    assert device.ep_name == NAME == polydyn.ort.get_ep_name() and polydyn.ort.get_ep_names() == [NAME]
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices([device], polydyn.ort.provider_options(strict=True))
    sessions = [onnxruntime.InferenceSession(layer().SerializeToString(), options)]
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 25):
        more = [NAME, (NAME, {"strict": "1"}), (NAME, polydyn.ort.provider_options(strict=True))]
        sessions += [onnxruntime.InferenceSession(layer().SerializeToString(), providers=[p]) for p in more]
    for s in sessions:
        assert s.get_providers()[0] == NAME
        assert s.run(None, rows(7))[0].tobytes() == layers.run(None, rows(7))[0].tobytes()


def test_threads_and_bindings(layers: Any) -> None:
    expected = {n: layers.run(None, rows(n))[0] for n in range(1, 9)}
    with ThreadPoolExecutor(8) as pool:
        for n, got in pool.map(lambda k: (1 + k % 8, layers.run(None, rows(1 + k % 8))[0]), range(100)):
            assert got.tobytes() == expected[n].tobytes()
    binding, out = layers.io_binding(), np.zeros((7, 4), "float32")
    binding.bind_cpu_input("x", rows(7)["x"])
    binding.bind_ortvalue_output("y", onnxruntime.OrtValue.ortvalue_from_numpy(out))
    layers.run_with_iobinding(binding)
    assert binding.get_outputs()[0].numpy().tobytes() == expected[7].tobytes()


def test_a_rejected_call_is_computed_by_onnx_runtime_unless_strict(capfd: pytest.CaptureFixture[str]) -> None:
    x, z = np.ones(3, "float32"), np.ones(5, "float32")
    s = session(equal_sizes(), level=2)
    capfd.readouterr()
    for _ in range(2):
        np.testing.assert_array_equal(
            s.run(None, {"x": x, "z": z})[0], plain(equal_sizes()).run(None, {"x": x, "z": z})[0]
        )
    said = messages(capfd.readouterr().err)
    assert len(said) == 1 and said[0].startswith("a call was left to ONNX Runtime's kernels: polydyn: input 'z'")
    strict = session(equal_sizes(), strict=True)
    with pytest.raises(Exception, match=r"polydyn: input 'z' of shape (?s:.*)both called N") as caught:
        strict.run(None, {"x": x, "z": z})
    assert "INVALID_ARGUMENT" in str(caught.value)
    assert strict.run(None, {"x": x, "z": x})[0].shape == (3,)


def test_a_call_that_a_later_part_rejects_has_other_sizes_in_onnx_runtime() -> None:
    """The number of found elements must be x's size for polydyn; a size of 1 is broadcast by ONNX Runtime."""
    nodes = [node("NonZero", "m", "i"), node("Cast", "i", "f", to=1), node("ReduceSum", "f a", "r", keepdims=0),
             node("Add", "x r", "y")]  # fmt: skip
    m = model(nodes, {"m": ("bool", ["N"]), "x": ("float32", ["M"])}, ["y"], {"a": np.array([0])})
    m.ir_version = 9
    s, reference = session(m), plain(m)
    for count, size in ((3, 3), (3, 1), (1, 1), (5, 1)):
        feeds = {"m": np.arange(6) < count, "x": np.ones(size, "float32")}
        (got,), (expected,) = s.run(None, feeds), reference.run(None, feeds)
        assert got.shape == expected.shape and got.tobytes() == expected.tobytes()


def test_a_process_ends_with_an_open_session(tmp_path: Path) -> None:
    """The inner session of a rejected call is released after everything else of the process."""
    (tmp_path / "m.onnx").write_bytes(equal_sizes().SerializeToString())
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import numpy, polydyn.ort\n"
        "s = polydyn.ort.InferenceSession('m.onnx')\n"
        "f = lambda: s.run(None, {'x': numpy.ones(3, 'float32'), 'z': numpy.ones(5, 'float32')})\n"
        "print(f()[0].shape)\n"
        "sys.modules['kept'] = f"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(3,)\n"), done.stderr


def test_parts_that_are_not_imported_stay_with_onnx_runtime(capfd: pytest.CaptureFixture[str]) -> None:
    s, reference = session(divided(), level=2, threads=2), plain(divided())
    said = messages(capfd.readouterr().err)
    assert said[0] == "computes 5 of 6 nodes, in 2 sets; ONNX Runtime computes the others"
    assert "TfIdfVectorizer): the operator is not built" in said[1]
    for count in COUNTS[1:]:
        np.testing.assert_allclose(s.run(None, rows(count))[0], reference.run(None, rows(count))[0], rtol=1e-6)
    if hasattr(s, "get_provider_graph_assignment_info"):
        sets = [len(a.get_nodes()) for a in s.get_provider_graph_assignment_info() if a.ep_name == NAME]
        assert sorted(sets) == [2, 3]


def test_threads_of_one_program_may_be_started_by_another() -> None:
    """Programs of a session share threads. The first set is too small to start them; its program ends last."""
    nodes = [node("Exp", "a", "e"), node("Neg", "e", "f"), node("Add", "x f", "g"), node("Tanh", "g", "y")]
    m = model(nodes, {"a": ("float32", [64]), "x": ("float32", ["B", 64])}, ["y"])
    m.ir_version = 9
    feeds = {"a": np.zeros(64, "float32"), "x": np.ones((4000, 64), "float32")}
    for _ in range(3):
        s = session(m, threads=2, exclude="Neg", min_nodes=1)
        for _ in range(20):
            np.testing.assert_allclose(s.run(None, feeds)[0], 0, atol=1e-6)
        del s


def test_sizes_that_data_decide_and_empty_tensors() -> None:
    s, reference = session(found(), strict=True), plain(found())
    for shape in ((3, 4), (1, 1), (0, 3), (20, 7)):
        x = np.random.default_rng(1).standard_normal(shape).astype("float32")
        for a, b in zip(s.run(None, {"x": x}), reference.run(None, {"x": x}), strict=True):
            assert a.shape == b.shape and a.tobytes() == b.tobytes()


def test_an_initializer_that_is_an_input_may_be_overridden() -> None:
    m = layer()
    m.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [3, 4]))
    s, reference = session(m, strict=True), plain(m)
    for more in ({}, {"w": -WEIGHT}):
        np.testing.assert_allclose(
            s.run(None, rows(7) | more)[0], reference.run(None, rows(7) | more)[0], atol=1e-6
        )  # fmt: skip


def test_wrong_options_are_rejected_by_name() -> None:
    for wrong, text in (
        ({"compile": "later"}, "compile is 'later'"), ({"threads": 0}, "threads is 0"), ({"min_nodes": 0}, "min_nodes"),
        ({"nothing": 1}, "no option 'nothing'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            polydyn.ort.provider_options(**wrong)
    texts = {
        "compile": "wait or background", "threads": "1 to 256", "strict": "1 or 0", "nothing": "min_nodes, dim.NAME",
        "dim.B": "does not describe sizes", "dim.Z": "dims names Z", "precision": "unknown precision",
        "target": "the provider computes on the CPU",
    }  # fmt: skip
    for name, text in texts.items():
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.add_provider_for_devices(
            polydyn.ort.devices(), {name: {"target": "cuda", "dim.Z": "1:2"}.get(name, "0x")}
        )
        with pytest.raises(Exception, match=text):
            onnxruntime.InferenceSession(layer().SerializeToString(), options, enable_fallback=0)


def test_options_reach_the_compiler() -> None:
    options = polydyn.ort.provider_options(dims={"B": (1, 8)}, without=["stitch"], exclude="Tanh", threads=3)
    assert options == {
        "compile": "wait", "strict": "0", "threads": "3", "exclude": "Tanh", "without": "stitch", "dim.B": "1:8",
    }  # fmt: skip
    s = session(layer(), dims={"B": (1, 8)}, strict=True)
    assert s.run(None, rows(8))[0].shape == (8, 4)
    with pytest.raises(Exception, match=r"polydyn: dim B (?s:.*)rule: B is at most 8"):
        s.run(None, rows(9))


def test_a_damaged_program_is_compiled_again(tmp_path: Path) -> None:
    s = session(layer(), strict=True, cache_dir=tmp_path)
    (path,) = tmp_path.glob("*.ep")
    for damage in (path.read_bytes()[:5000], _flipped(path.read_bytes())):
        del s
        path.write_bytes(damage)
        s = session(layer(), strict=True, cache_dir=tmp_path)
        assert s.run(None, rows(2))[0].shape == (2, 4)


def test_files_of_the_cache_may_be_removed_while_a_session_is_open(tmp_path: Path) -> None:
    s = session(equal_sizes(), cache_dir=tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    x, z = np.ones(3, "float32"), np.ones(5, "float32")
    assert s.run(None, {"x": x, "z": x})[0].shape == (3,)
    np.testing.assert_allclose(s.run(None, {"x": x, "z": z})[0], 5 * np.exp(x), rtol=1e-6)


def _flipped(data: bytes) -> bytes:
    """Return a program's file with one other byte in its library."""
    return data[:6000] + bytes([data[6000] ^ 1]) + data[6001:]


def test_a_process_that_does_not_compile(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """ONNX Runtime computes the graph, and says why; with ``strict`` the session fails."""
    m = layer()
    m.graph.node[1].op_type = "Sign"
    for code, text in (("raise SystemExit('no words')", "ended without an answer. no words"),
                       ("import os; os.kill(os.getpid(), 9)", "ended without an answer")):  # fmt: skip
        with compiling_process(code):
            capfd.readouterr()
            np.testing.assert_allclose(
                session(m, level=2, cache_dir=tmp_path).run(None, rows(2))[0], plain(m).run(None, rows(2))[0], rtol=1e-6
            )  # fmt: skip
            assert text in capfd.readouterr().err
            with pytest.raises(Exception, match=text):
                session(m, strict=True, cache_dir=tmp_path)
    with pytest.raises(Exception, match=r"cannot start .*(?s:.*)POLYDYN_ORT_PYTHON"):
        session(m, strict=True, python="/none/python", cache_dir=tmp_path)


def test_a_host_may_ignore_ended_processes(tmp_path: Path) -> None:
    """The exit code of a child is lost in such a host, so it is not used."""
    m = layer()
    m.graph.node[1].op_type = "Sigmoid"
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    code = (
        "import signal, numpy, polydyn.ort; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "s = polydyn.ort.InferenceSession('m.onnx', strict=True)\n"
        "print(s.run(None, {'x': numpy.ones((2, 3), numpy.float32)})[0].shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"], cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "(2, 4)\n", done.stderr
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL

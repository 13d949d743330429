"""InferenceSession: code for ONNX Runtime with one import changed, compared with ONNX Runtime."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import polydyn
import polydyn.session
from polydyn import compiler
from polydyn.errors import InputError, ModelError, ShapeError, UnsupportedError
from tests.support.marks import slow
from tests.support.stored import path_of
from tests.support.tiny import model, node

BERT = path_of("bert_tiny")
RNG = np.random.default_rng(0)


def feeds(batch: int = 2, length: int = 5) -> dict[str, np.ndarray]:
    ids = RNG.integers(0, 100, (batch, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def both(example: Callable[[ModuleType], Any]) -> tuple[Any, Any]:
    """Return the result of an example with each import."""
    return example(onnxruntime), example(polydyn.session)


# -- ONNX Runtime's own Python examples, with the module as the argument -----------------------------------------------


@pytest.mark.parametrize(
    "name", ["bert_tiny", "gpt2_past_tiny", "t5_tiny", slow("vit_hw_tiny"), slow("squeezenet_tiny")]
)
def test_inputs_and_outputs_are_described_alike(name: str) -> None:
    def example(ort: Any) -> Any:
        s = ort.InferenceSession(path_of(name), providers=["CPUExecutionProvider"])
        fixed = [[n for n in a.shape if isinstance(n, int)] for a in s.get_inputs()]
        return [[(a.name, a.type, len(a.shape)) for a in ends] for ends in (s.get_inputs(), s.get_outputs())], fixed

    theirs, ours = both(example)
    assert ours == theirs


def test_run_gives_lists_in_the_order_asked() -> None:
    given = feeds()

    def example(ort: Any) -> Any:
        s = ort.InferenceSession(BERT, ort.SessionOptions(), ["CPUExecutionProvider"])
        first = s.get_outputs()[0].name
        lists = {n: a.tolist() for n, a in given.items()}
        return [s.run(None, given), s.run([first], given), s.run([], given, ort.RunOptions()), s.run(None, lists)]

    theirs, ours = both(example)
    for a, b in zip(ours, theirs, strict=True):
        assert len(a) == len(b)
        np.testing.assert_allclose(a[0], b[0], rtol=0, atol=2e-5)


def test_metadata_is_the_models(tmp_path: Path) -> None:
    m = onnx.load(BERT)
    m.doc_string, m.domain, m.model_version, m.graph.doc_string = "about", "ai.example", 7, "graph"
    entry = m.metadata_props.add()
    entry.key, entry.value = "names", "{0: 'person'}"
    onnx.save(m, str(tmp_path / "m.onnx"))

    def example(ort: Any) -> Any:
        found = [ort.InferenceSession(p).get_modelmeta() for p in (BERT, str(tmp_path / "m.onnx"))]
        fields = ("custom_metadata_map", "description", "domain", "graph_description", "graph_name", "producer_name")
        return [[getattr(f, x) for x in (*fields, "version")] for f in found]

    theirs, ours = both(example)
    assert ours == theirs and ours[1][0] == {"names": "{0: 'person'}"}


def test_io_binding_with_arrays_and_preallocated_outputs() -> None:
    given = feeds()

    def example(ort: Any) -> Any:
        s = ort.InferenceSession(BERT)
        io = s.io_binding()
        ids = ort.OrtValue.ortvalue_from_numpy(given["input_ids"].copy())
        mask = given["attention_mask"]
        io.bind_input("input_ids", ids.device_name(), 0, np.int64, ids.shape(), ids.data_ptr())
        io.bind_cpu_input("attention_mask", mask)
        y = ort.OrtValue.ortvalue_from_shape_and_type([2, 5, 32], np.float32, "cpu", 0)
        io.bind_output("last_hidden_state", y.device_name(), 0, np.float32, y.shape(), y.data_ptr())
        s.run_with_iobinding(io)
        first = io.copy_outputs_to_cpu()[0].copy()
        ids.update_inplace(np.zeros((2, 5), np.int64))
        s.run_with_iobinding(io)
        io2 = ort.IOBinding(s)
        io2.bind_ortvalue_input("input_ids", ids)
        io2.bind_cpu_input("attention_mask", mask)
        io2.bind_output("last_hidden_state")
        s.run_with_iobinding(io2)
        (z,) = io2.get_outputs()
        rest = (z.data_type(), z.element_type(), z.device_name(), z.is_tensor(), s._model_path)
        return first, y.numpy(), z.numpy(), z.shape(), *rest

    theirs, ours = both(example)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    assert ours[3:] == theirs[3:]
    assert np.abs(ours[0] - ours[1]).max() > 0.1, "the second call read what the caller wrote in between"


def test_ort_values_go_in_and_come_out() -> None:
    given = feeds(1, 3)

    def example(ort: Any) -> Any:
        s = ort.InferenceSession(BERT)
        values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in given.items()}
        (out,) = s.run_with_ort_values(["last_hidden_state"], values)
        return out.numpy(), out.tensor_size_in_bytes(), [d.shape() for d in values.values()]

    theirs, ours = both(example)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=2e-5)
    assert ours[1:] == theirs[1:]


def test_a_callback_hears_of_results_and_errors() -> None:
    def example(ort: Any) -> Any:
        s, heard, done = ort.InferenceSession(BERT), [], threading.Event()

        def callback(results: Any, user: Any, error: str) -> None:
            heard.append((len(results), user, error))
            done.set()

        s.run_async(None, feeds(1, 2), callback, "mine")
        assert done.wait(30)
        return heard

    theirs, ours = both(example)
    assert ours == theirs == [(1, "mine", "")]


def test_profiling_writes_a_trace(tmp_path: Path) -> None:
    def example(ort: Any) -> Any:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / ort.__name__)
        s = ort.InferenceSession(BERT, options)
        s.run(None, feeds())
        events = json.loads(Path(s.end_profiling()).read_text())
        return [e["name"] for e in events if e["name"] == "model_run"], len(events) > 10

    theirs, ours = both(example)
    assert ours == theirs == (["model_run"], True)


# -- options ---------------------------------------------------------------------------------------------------------


def test_thread_options_are_honoured() -> None:
    options = polydyn.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 3
    assert polydyn.InferenceSession(BERT, options).program.threads == 1
    assert polydyn.InferenceSession(BERT).program.threads == polydyn.load(_saved()).threads


def _saved() -> str:
    from polydyn.build.cache import cache_dir

    return str(next(cache_dir("programs").glob("*.polydyn")))


def test_a_second_session_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    polydyn.InferenceSession(BERT)
    monkeypatch.setenv("CC_CALLED", "1")

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile", fails)
    assert polydyn.InferenceSession(Path(BERT).read_bytes()).program.compilations == 0
    options = polydyn.SessionOptions()
    options.add_session_config_entry("polydyn.without", "stitch")
    with pytest.raises(AssertionError, match="compiled again"):
        polydyn.InferenceSession(BERT, options)


def test_other_external_data_is_another_program(tmp_path: Path) -> None:
    found = []
    for k in range(2):
        w = np.full((400, 3), k, np.float32)
        m = model([node("MatMul", "x w", "y")], {"x": ("float32", ["N", 400])}, ["y"], {"w": w})
        onnx.save(m, str(tmp_path / "m.onnx"), save_as_external_data=True, location="w.bin")
        s = polydyn.InferenceSession(tmp_path / "m.onnx")
        found.append(s.run(None, {"x": np.ones((1, 400), np.float32)})[0][0, 0])
    assert found == [0.0, 400.0]


def test_sizes_of_dims_by_name_and_by_denotation(tmp_path: Path) -> None:
    m = model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"])
    m.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    for way, name in (("by_name", "N"), ("by_denotation", "DATA_BATCH")):
        options = polydyn.SessionOptions()
        getattr(options, f"add_free_dimension_override_{way}")(name, 2)
        s = polydyn.InferenceSession(m.SerializeToString(), options)
        assert s.run(None, {"x": -np.ones((2, 3), np.float32)})[0].sum() == 0
        with pytest.raises(InputError):
            s.run(None, {"x": np.ones((3, 3), np.float32)})
    options.add_free_dimension_override_by_denotation("IMAGE", 2)
    with pytest.raises(InputError, match="no named dim of the model has the denotation 'IMAGE'"):
        polydyn.InferenceSession(m.SerializeToString(), options)


@pytest.mark.slow
def test_the_optimized_model_opens_as_a_session(tmp_path: Path) -> None:
    options = polydyn.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "bert.polydyn")
    options.graph_optimization_level = polydyn.session.GraphOptimizationLevel.ORT_DISABLE_ALL
    given = feeds()
    first = polydyn.InferenceSession(BERT, options)
    again = polydyn.InferenceSession(tmp_path / "bert.polydyn")
    assert (first.run(None, given)[0] == again.run(None, given)[0]).all()
    assert again.get_inputs() == first.get_inputs()
    assert again.program.kernel_count > polydyn.InferenceSession(BERT).program.kernel_count, "no fusion"
    assert again.get_modelmeta() == first.get_modelmeta() and first.get_modelmeta().graph_name
    older = {n: x for n, x in again.program.manifest.items() if n != "metadata"}
    again.program = SimpleNamespace(manifest=older)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="does not hold the model's metadata"):
        again.get_modelmeta()


def test_entries_without_a_meaning_warn_and_wrong_ones_are_refused() -> None:
    options = polydyn.SessionOptions()
    with pytest.warns(UserWarning, match=r"session\.set_denormal_as_zero.*changes nothing"):
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    with pytest.raises(InputError, match="no config entry 'nothing'"):
        options.get_session_config_entry("nothing")
    options.add_session_config_entry("polydyn.speed", "1")
    with pytest.raises(InputError, match=r"there is no config entry polydyn\.speed"):
        polydyn.InferenceSession(BERT, options)
    options = polydyn.SessionOptions()
    options.add_session_config_entry("polydyn.dim.B", "nine")
    with pytest.raises(ShapeError, match="'nine' does not describe sizes"):
        polydyn.InferenceSession(BERT, options)


def test_dims_in_config_entries_are_checked_on_calls() -> None:
    options = polydyn.SessionOptions()
    options.add_session_config_entry("polydyn.dim.B", "1:2")
    s = polydyn.InferenceSession(BERT, options)
    assert s.run(None, feeds(2, 3))[0].shape == (2, 3, 32)
    with pytest.raises(InputError, match="compiled for 1 <= B <= 2"):
        s.run(None, feeds(3, 3))


# -- refusals --------------------------------------------------------------------------------------------------------


def _option(name: str) -> Callable[[], Any]:
    return lambda: setattr(polydyn.SessionOptions(), name, 1)


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (lambda: polydyn.session.SparseTensor, UnsupportedError, "polydyn.session has no 'SparseTensor'"),
        (lambda: polydyn.SessionOptions().add_initializer, UnsupportedError, "SessionOptions has no 'add_initializer'"),
        (_option("intra_op_threads"), UnsupportedError, "SessionOptions has no 'intra_op_threads'"),
        (lambda: setattr(polydyn.RunOptions(), "terminate", True), UnsupportedError, "not stopped halfway"),
        (lambda: polydyn.InferenceSession(BERT).set_tuning_results, UnsupportedError, "no 'set_tuning_results'"),
        (lambda: polydyn.InferenceSession(BERT, disabled_optimizers={"x"}), UnsupportedError, "disabled_optimizers"),
        (lambda: polydyn.InferenceSession(BERT, onnxruntime.SessionOptions()), InputError, "polydyn.SessionOptions"),
        (lambda: polydyn.InferenceSession(BERT, providers=["TensorrtExecutionProvider"]), UnsupportedError, "Tensorrt"),
        (lambda: polydyn.InferenceSession(BERT, providers="CPUExecutionProvider"), InputError, "providers is the text"),
        (lambda: polydyn.InferenceSession("no.onnx"), ModelError, "cannot read no.onnx"),
        (lambda: polydyn.InferenceSession(b"nothing"), ModelError, "not an ONNX protobuf"),
        (lambda: polydyn.InferenceSession(7), InputError, "a int is not a model"),
        (lambda: polydyn.InferenceSession(onnx.ModelProto()), InputError, "give model.SerializeToString"),
        (lambda: polydyn.InferenceSession(BERT).run(["pooler"], feeds()), InputError, "no output 'pooler'"),
        (lambda: polydyn.InferenceSession(BERT).run(None, {}), InputError, "input 'input_ids' is missing"),
        (lambda: polydyn.InferenceSession(BERT).run(None, feeds() | {"z": 1}), InputError, "no input 'z'"),
        (lambda: polydyn.InferenceSession(BERT).end_profiling(), InputError, "profiling is not enabled"),
        (lambda: polydyn.OrtValue.ortvalue_from_numpy(np.ones(1), "dml"), UnsupportedError, "device dml:0"),
        (lambda: polydyn.OrtValue.ortvalue_from_shape_and_type([1], onnx.TensorProto.STRING), UnsupportedError, "STR"),
    ],
)
def test_refusals_name_what_is_not_there(act: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text.replace(".", r"\.")):
        act()


def test_an_output_that_is_listed_twice_is_given_twice() -> None:
    """The second has a name of its own, so that results by name have memory of their own."""
    m = model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"])
    m.graph.output.append(m.graph.output[0])
    ours, theirs = (k.InferenceSession(m.SerializeToString()) for k in (polydyn, onnxruntime))
    x = np.array([[-1, 0, 2]], np.float32)
    first, second = ours.run(None, {"x": x})
    assert [o.name for o in ours.get_outputs()] == ["y", "y_2"] and len(theirs.get_outputs()) == 2
    assert (first == second).all() and (first == theirs.run(["y"], {"x": x})[0]).all()
    assert not np.shares_memory(first, second)


def test_what_is_missing_is_missing_for_hasattr() -> None:
    assert not hasattr(polydyn.session, "SparseTensor") and not hasattr(polydyn.InferenceSession(BERT), "run_fast")


def test_an_absent_provider_is_passed_over_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'TensorrtExecutionProvider' is not available, the next one is 'CPU"):
        s = polydyn.InferenceSession(BERT, providers=[("TensorrtExecutionProvider", {"a": 1}), "CPUExecutionProvider"])
    assert s.get_providers() == ["CPUExecutionProvider"]
    s.set_providers(["CPUExecutionProvider"], [{"arena": 1}])
    assert s.get_provider_options() == {"CPUExecutionProvider": {"arena": "1"}}


def test_bindings_refuse_what_does_not_fit() -> None:
    s = polydyn.InferenceSession(BERT)
    io = s.io_binding()
    with pytest.raises(InputError, match="the model has no input 'ids'"):
        io.bind_cpu_input("ids", np.zeros((1, 2), np.int64))
    with pytest.raises(InputError, match=r"is tensor\(int32\), the model has tensor\(int64\)"):
        io.bind_cpu_input("input_ids", np.zeros((1, 2), np.int32))
    with pytest.raises(InputError, match="no output is bound"):
        s.run_with_iobinding(io)
    with pytest.raises(InputError, match="cannot be on cuda"):
        io.bind_output("last_hidden_state", "cuda")
    with pytest.raises(InputError, match="has an address only"):
        io.bind_output("last_hidden_state", buffer_ptr=64)
    io.bind_ortvalue_output("last_hidden_state", polydyn.OrtValue(np.empty((9, 9, 32), np.float32)))
    for name, a in feeds().items():
        io.bind_cpu_input(name, a)
    with pytest.raises(InputError, match=r"shape \(2, 5, 32\) in this call"):
        s.run_with_iobinding(io)
    with pytest.raises(InputError, match="another session"):
        polydyn.InferenceSession(BERT).run_with_iobinding(io)


def test_repeated_bound_calls_skip_the_checks() -> None:
    s = polydyn.InferenceSession(BERT)
    given = feeds()
    io = s.io_binding()
    for name, a in given.items():
        io.bind_cpu_input(name, a)
    out = np.empty((2, 5, 32), np.float32)
    io.bind_ortvalue_output("last_hidden_state", polydyn.OrtValue(out))
    for k in range(3):
        given["input_ids"][...] = k
        s.run_with_iobinding(io)
        assert (out == s.run(None, given)[0]).all()
    assert io._call is not None
    io.clear_binding_outputs()
    assert io.get_outputs() == []


def test_values_on_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    assert polydyn.session.get_available_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert polydyn.session.get_device() == "GPU"
    m = model([node("Relu", "x", "y")], {"x": ("float32", ["N", 4])}, ["y"])
    s = polydyn.InferenceSession(m.SerializeToString(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    x = np.array([[-1, 2, -3, 4]], np.float32)
    assert s.run(None, {"x": x})[0].tolist() == [[0, 2, 0, 4]]
    value = polydyn.OrtValue.ortvalue_from_numpy(x, "cuda", 0)
    assert value.device_name() == "cuda" and (value.numpy() == x).all()
    (y,) = s.run_with_ort_values(None, {"x": value})
    assert y.device_name() == "cuda" and y.numpy().tolist() == [[0, 2, 0, 4]]
    value.update_inplace(-x)
    io = s.io_binding()
    io.bind_input("x", "cuda", 0, np.float32, [1, 4], value.data_ptr())
    io.bind_output("y", "cuda")
    s.run_with_iobinding(io)
    assert io.copy_outputs_to_cpu()[0].tolist() == [[1, 0, 3, 0]]


def test_get_profiling_start_time_is_monotonic() -> None:
    options = polydyn.SessionOptions()
    options.enable_profiling = True
    before = time.monotonic_ns()
    assert before <= polydyn.InferenceSession(BERT, options).get_profiling_start_time_ns() <= time.monotonic_ns()


def test_values_of_options_that_mean_nothing_are_rejected() -> None:
    """A value that is none of those listed does not count as the default."""
    m = model([node("Abs", "x", "y")], {"x": ("float32", ["N"])}, ["y"]).SerializeToString()
    for key, value, remedy in (
        ("tf32", "yes", "'0' or '1'"), ("winograd", "four", "as in '4'"), ("treshold", "1", "polydyn.dim.NAME, "),
    ):  # fmt: skip
        options = polydyn.SessionOptions()
        options.add_session_config_entry(f"polydyn.{key}", value)
        with pytest.raises(InputError) as e:
            polydyn.InferenceSession(m, options, ["CPUExecutionProvider"])
        assert f"polydyn.{key}" in str(e.value) and remedy in str(e.value.remedy)
    options = polydyn.SessionOptions()
    for name in ("graph_optimization_level", "execution_mode", "execution_order"):
        with pytest.raises(InputError, match=f"{name} is 7\n  remedy: use a member of"):
            setattr(options, name, 7)
        setattr(options, name, 0)

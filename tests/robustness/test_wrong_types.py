"""Public methods with arguments of wrong types: a PolydynError, never an error of Python's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
import polydyn.session as ort
from polydyn.errors import PolydynError, WrongTypeError
from tests.support.paths import ROOT
from tests.support.tiny import model, node

X = np.ones((2, 4), np.float32)
ML = "ai.onnx.ml"
info = onnx.helper.make_tensor_value_info
CPU = "CPUExecutionProvider"
WRONG: list[Any] = [
    None, 3, 2.5, -1, True, float("nan"), 1j, "", "y", "a\0b", b"y", np.ones(3), np.float32(2), X, [X], [],
    ["a", ["b"]], [["y"]], [None], [3], {}, {3: 4}, {"x": None}, {"x": "a"}, {"x": {}}, {"x": [[1], [2, 3]]}, {"y": 3},
    {"x"}, object(), slice(3), len, dict, (CPU, 3),
    [(CPU, 3)], [(CPU,)], [("CUDAExecutionProvider", {"device_id": "x"})],
]  # fmt: skip
METHODS = {
    "program": ["arguments", "bind", "explain", "profile", "run", "save", "save_shapes", "trace", "__call__"],
    "session": ["run", "run_with_ort_values", "run_with_iobinding", "set_providers"],
    "binding": ["bind_cpu_input", "bind_input", "bind_ortvalue_input", "bind_ortvalue_output", "bind_output"],
    "value": ["from_dlpack", "ortvalue_from_numpy", "ortvalue_from_numpy_with_onnx_type",
              "ortvalue_from_shape_and_type", "update_inplace"],
    "device": ["make"],
    "options": ["add_free_dimension_override_by_denotation", "add_free_dimension_override_by_name", "add_provider",
                "add_session_config_entry", "get_session_config_entry"],
    "run options": ["add_run_config_entry", "get_run_config_entry"],
    "polydyn": ["InferenceSession", "compile", "load"],
}  # fmt: skip
EMPTY = inspect.Parameter.empty


def product(parts: bool = False) -> Any:
    """Build a product; with ``parts`` the count of its nonzero elements too, which another part computes."""
    nodes = [node("MatMul", "x w", "y"), *([node("NonZero", "y", "z")] if parts else [])]
    return model(nodes, {"x": ("float32", ["N", 4])}, ["y", *(["z"] if parts else [])], {"w": np.ones((4, 3), "f4")})


@pytest.fixture(scope="module")
def objects() -> dict[str, list[Any]]:
    session = polydyn.InferenceSession(product().SerializeToString(), providers=[CPU])
    programs = [session.program, polydyn.compile(product(parts=True), threads=1)]
    return {
        "program": programs, "session": [session], "binding": [session.io_binding()], "device": [ort.OrtDevice],
        "value": [polydyn.OrtValue.ortvalue_from_numpy(X.copy())], "options": [polydyn.SessionOptions()],
        "run options": [polydyn.RunOptions()], "polydyn": [polydyn],
    }  # fmt: skip


def right(folder: Path, binding: Any) -> Mapping[str, Any]:
    """Return an argument that fits each parameter."""
    value = polydyn.OrtValue.ortvalue_from_numpy(X)
    return {
        "arr_on_cpu": X, "buffer_ptr": X.ctypes.data, "data": X, "denotation": "D", "device_type": "cpu",
        "dim_name": "N", "dim_value": 3, "element_type": np.float32, "feeds": {"x": X},
        "input_dict_ort_values": {"x": value},
        "input_feed": {"x": X}, "iobinding": binding, "key": "polydyn.tf32", "kind": "inputs", "model": product(),
        "name": "x", "np_arr": X, "numpy_obj": X, "onnx_element_type": 1, "ort_device_name": "cpu", "ortvalue": value,
        "output_names": None, "path": folder / "p", "path_or_bytes": product().SerializeToString(),
        "provider_name": CPU, "repeats": 1, "shape": (2, 4), "threads": 1, "value": "1", "device_id": 0,
    }  # fmt: skip


def calls(method: Callable[..., Any], fitting: Mapping[str, Any]) -> list[tuple[str, Callable[[], Any]]]:
    """Return a call for every parameter and wrong value; the other arguments fit."""
    every = [p for p in inspect.signature(method).parameters.values() if p.kind.name[:4] != "VAR_"]
    out: list[tuple[str, Callable[[], Any]]] = []
    for parameter in every:
        for wrong in WRONG:
            if parameter.name == "report" and callable(wrong):
                continue  # a function of the caller, whose errors are the caller's
            values = {p.name: wrong if p is parameter else fitting.get(p.name, p.default) for p in every}
            named = {p.name: values[p.name] for p in every if p.kind == p.KEYWORD_ONLY and values[p.name] is not EMPTY}
            placed = [values[p.name] for p in every if p.kind != p.KEYWORD_ONLY]
            out.append((f"{parameter.name}={wrong!r}", lambda a=placed, k=named: method(*a, **k)))
    return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "method"), [(k, m) for k, methods in METHODS.items() for m in methods])
def test_arguments_of_wrong_types_are_refused_by_name(
    kind: str, method: str, objects: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for target in objects[kind]:
        objects["program"][0].save(tmp_path / "p")
        for label, call in calls(getattr(target, method), right(tmp_path, objects["binding"][0])):
            try:
                call()
            except PolydynError:
                continue
            except Exception as e:
                pytest.fail(f"{method}({label}) raises {type(e).__name__}: {e}")
    for program in objects["program"]:
        assert (program.run({"x": X})["y"] == 4).all(), "the program works as before"


def test_initializers_and_texts_of_wrong_types_are_refused_by_name() -> None:
    """These values are read before the plain program checks its inputs."""
    nodes = [node("MatMul", "x w", "y")]
    free = model(nodes, {"x": ("float32", ["N", 4]), "w": ("float32", [4, 3])}, ["y"], {"w": np.ones((4, 3), "f4")})
    encode = onnx.helper.make_node("LabelEncoder", ["t"], ["k"], domain=ML, keys_strings=["a"], values_int64s=[3])
    texts = onnx.helper.make_graph([encode], "m", [info("t", 8, ["N"])], [info("k", 7, ["N"])])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(ML, 3)]
    encoder = onnx.helper.make_model(texts, opset_imports=opsets)
    for proto, name, fitting in ((free, "w", {"x": X}), (encoder, "t", {})):
        program = polydyn.compile(proto, threads=1)
        for wrong in WRONG:
            for method in (program.run, program.bind, program.profile):
                try:
                    method({**fitting, name: wrong})
                except PolydynError:
                    continue
                except Exception as e:
                    pytest.fail(f"{name}={wrong!r} raises {type(e).__name__}: {e}")
        with pytest.raises(WrongTypeError, match="out is"):
            program.run(fitting, np.ones(3))


def test_every_method_with_arguments_is_tried(objects: dict[str, list[Any]]) -> None:
    for kind in ("program", "session", "binding", "options", "run options"):
        for name, member in inspect.getmembers(type(objects[kind][0]), inspect.isfunction):
            if name[0] != "_" and len(inspect.signature(member).parameters) > 1:
                assert name in METHODS[kind] or name in ("run_async", "arguments"), (kind, name)


@pytest.mark.parametrize("name", sorted(polydyn.SessionOptions._VALUES))
def test_options_of_wrong_types_are_refused_where_they_are_set(name: str) -> None:
    options = polydyn.SessionOptions()
    for wrong in (None, [3], {}, np.ones(3), object(), b"y", len):
        with pytest.raises(WrongTypeError, match=name):
            setattr(options, name, wrong)
    assert getattr(options, name) == polydyn.SessionOptions._VALUES[name]


@pytest.mark.parametrize("wrong", [3, "y", {"a": 1}, np.ones(3)])
def test_output_names_name_the_outputs(wrong: Any, objects: dict[str, list[Any]]) -> None:
    with pytest.raises(polydyn.PolydynError, match=r"output.*(?s:.)*remedy: .*y"):
        objects["session"][0].run(wrong, {"x": X})


def test_options_of_a_call_are_polydyns(objects: dict[str, list[Any]]) -> None:
    with pytest.raises(WrongTypeError, match="run_options"):
        objects["session"][0].run(None, {"x": X}, object())
    objects["session"][0].run(None, {"x": X}, polydyn.RunOptions())


def test_programs_and_what_holds_them_are_not_pickled(objects: dict[str, list[Any]]) -> None:
    """A raw error would name a ctypes function, not the remedy."""
    (session,), (binding,) = objects["session"], objects["binding"]
    for program in objects["program"]:
        for value in (program, {"p": [program]}, session, binding):
            with pytest.raises(WrongTypeError, match=r"polydyn\.load"):
                ForkingPickler.dumps(value)
        with pytest.raises(WrongTypeError, match="bind again"):
            ForkingPickler.dumps(program.bind({"x": X}))


def test_every_error_is_also_one_of_pythons() -> None:
    """Code that knows only Python's own classes catches errors of polydyn by them."""
    pythons = (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError, AttributeError)
    for path in (ROOT / "polydyn").rglob("*.py"):
        if re.search(r"^class \w+Error\(", path.read_text(), re.MULTILINE) and "testing" not in path.parts:
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    kinds, waiting = [], [PolydynError]
    while waiting:
        more = [c for c in waiting.pop().__subclasses__() if not c.__module__.startswith("polydyn.testing")]
        waiting, kinds = waiting + more, kinds + more
    assert len(kinds) > 20
    assert [c.__name__ for c in kinds if not issubclass(c, pythons)] == []
    assert all(str(c("a 'quoted' text")) == "a 'quoted' text" for c in kinds)


def test_unknown_names_are_key_errors_and_files_os_errors(tmp_path: Path) -> None:
    program = polydyn.compile(product(), threads=1)
    for call in (
        lambda: program.run({"z": X}), lambda: program.run({"x": X}, out={"z": X}), lambda: program.explain(Z=3),
        lambda: program.arguments("z"), lambda: polydyn.Options(without={"z"}),
        lambda: polydyn.InferenceSession(product().SerializeToString(), providers=[CPU]).run(["z"], {"x": X}),
    ):  # fmt: skip
        with pytest.raises(KeyError) as caught:
            call()
        assert isinstance(caught.value, PolydynError) and "'" not in str(caught.value)[:1]
    with pytest.raises(OSError, match="cannot write") as unwritable:
        program.save(tmp_path / "nowhere" / "p")
    assert isinstance(unwritable.value, PolydynError) and isinstance(unwritable.value, ValueError)

"""Rejections: every error names node, tensor or dim and a remedy, and leaves nothing half-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.errors import BuildError, InputError, ModelError, ShapeError, UnsupportedError
from polydyn.runtime.program import Program
from tests.support.stored import path_of
from tests.support.tiny import model as tiny_model
from tests.support.tiny import node


@pytest.fixture(scope="module")
def bert() -> Program:
    return polydyn.compile(path_of("bert_tiny"), threads=1, dims={"B": (1, 4)})


def ids(b: int, length: int) -> dict[str, np.ndarray]:
    return {"input_ids": np.ones((b, length), np.int64), "attention_mask": np.ones((b, length), np.int64)}


# -- not a model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"a text file\n" * 20, np.random.default_rng(0).bytes(4096), b"version https://git-lfs.github.com/spec/v1\n"],
    ids=["empty", "text", "random", "lfs"],
)
def test_what_is_not_a_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    for given in (path, str(path), content):
        with pytest.raises(ModelError, match="remedy"):
            polydyn.compile(given)


@pytest.mark.parametrize(("path", "reason"), [(".", "directory"), ("missing.onnx", "No such file")])
def test_a_folder_and_a_missing_path_are_refused(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"(?s){reason}.*remedy"):
        polydyn.compile(tmp_path / path)


def test_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match="a dict is not a model"):
        polydyn.compile({})  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_model_is_refused(share: float) -> None:
    data = Path(path_of("bert_tiny")).read_bytes()
    with pytest.raises(ModelError, match="remedy"):
        polydyn.compile(data[: int(len(data) * share)])


def test_unknown_operators_are_listed_by_name() -> None:
    unknown = helper.make_node("Frobnicate", ["a"], ["b"], name="frob")
    nodes = [node("Relu", "x", "a"), unknown, node("Gnarl", "b", "y")]
    with pytest.raises(UnsupportedError, match=r"Frobnicate \(node frob\), Gnarl \(node Gnarl_y\)"):
        polydyn.compile(tiny_model(nodes, {"x": ("float32", ["N"])}, ["y"]))


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"ids": ids(1, 3)["input_ids"], "attention_mask": ids(1, 3)["attention_mask"]}, "no input 'ids'"),
        ({"input_ids": ids(1, 3)["input_ids"]}, "'attention_mask' is missing"),
        (ids(1, 3) | {"more": np.zeros(1)}, "no input 'more'"),
        (ids(1, 3) | {"input_ids": np.ones((1, 3), np.int32)}, "int32, the program takes int64"),
        (ids(1, 3) | {"input_ids": np.ones((1, 3), np.float32)}, "float32, the program takes int64"),
        (ids(1, 3) | {"input_ids": np.ones(3, np.int64)}, "has 1 axes, the program takes 2"),
        (ids(1, 3) | {"input_ids": None}, "input 'input_ids' is object"),
        (ids(1, 3) | {"attention_mask": np.ones((2, 3), np.int64)}, "axis 0 is 2, but B "),
        (ids(1, 3) | {"attention_mask": np.ones((1, 4), np.int64)}, "axis 1 is 4, but L "),
        (ids(5, 3), "compiled for 1 <= B <= 4"),
        (ids(0, 3), "compiled for 1 <= B <= 4"),
        (ids(1, 161), r"(?s)rule: L is at most 160, here 161 and 160"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(bert: Program, feeds: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bert.run(feeds)
    assert bert.run(ids(2, 5))["last_hidden_state"].shape == (2, 5, 32), "the program still works"


def test_unknown_dims_and_impossible_ranges_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"(?s)dims names Q.*the dynamic dims of this model are: B, L"):
        polydyn.compile(path_of("bert_tiny"), dims={"Q": (1, 2)})
    with pytest.raises(ShapeError, match="holds no size"):
        polydyn.compile(path_of("bert_tiny"), dims={"B": (3, 2)})


@pytest.mark.parametrize("bad", [120, -121, 2**40])
def test_an_index_outside_its_table_is_refused(bert: Program, bad: int) -> None:
    feeds = ids(2, 3)
    feeds["input_ids"][1, 1] = bad
    with pytest.raises(InputError, match=rf"(?s)Gather\): an index in 'input_ids' .* size 120, .*element 4 is {bad}"):
        bert.run(feeds)
    feeds["input_ids"][1, 1] = -120  # the first row, counted from the end
    first = bert.run(ids(2, 3) | {"input_ids": np.where(feeds["input_ids"] < 0, 0, feeds["input_ids"])})
    assert (bert.run(feeds)["last_hidden_state"] == first["last_hidden_state"]).all()


def gather(dtype: int, before: list[onnx.NodeProto], indices: str) -> onnx.ModelProto:
    """Build ``y = Gather(table, indices)``; ``before`` computes the indices from ``i``."""
    inputs = [
        helper.make_tensor_value_info("table", TensorProto.FLOAT, ["V", 3]),
        helper.make_tensor_value_info("i", dtype, ["B", "L"]),
    ]
    constants = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("flat", [-1]), ("one", 1))]
    nodes = [*before, helper.make_node("Gather", ["table", indices], ["y"], name="lookup")]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_empty_tensor_value_info("y")], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


@pytest.mark.parametrize(
    ("dtype", "before", "indices", "limit"),
    [
        (TensorProto.INT64, [], "i", 7),
        (TensorProto.INT32, [], "i", 7),
        (TensorProto.INT32, [node("Cast", "i", "j", to=TensorProto.INT64)], "j", 7),
        (TensorProto.INT64, [node("Reshape", "i flat", "j")], "j", 7),
        (TensorProto.INT64, [node("Transpose", "i", "j", perm=[1, 0])], "j", 7),
        (TensorProto.INT64, [node("Add", "i one", "j")], "j", 6),
    ],
    ids=["int64", "int32", "cast", "reshape", "transpose", "computed"],
)
def test_indices_are_checked_through_views_and_when_computed(
    dtype: int, before: list[onnx.NodeProto], indices: str, limit: int
) -> None:
    program = polydyn.compile(gather(dtype, before, indices), threads=1)
    table = np.arange(21, dtype=np.float32).reshape(7, 3)
    i = np.zeros((2, 5), helper.tensor_dtype_to_np_dtype(dtype))
    i[1, 2] = limit - 1
    assert (program.run({"table": table, "i": i})["y"] == 18).any()
    i[1, 2] = limit
    with pytest.raises(InputError, match="lookup"):
        program.run({"table": table, "i": i})
    empty = program.run({"table": table[:0], "i": i[:, :0]})["y"]
    assert empty.size == 0
    with pytest.raises(InputError, match="size V, here 0"):
        program.run({"table": table[:0], "i": i[:, :1]})


def test_a_part_of_an_input_used_as_indices_is_not_refused_for_the_rest() -> None:
    starts = numpy_helper.from_array(np.array([0], np.int64), "s")
    ends = numpy_helper.from_array(np.array([1], np.int64), "e")
    m = gather(TensorProto.INT64, [node("Slice", "i s e s", "j")], "j")
    m.graph.initializer.extend([starts, ends])
    program = polydyn.compile(m, threads=1)
    i = np.array([[1, 2], [99, 99]])
    got = program.run({"table": np.ones((3, 3), np.float32), "i": i})["y"]
    assert got.shape == (1, 2, 3) and (got == 1).all()
    with pytest.raises(InputError, match=r"lookup.*'j' lies outside its axis of size V, here 3: element 1 is 3"):
        program.run({"table": np.ones((3, 3), np.float32), "i": np.array([[1, 3], [0, 0]])})
    with pytest.raises(InputError, match=r"lookup.*j choose among the elements(.|\n)*is at most V, here 1 and 0"):
        program.run({"table": np.ones((0, 3), np.float32), "i": i})


def test_constant_indices_bound_a_symbolic_axis() -> None:
    m = tiny_model([node("Gather", "x i", "y")], {"x": ("float32", ["N", 2])}, ["y"], {"i": np.array([0, 3, -5])})
    program = polydyn.compile(m, threads=1)
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert (program.run({"x": x})["y"] == x[[0, 3, -5]]).all()
    with pytest.raises(InputError, match="Gather_y"):
        program.run({"x": x[:4]})


@pytest.mark.parametrize("kind", ["Conv", "MaxPool", "AveragePool"])
def test_an_image_smaller_than_its_window_is_refused(kind: str) -> None:
    if kind == "Conv":
        n, constants = node("Conv", "x w", "y", strides=[2, 2]), {"w": np.ones((1, 1, 3, 3), np.float32)}
    else:
        n, constants = node(kind, "x", "y", kernel_shape=[3, 3], strides=[2, 2]), {}
    program = polydyn.compile(tiny_model([n], {"x": ("float32", ["N", 1, "H", "W"])}, ["y"], constants), threads=1)
    assert program.run({"x": np.ones((1, 1, 3, 4), np.float32)})["y"].shape == (1, 1, 1, 1)
    assert program.run({"x": np.ones((0, 1, 3, 4), np.float32)})["y"].shape == (0, 1, 1, 1)
    with pytest.raises(InputError, match=rf"(?s){kind}_y.*axis 3 of x is W: a window of 3.*here 3 and 2"):
        program.run({"x": np.ones((1, 1, 3, 2), np.float32)})


# -- compilers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache."""
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def relu() -> onnx.ModelProto:
    return tiny_model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"])


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def no_compiler(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.delenv("CC", raising=False)
    patch.setenv("PATH", str(tmp_path))
    patch.setattr("polydyn.build.compilers.wheel_command", tuple)
    return r"(?s)no C compiler found: tried gcc, clang, cc, zig.*install gcc"


def nonsense(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CC", "no-such-compiler -O2")
    return "no C compiler found: tried no-such-compiler"


def unbalanced(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CC", "gcc 'x")
    return "CC is not a command"


def not_runnable(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cc").write_bytes(b"\x7fELF nothing")
    (tmp_path / "cc").chmod(0o755)
    patch.setenv("CC", str(tmp_path / "cc"))
    return "no C compiler found"


def failing(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CC", script(tmp_path / "cc", 'case "$*" in *-c*) echo "internal error" >&2; exit 1;; esac; gcc "$@"'))
    return r"(?s)failed to compile .*\.c:\ninternal error.*remedy"


def failing_to_link(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CC", script(tmp_path / "cc", 'case "$*" in *-shared*) echo "no ld" >&2; exit 1;; esac; gcc "$@"'))
    return r"(?s)could not link:\nno ld"


@pytest.mark.parametrize("broken", [no_compiler, nonsense, unbalanced, not_runnable, failing, failing_to_link])
def test_a_missing_or_failing_compiler_is_named_and_leaves_nothing(
    broken: Callable[[Path, pytest.MonkeyPatch], str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = broken(tmp_path, monkeypatch)
    with pytest.raises(BuildError, match=message):
        polydyn.compile(relu(), threads=1)
    left = [p for p in cache.rglob("*") if p.is_file() and (p.name.startswith(".") or p.suffix == ".so")]
    assert not left


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="set POLYDYN_CACHE"):
        polydyn.compile(relu(), threads=1)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)target tpu.*use cpu"):
        polydyn.compile(relu(), target="tpu")

"""Programs of several parts: data-dependent sizes, compared with ONNX Runtime at ugly sizes (docs/adr/0027-parts.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto as T
from onnx import helper

import polydyn
from polydyn.cli import main
from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.parts_program import PartsProgram

Feeds = Mapping[str, Any]
RNG = np.random.default_rng(7)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"{op}_{outputs.split()[0]}", **attributes)


def model(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, tuple[int, list[Any]]], outputs: str,
    constants: Feeds | None = None,
) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes, "parts",
        [helper.make_tensor_value_info(n, *t) for n, t in inputs.items()],
        [helper.make_empty_tensor_value_info(o) for o in outputs.split()],
        [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def check(m: onnx.ModelProto, *calls: Feeds, threads: int = 2) -> PartsProgram:
    """Check that every call equals ONNX Runtime's: dtypes, shapes, numbers."""
    program = polydyn.compile(m, threads=threads)
    assert isinstance(program, PartsProgram)
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    for feeds in calls:
        same(program.run(feeds), session.run(None, dict(feeds)))
    return program


def same(results: Mapping[str, Any], expected: list[Any]) -> None:
    for (name, got), want in zip(results.items(), expected, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        np.testing.assert_allclose(got, want, 1e-5, 1e-5, err_msg=name)


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def mask(*shape: int) -> Any:
    return RNG.random(shape) < 0.4


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


MASKED_ROWS = model(
    [
        node("Greater", "x zero", "m"),
        node("NonZero", "m", "i"),
        node("Transpose", "i", "t"),
        node("GatherND", "x t", "v"),
        node("Exp", "v", "y"),
        node("ReduceSum", "y", "s", keepdims=0),
    ],
    {"x": (T.FLOAT, ["H", "W"])}, "i y s", {"zero": np.float32(0)},
)  # fmt: skip


def test_non_zero_of_a_mask_and_what_follows() -> None:
    shapes = [(3, 4), (0, 4), (1, 1), (31, 33), (100, 7), (1, 0)]
    program = check(MASKED_ROWS, *({"x": numbers(*s)} for s in shapes), {"x": -np.ones((4, 5), np.float32)})
    assert len(program.parts) == 2 and program.steps == ["non_zero of NonZero_i"]
    assert program.symbols["NonZero_i.n"] == "data: non_zero of NonZero_i"
    assert program.guards == [], "n <= H*W holds by construction"


@pytest.mark.parametrize(("rank", "shape"), [(1, (5,)), (3, (2, 3, 4))])
def test_non_zero_of_any_rank(rank: int, shape: tuple[int, ...]) -> None:
    m = model([node("NonZero", "x", "i")], {"x": (T.BOOL, [f"D{k}" for k in range(rank)])}, "i")
    check(m, {"x": np.ones(shape, bool)}, {"x": np.zeros(shape, bool)})


def test_non_zero_of_a_scalar_has_no_rows() -> None:
    program = polydyn.compile(model([node("NonZero", "x", "i")], {"x": (T.BOOL, [])}, "i"))
    assert program.run({"x": np.array(True)})["i"].shape == (0, 1), "ONNX says so; ONNX Runtime gives (1, 1)"


def test_compress_along_an_axis_and_over_all() -> None:
    nodes = [node("Compress", "x c", "y", axis=1), node("Compress", "x c", "z"), node("Relu", "y", "w")]
    m = model(nodes, {"x": (T.FLOAT, ["H", "W"]), "c": (T.BOOL, ["K"])}, "y z w")
    sizes = [(3, 4, 4), (1, 4, 0), (3, 3, 2), (31, 33, 30), (1, 1, 1)]
    program = check(m, *({"x": numbers(h, w), "c": mask(k)} for h, w, k in sizes))
    with pytest.raises(InputError, match="no longer than"):
        program.run({"x": numbers(2, 3), "c": mask(4)})


def test_range_of_data() -> None:
    inputs = {x: (T.INT64, []) for x in "abc"} | {"f": (T.FLOAT, [])}
    nodes = [
        node("Range", "a b c", "r"), node("Cast", "r", "q", to=T.FLOAT), node("Mul", "q f", "y"),
        node("Range", "f ten half", "z"),
    ]  # fmt: skip
    m = model(nodes, inputs, "r y z", {"ten": np.float32(10), "half": np.float32(0.5)})
    calls = [(0, 5, 1, 2.5), (3, 9, 2, 11), (9, 3, -2, 9.9), (0, -3, 1, 0), (5, 5, 7, 10)]
    feeds = [dict(zip("abc", map(np.array, c[:3]), strict=True)) | {"f": np.array(c[3], np.float32)} for c in calls]
    program = check(m, *feeds)
    with pytest.raises(InputError, match="step of a range is not 0"):
        program.run({"a": np.array(0), "b": np.array(3), "c": np.array(0), "f": np.array(0, np.float32)})


def test_reshape_to_data() -> None:
    nodes = [node("Reshape", "x s", "y"), node("Softmax", "y", "z"), node("Reshape", "z t", "w")]
    m = model(nodes, {"x": (T.FLOAT, ["H", "W"]), "s": (T.INT64, [3])}, "y w", {"t": i64(-1)})
    calls = [(3, 4, (2, -1, 2)), (6, 4, (0, 2, -1)), (1, 1, (1, 1, 1)), (8, 9, (9, 8, 1))]
    program = check(m, *({"x": numbers(h, w), "s": i64(*s)} for h, w, s in calls))
    for s in ((2, 2, 2), (-1, -1, 1), (-2, 1, 6)):
        with pytest.raises(InputError, match="cannot be reshaped"):
            program.run({"x": numbers(3, 4), "s": i64(*s)})


MASKS = {
    "joined": [],
    "older exporter": [
        node("Shape", "s", "k"), node("ConstantOfShape", "k", "ones", value=helper.make_tensor("v", T.INT64, [1], [1])),
        node("Neg", "ones", "minus"), node("Equal", "s minus", "free"), node("Where", "free ones s", "t"),
    ],
    "assigned": [node("ScatterND", "s place one", "t")],
}  # fmt: skip


@pytest.mark.parametrize("form", MASKS)
def test_sizes_joined_with_data_stay_known(form: str) -> None:
    """A mask of [batch, 1, n, n] is added to scores: only its last two sizes are data."""
    m = model(
        [
            node("Shape", "x", "b", start=0, end=1), node("Concat", "b one n n", "s", axis=0), *MASKS[form],
            node("Expand", "fill t" if MASKS[form] else "fill s", "mask"), node("Add", "x mask", "y"),
        ], {"x": (T.FLOAT, ["B", 4, "N", "N"]), "n": (T.INT64, [1])}, "y",
        {"one": np.array([1]), "fill": np.full((1, 1, 1, 1), 0.5, np.float32), "place": np.array([[1]])},
    )  # fmt: skip
    x = RNG.standard_normal((2, 4, 3, 3)).astype(np.float32)
    check(m, {"x": x, "n": np.array([3])}, {"x": x[:1, :, :1, :1], "n": np.array([1])})


@pytest.mark.parametrize("last", [-1, 2])
def test_targets_of_a_reshape_joined_with_data(last: int) -> None:
    """The first target is the batch, so that the product with y needs no broadcast."""
    m = model(
        [
            node("Shape", "x", "b", start=0, end=1), node("Concat", "b n last", "s", axis=0),
            node("Reshape", "x s", "z"), node("MatMul", "z y", "w"),
        ], {"x": (T.FLOAT, ["B", "N"]), "n": (T.INT64, [1]), "y": (T.FLOAT, ["B", 2, 3])}, "w",
        {"last": np.array([last])},
    )  # fmt: skip
    x, y = (RNG.standard_normal(s).astype(np.float32) for s in ((3, 8), (3, 2, 3)))
    check(m, {"x": x, "y": y, "n": np.array([4])}, {"x": x[:1, :2], "y": y[:1], "n": np.array([1])})


def test_slices_of_data() -> None:
    inputs = {"x": (T.FLOAT, ["H", "W"]), "s": (T.INT64, [2]), "e": (T.INT64, [2])}
    m = model([node("Slice", "x s e a k", "y"), node("Neg", "y", "z")], inputs, "z", {"a": i64(0, -1), "k": i64(1, -2)})
    calls = [
        (3, 4, (1, -1), (3, 0)), (6, 4, (-2, 100), (100, -100)), (1, 1, (0, 0), (1, -3)), (8, 9, (5, 8), (2, 1)),
        (0, 5, (0, 4), (3, -9)), (7, 0, (2, 3), (9, -1)),
    ]  # fmt: skip
    program = check(m, *({"x": numbers(h, w), "s": i64(*s), "e": i64(*e)} for h, w, s, e in calls))
    feeds = {"x": numbers(3, 7), "s": i64(0, 5)}  # to the first element, as in ONNX Runtime
    same(program.run(feeds | {"e": i64(9, 2**63 - 1)}), list(program.run(feeds | {"e": i64(9, -(2**63))}).values()))


def test_top_k_tile_pad_expand_and_one_hot_of_data() -> None:
    inputs = {"x": (T.FLOAT, ["H", "W"])} | {n: (T.INT64, [k]) for n, k in {"k": 1, "r": 2, "p": 4, "d": 1}.items()}
    nodes = [
        node("TopK", "x k", "v i"), node("Tile", "x r", "t"), node("Pad", "x p", "q"), node("OneHot", "j d w", "o"),
        node("ConstantOfShape", "r", "c"), node("Expand", "one r", "e"),
    ]  # fmt: skip
    constants = {"j": i64(0, 2, -1), "w": np.array([0, 1], np.float32), "one": np.ones((1, 1), np.float32)}
    m = model(nodes, inputs, "v i t q o c e", constants)
    calls = [(3, 4, 2, (2, 1), (0, 1, 2, 3), 3), (6, 4, 4, (1, 3), (0,) * 4, 7), (1, 1, 0, (0, 1), (3,) * 4, 4)]
    feeds = [{"x": numbers(h, w), "k": i64(k), "r": i64(*r), "p": i64(*p), "d": i64(d)} for h, w, k, r, p, d in calls]
    program = check(m, *feeds)
    with pytest.raises(InputError, match="a size is a whole number, not negative"):
        program.run(feeds[0] | {"k": i64(-1)})
    with pytest.raises(InputError, match="elements that are asked for"):
        program.run(feeds[0] | {"k": i64(5)})
    same(program.run(feeds[0]), list(program.run(feeds[0]).values()))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_and_split_to_data(mode: str) -> None:
    inputs = {"x": (T.FLOAT, [1, 2, "H", "W"]), "s": (T.INT64, [4]), "p": (T.INT64, [2])}
    resized = helper.make_node("Resize", ["x", "", "", "s"], ["y"], name="Resize_y", mode=mode)
    nodes = [resized, node("Split", "x p", "a b", axis=2), node("Exp", "b", "c")]
    m = model(nodes, inputs, "y a c")
    calls = [(4, 6, (7, 3), 1), (3, 3, (3, 3), 3), (1, 1, (5, 4), 0), (9, 2, (4, 1), 5)]
    feeds = [{"x": numbers(1, 2, h, w), "s": i64(1, 2, *s), "p": i64(k, h - k)} for h, w, s, k in calls]
    program = check(m, *feeds)
    with pytest.raises(InputError, match="split into 2 parts"):
        program.run(feeds[0] | {"p": i64(1, 1)})


def test_axes_and_steps_of_data() -> None:
    inputs = {"x": (T.FLOAT, ["H", "W"])} | {n: (T.INT64, [1]) for n in "asek"}
    nodes = [node("Slice", "x s e a k", "y"), node("Unsqueeze", "x a", "u"), node("Squeeze", "u a", "z")]
    m = model([*nodes, node("Neg", "y", "n"), node("Neg", "z", "w")], inputs, "n u w")
    calls = [(3, 4, 0, 0, 2, 1), (3, 4, -1, -1, -9, -2), (5, 1, 1, 0, 1, 3), (0, 3, 0, 5, 0, -1)]
    feeds = [{"x": numbers(h, w)} | dict(zip("asek", map(i64, c), strict=True)) for h, w, *c in calls]
    program = check(m, *feeds)
    with pytest.raises(InputError, match="no step of 0"):
        program.run(feeds[0] | {"k": i64(0)})
    with pytest.raises(InputError, match="each is an axis"):
        program.run(feeds[0] | {"a": i64(7)})


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("sort", [0, 1])
def test_unique(axis: int | None, sort: int) -> None:
    more = {} if axis is None else {"axis": axis}
    nodes = [node("Unique", "x", "y i j c", sorted=sort, **more), node("Add", "y y", "z"), node("Mul", "c i", "w")]
    m = model(nodes, {"x": (T.INT64, ["H", "W"])}, "y i j c z w")
    check(m, *({"x": RNG.integers(0, 3, s)} for s in [(7, 2), (1, 1), (40, 3)]))


@pytest.mark.parametrize("dtype", [T.FLOAT16, T.FLOAT, T.DOUBLE, T.INT8, T.UINT64, T.BOOL])
def test_unique_of_every_kind_of_number(dtype: int) -> None:
    """NaNs are one number, and the last; so are -0 and 0."""
    program = polydyn.compile(model([node("Unique", "x", "y i j c")], {"x": (dtype, ["N"])}, "y i j c"))
    number = helper.tensor_dtype_to_np_dtype(dtype)
    odd = [np.nan, -0.0, 3, 0.0, np.nan, np.inf, -3, 1e-7, -np.inf, 3, -1e-7] if number.kind == "f" else [3, 0, -3, 3]
    many = numbers(300) if number.kind == "f" else RNG.integers(0, 9, 300)
    for x in (np.array(odd).astype(number), many.astype(number), np.empty(0, number)):
        same(program.run({"x": x}), [*np.unique(x, True, True, True)])


def boxes(*shape: int) -> Any:
    corner, size = RNG.random((*shape, 2)), RNG.random((*shape, 2)) / 2
    return np.concatenate([corner, corner + size], -1).astype(np.float32)


@pytest.mark.parametrize("center", [0, 1])
def test_non_maximum_suppression(center: int) -> None:
    nodes = [
        node("NonMaxSuppression", "b s m o l", "i", center_point_box=center),
        node("Gather", "i two", "k", axis=1), node("Gather", "b k", "c", axis=1), node("Exp", "c", "y"),
    ]  # fmt: skip
    inputs = {"b": (T.FLOAT, ["B", "N", 4]), "s": (T.FLOAT, ["B", "C", "N"]), "m": (T.INT64, [1])}
    constants = {"o": np.array([0.3], np.float32), "l": np.array([0.2], np.float32), "two": np.array(2)}
    m = model(nodes, inputs, "i y", constants)
    sizes = [(1, 50, 3, 5), (2, 20, 1, 100), (1, 1, 1, 1), (1, 0, 2, 4), (1, 10, 2, 0), (3, 100, 2, 1000)]
    feeds = [{"b": boxes(b, n), "s": numbers(b, c, n), "m": i64(k)} for b, n, c, k in sizes]
    feeds.append(feeds[0] | {"s": np.round(feeds[0]["s"])})  # ties
    check(m, *feeds)


LATE_GUARD = model(
    [
        node("NonZero", "m", "i"),
        node("Squeeze", "i z", "j"),
        node("Cast", "j", "f", to=T.FLOAT),
        node("Add", "f x", "y"),
    ],
    {"m": (T.BOOL, ["N"]), "x": (T.FLOAT, ["B"])}, "y", {"z": i64(0)},
)  # fmt: skip


def test_a_late_guard_says_after_what_it_failed_and_leaves_the_program_usable() -> None:
    program = check(LATE_GUARD, {"m": np.array([True, False, True]), "x": numbers(2)})
    with pytest.raises(InputError, match=r"Add_y(.|\n)*after NonZero_i.n = 3"):
        program.run({"m": np.ones(3, bool), "x": numbers(2)})
    assert program.run({"m": np.array([True, True]), "x": np.zeros(2, np.float32)})["y"].tolist() == [0, 1]


def test_a_guard_that_no_part_sees_is_checked_behind_the_last_step() -> None:
    m = model([node("Unique", "x", "u"), node("Reshape", "u s", "y")], {"x": (T.FLOAT, ["N"])}, "y", {"s": i64(1, 3)})
    program = check(m, {"x": np.float32([3, 1, 2, 1])})
    with pytest.raises(InputError, match=r"Unique_u.n == 3, here 2 and 3(.|\n)*after Unique_u.n = 2"):
        program.run({"x": np.float32([1, 2])})


def test_wrong_calls_are_refused_before_anything_runs() -> None:
    m = model([node("NonZero", "m", "i")], {"m": (T.BOOL, [3, "W"])}, "i")
    program = polydyn.compile(m)
    for feeds in ({"m": mask(4, 2)}, {"m": mask(3)}, {"m": numbers(3, 2)}, {}, {"x": mask(3, 2)}):
        with pytest.raises(InputError):
            program.run(feeds)
    for call in (program.run, program.bind):
        with pytest.raises(TypeError, match="not a mapping of arrays"):
            call(None)  # type: ignore[arg-type]


def test_saved_programs_give_the_same(tmp_path: Path) -> None:
    program = check(MASKED_ROWS, {"x": numbers(5, 6)})
    program.save(tmp_path / "masked.polydyn")
    loaded = polydyn.load(tmp_path / "masked.polydyn", threads=1)
    x = {"x": numbers(9, 2)}
    same(loaded.run(x), list(program.run(x).values()))
    assert loaded.outputs == program.outputs and loaded.symbols == program.symbols
    again = polydyn.compile(MASKED_ROWS, threads=2)
    again.save(tmp_path / "again.polydyn")
    assert (tmp_path / "again.polydyn").read_bytes() == (tmp_path / "masked.polydyn").read_bytes()


def saved(program: PartsProgram, folder: Path) -> str:
    program.save(folder / "saved.polydyn")
    return str(folder / "saved.polydyn")


def test_looking_inside(tmp_path: Path) -> None:
    program = check(MASKED_ROWS, {"x": numbers(5, 6)})
    shown = str(program.explain(**dict.fromkeys(program.symbols, 5)))
    assert "NonZero_i.n=5" in shown and len(program.launches) == shown.count("nest ") + shown.count("shares of ")
    rows = program.profile({"x": numbers(5, 6)}, repeats=2)
    assert [r.label for r in rows if r.label.startswith("host")] == ["host: non_zero of NonZero_i"]
    assert len(rows) == len(program.launches) + 1
    with pytest.raises(UnsupportedError, match="not with steps between parts"):
        program.trace({"x": numbers(5, 6)})
    assert "non_zero of NonZero_i" in "\n".join(program.manifest["notes"])
    shown = CliRunner().invoke(main, ["inspect", saved(program, tmp_path)]).output
    assert "host operators\n  non_zero of NonZero_i" in shown


def test_out_and_bound_calls() -> None:
    program = polydyn.compile(LATE_GUARD)
    feeds = {"m": np.array([True, False, True]), "x": numbers(2)}
    want, y = program.run(feeds)["y"], np.empty(2, np.float32)
    assert program.run(feeds, {"y": y})["y"] is y and np.array_equal(y, want)
    with pytest.raises(InputError, match="shape"):
        program.run(feeds, {"y": np.empty(3, np.float32)})
    bound = program.bind(feeds)
    feeds["m"][:] = [False, True, True]
    assert np.array_equal(bound()["y"], program.run(feeds)["y"])


def test_many_sizes_from_many_threads_with_flat_memory() -> None:
    program = polydyn.compile(MASKED_ROWS, threads=1)
    assert isinstance(program, PartsProgram)
    wrong: list[object] = []

    def calls(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(250):
            x = rng.standard_normal((rng.integers(0, 40), rng.integers(0, 40))).astype(np.float32)
            if not np.allclose(program.run({"x": x})["y"], np.exp(x[x > 0]), 1e-5):
                wrong.append(x)

    calls(0)
    before = program.counters["arena_bytes"]
    every = [threading.Thread(target=calls, args=(k,)) for k in range(4)]
    for t in every:
        t.start()
    for t in every:
        t.join()
    assert not wrong
    assert program.counters["arena_bytes"] <= 5 * max(before, 1 << 16), "each thread's arena, no growth by calls"


def test_parts_run_on_the_threads_of_one_pool() -> None:
    program, before = polydyn.compile(MASKED_ROWS, threads=2), len(os.listdir("/proc/self/task"))
    assert isinstance(program, PartsProgram) and len(program.parts) > 1
    program.run({"x": np.ones((700, 700), np.float32)})
    assert len(os.listdir("/proc/self/task")) <= before + 1


def test_one_number_of_threads_or_another_gives_the_same_bits() -> None:
    x = {"x": numbers(200, 100)}
    results = [polydyn.compile(MASKED_ROWS, threads=n).run(x) for n in (1, 2, 7)]
    for r in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(r.values(), results[0].values(), strict=True))


def test_other_targets_and_tools_refuse_by_name() -> None:
    with pytest.raises(UnsupportedError, match="between two parts"):
        polydyn.compiler.plan_program(MASKED_ROWS)
    too_many = model([node("Expand", "x s", "y")], {"x": (T.FLOAT, ["N"]), "s": (T.INT64, ["R"])}, "y")
    with pytest.raises(UnsupportedError, match="knows how many"):
        polydyn.compile(too_many)


def test_a_session_runs_them() -> None:
    session = polydyn.InferenceSession(MASKED_ROWS.SerializeToString())
    x = numbers(4, 3)
    same(polydyn.compile(MASKED_ROWS).run({"x": x}), session.run(None, {"x": x}))
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    for o in session.get_outputs():
        binding.bind_output(o.name)
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(binding.copy_outputs_to_cpu()[1], np.exp(x[x > 0]), 1e-5)


def test_memory_between_parts_is_used_again() -> None:
    nodes = [node("NonZero", "x", "i"), node("Transpose", "i", "t"), node("GatherND", "x t", "v")]
    for k in range(4):  # each part passes a tensor to the next one
        nodes += [node("NonZero", f"{'v' if not k else f'v{k}'}", f"i{k}"), node("Transpose", f"i{k}", f"t{k}")]
        nodes += [node("GatherND", f"{'v' if not k else f'v{k}'} t{k}", f"v{k + 1}")]
    program = check(model(nodes, {"x": (T.FLOAT, ["N"])}, "v4"), {"x": numbers(100)}, {"x": numbers(7)})
    most, rng = 20000, np.random.default_rng(1)
    program.run({"x": np.ones(most, np.float32)})
    before = program.counters["arena_bytes"]
    for _ in range(50):
        x = rng.standard_normal(rng.integers(0, most)).astype(np.float32)
        assert np.array_equal(program.run({"x": x})["v4"], x)
    assert program.counters["arena_bytes"] == before, "smaller calls need nothing more"
    rooms = [t["room"] for t in program.manifest["tensors"] if t["room"] >= 0]
    assert len(set(rooms)) < len(rooms), "tensors that are never there at once share a room"


def test_a_failure_between_parts_leaves_what_a_call_has_usable() -> None:
    program = polydyn.compile(LATE_GUARD, threads=1)
    assert isinstance(program, PartsProgram)
    good = {"m": np.array([True, False, True]), "x": numbers(2)}
    want = program.run(good)["y"]
    for _ in range(3):
        with pytest.raises(InputError):
            program.run({"m": np.ones(3, bool), "x": numbers(2)})
    assert np.array_equal(program.run(good)["y"], want) and len(program._frames) == 1


def test_an_output_in_another_shape_is_the_steps_own_tensor_once() -> None:
    nodes = [node("Unique", "x", "u"), node("Unsqueeze", "u zero", "a"), node("Unsqueeze", "u one", "b")]
    constants = {"zero": i64(0), "one": i64(1)}
    m = model(nodes, {"x": (T.FLOAT, ["N"])}, "a b", constants)
    program = check(m, {"x": numbers(9)}, {"x": np.ones(4, np.float32)})
    assert len(program.launches) == 1, "the first one is not copied"
    got = program.run({"x": numbers(5)})
    assert not np.may_share_memory(got["a"], got["b"])


def test_a_gather_at_the_places_of_a_mask_reads_them_and_not_their_subscripts() -> None:
    nodes = [
        node("NonZero", "x", "i"),
        node("Transpose", "i", "t"),
        node("GatherND", "x t", "v"),
        node("Exp", "v", "y"),
    ]
    program = check(model(nodes, {"x": (T.FLOAT, ["H", "W"])}, "y"), {"x": np.round(numbers(6, 7))})
    assert len(program.launches) == 1, program.launches

"""Measuring tools: generated inputs, turns that wait, errors that show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import guards, opening, overhead, scheduling
from benchmarks.bound import bound, products
from benchmarks.limits import Limits
from benchmarks.models.light import redraw
from benchmarks.ops import convolutions, draw
from benchmarks.protocol import Contestant, Series, rounds_for, spread, take_turns, verdict, warm_up
from benchmarks.record import Results
from benchmarks.rows import Effort, Field, clipped, geomean, judge, summary
from benchmarks.shortfall import Held, Machine, Profiled, Work, explained, filled, hold, merged
from polydyn.codegen.cpu.target import AVX2
from polydyn.testing import models
from polydyn.testing.accuracy import TOLERANCE, error, reference
from polydyn.testing.inputs import SHAPES, family, feeds, shapes, symbols
from tests.support.stored import MODELS, load, one_head_scaled, path_of


def test_every_model_has_eight_shapes_over_its_symbols() -> None:
    assert len(MODELS) == 16
    for name in MODELS:
        assert len(shapes(name)) == 8
        assert all(set(s) == set(symbols(load(name))) for s in shapes(name)), name
    assert {family(n) for n in MODELS} <= set(SHAPES)


def test_hollow_kernels_have_no_body() -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in "xy")
    made = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y]))
    plan = overhead.hollow(made)
    assert plan.kernels and all(k.text.count("{}") == 1 and len(k.text) < 200 for k in plan.kernels)


KERNELS = """<ir_version: 9, opset_import: ["": 17]>
kernels (float[B, L, 8] x, float[8, 8] w, float[8] scale) => (float[B, L, 8] y) {
  q = MatMul(x, w)
  keys = Transpose<perm = [0, 2, 1]>(x)
  scores = MatMul(q, keys)
  weights = Softmax(scores)
  z = MatMul(weights, x)
  y = LayerNormalization(z, scale)
}"""
"""A product, an attention and a nest."""


def test_guards_are_timed_inside_the_run_time() -> None:
    every = [feeds(load("bert_tiny"), s) for s in shapes("bert_tiny")[:2]]
    assert set(guards.times(overhead.hollow(path_of("bert_tiny")), every, 2)) == set(guards.FIELDS)


def test_scheduling_costs_have_all_parts(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(KERNELS), tmp_path / "kernels.onnx")
    groups = scheduling.measure(str(tmp_path / "kernels.onnx"), AVX2, 1)["groups"]
    kinds = [g["kernel"].partition("_")[0] for g in groups]
    assert {"contract", "attention", "nest"} <= set(kinds)
    for g, kind in zip(groups, kinds, strict=True):
        parts = {"schedule", "proof", "tree", *(() if kind == "attention" else ("dependences",))}
        assert parts <= set(g) and abs(g["once"] - sum(g[p] for p in parts)) < 0.02
        assert ("gpu tile" in g) == (kind == "contract") and g["cpu tile"] > 0
    assert scheduling.summary(groups).startswith(f"{len(groups)} kernels; once: median")


def test_an_unknown_model_has_no_stored_shapes() -> None:
    with pytest.raises(KeyError, match="no shapes are stored"):
        shapes("my_model")


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_past_tiny"])
def test_masks_hold_zeros_but_no_row_of_zeros_alone(name: str) -> None:
    for shape in shapes(name):
        mask = feeds(load(name), shape)["attention_mask"]
        assert mask.any(axis=1).all()
        assert mask.shape[1] == 1 or not mask.all(axis=1).any()


def test_token_ids_stay_inside_their_table() -> None:
    for name in ("bert_tiny", "gpt2_tiny", "t5_tiny"):
        ids = feeds(load(name), {"B": 64, "L": 64})["input_ids"]
        assert ids.min() == 0 and ids.max() == 119, name


def test_feeds_name_the_missing_symbol() -> None:
    with pytest.raises(ValueError, match="'L'"):
        feeds(load("bert_tiny"), {"B": 1})


def test_feeds_repeat_with_the_seed() -> None:
    a, b, c = (feeds(load("vit_tiny"), {"N": 1}, seed)["pixel_values"] for seed in (0, 0, 1))
    assert (a == b).all() and not (a == c).all()


def test_light_models_are_drawn_the_same_every_time() -> None:
    name = "squeezenet_tiny"
    assert redraw(name).graph.initializer == load(name).graph.initializer


def test_the_tolerance_sees_one_heads_scale_off_by_one_percent(tmp_path: Path) -> None:
    wanted = [s for s in shapes("bert_tiny") if s["L"] > 1]  # over one position softmax is 1 whatever the scale
    expected = reference(path_of("bert_tiny"), wanted)
    for factor, seen in ((1.0, False), (1.01, True)):
        onnx.save_model(one_head_scaled(factor), str(tmp_path / "altered.onnx"))
        got = reference(str(tmp_path / "altered.onnx"), wanted)
        assert all((error(g, e) > TOLERANCE) == seen for g, e in zip(got, expected, strict=True)), factor


def test_error_is_infinite_where_results_cannot_be_compared() -> None:
    good = {"y": np.ones((2, 3), np.float32)}
    assert error(good, good) == 0
    assert error({"y": np.ones((3, 2), np.float32)}, good) == float("inf")
    assert error({"y": np.ones((2, 3))}, good) == float("inf")
    assert error({"y": np.full((2, 3), np.nan, np.float32)}, good) == float("inf")


def test_bound_counts_operations_and_bytes_and_shared_weights_from_memory_once(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.ones((5, 5), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("Identity", ["w"], ["shared"], name="same"),
        helper.make_node("MatMul", ["h", "shared"], ["y"], name="second"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", 5]) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = str(tmp_path / "m.onnx")
    onnx.save_model(model, path)
    flops, rows, weight = 2 * 3 * 5 * 5, 4 * 3 * 5, 4 * 5 * 5
    assert products(path, {"B": 3}) == [(flops, 2 * rows + weight, 0), (flops, 2 * rows, weight)]
    limits = Limits(1, flops=1e12, bandwidth=1e6, cached=((1000, 1e9),))
    assert bound(path, {"B": 3}, limits) == pytest.approx((4 * rows + weight) / 1e6 + weight / 1e9)


def test_a_contestant_plays_turns_and_becomes_quiet() -> None:
    with Contestant("onnxruntime", path_of("resnet_tiny"), threads=2) as player:
        assert player.version == ort.__version__
        shape = {"N": 1, "H": 32, "W": 32}
        once = warm_up(player, shape)
        a, b = take_turns([player, player], [once, once], shape, rounds=2)
        assert len(a.turns) == len(b.turns) == 2 and min(a.turns + b.turns) > 0
        assert spread(a, b) >= 0 == spread(a, a)


def test_a_contestant_that_fails_says_why(tmp_path: Path) -> None:
    model = load("resnet_tiny")
    del model.graph.node[3:]
    onnx.save_model(model, str(tmp_path / "broken.onnx"))
    with pytest.raises(RuntimeError, match="onnxruntime: "):
        Contestant("onnxruntime", str(tmp_path / "broken.onnx"), threads=1)


def test_no_ratio_inside_the_spread_is_a_win() -> None:
    assert [verdict(r, 0.05) for r in (1.04, 0.96, 1.06, 0.94)] == ["same", "same", "faster", "slower"]


def test_the_list_of_products_is_the_one_the_script_draws() -> None:
    assert draw.LIST.read_text() == draw.text()


def test_the_list_of_convolutions_is_the_one_the_script_writes_and_its_sizes_are_onnx() -> None:
    cases = convolutions.read()
    assert convolutions.LIST.read_text() == convolutions.text() and len(cases) >= 150
    assert len({case.model().graph.name for case in cases}) == len(cases), "results are kept by name"
    for case in cases:
        m, sizes = case.model(), case.feed(case.shapes[-1])
        for d in m.graph.input[0].type.tensor_type.shape.dim:
            if d.dim_param:
                d.dim_value = sizes[d.dim_param]
        (y,) = onnx.shape_inference.infer_shapes(m).graph.output
        got = [d.dim_value for d in y.type.tensor_type.shape.dim]
        narrow = case.operator == "Block"
        n, *pixels = case.shapes[-1]
        assert got == [n, case.channels if narrow else case.outputs, *case.result(tuple(pixels))], case
    weights, sizes = draw.read()
    assert sum(len(g.ms) for g in weights) >= 120 and len(sizes) >= 20
    for g in weights:
        if g.family in draw.TABLE3:
            ranges = draw.TABLE3[g.family]
            assert all(low <= x <= high for m in g.ms for x, (low, high) in zip((m, g.n, g.k), ranges, strict=True))


def test_contestants_agree_and_one_program_serves_every_row_count(tmp_path: Path) -> None:
    path = models.save(models.gemm(7, 5), tmp_path)
    with Field(["onnxruntime", "numpy", "polydyn"], threads=1) as field:
        field.load(path)
        for m in (1, 3):
            row = field.measure({"M": m}, Effort(1, 1.0), least=0.0)
            assert set(row["seconds"]) == {"onnxruntime", "numpy", "polydyn"}
            assert row["differ"] == [] and row["ratio"] > 0


def test_who_refuses_a_model_is_left_out_and_named(tmp_path: Path) -> None:
    softmax = models.save(models.unary("Softmax", ["R", "L"], axis=-1), tmp_path)
    product = models.save(models.gemm(2, 3), tmp_path)
    with Field(["onnxruntime", "numpy"], threads=1) as field:
        field.load(softmax)
        assert list(field.players) == ["onnxruntime"] and "Softmax" in field.refusals["numpy"]
        field.load(product)
        assert list(field.players) == ["onnxruntime", "numpy"] and not field.refusals


def test_gap_closed_is_clipped_and_counts_only_where_there_is_a_gap() -> None:
    times = {"onnxruntime": 3.0, "torch": 2.5, "polydyn": 2.0}
    row = judge(times, noise=0.1, least=1.0)
    assert (row["ratio"], row["to_best"], row["gap_closed"], row["verdict"]) == (1.5, 1.25, 0.5, "faster")
    slow, at_limit = judge(times | {"polydyn": 30.0}, 0.1, 1.0), judge(times, 0.1, 3.0)
    assert at_limit["gap_closed"] is None
    assert clipped([row, slow, at_limit]) == -0.25
    assert geomean([row], "torch") == pytest.approx(1.25)


def test_data_in_a_cache_are_read_at_its_bandwidth() -> None:
    limits = Limits(1, flops=1e9, bandwidth=1e6, cached=((1000, 1e8), (10_000, 1e7)))
    assert [limits.seconds_again(0, size) for size in (1000, 10_000, 20_000)] == [1e-5, 1e-3, 2e-2]
    assert limits.seconds_again(1e9, 1000) == 1


def test_long_cases_take_fewer_rounds_and_never_less_than_three() -> None:
    assert rounds_for(10, [0.001, 0.002], 9) == 9
    assert rounds_for(10, [1.0, 1.0], 9) == 4
    assert rounds_for(10, [9.0, 9.0], 9) == 3
    assert rounds_for(10, [9.0, 9.0], 1) == 1


def test_who_refuses_a_shape_is_left_out_of_its_row_and_plays_the_next(tmp_path: Path) -> None:
    with Field(["onnxruntime", "polydyn"], threads=1) as field:
        field.load(models.save(models.gemm(3, 4), tmp_path))
        players = dict(field.players)
        field.players["openvino"] = Refusing()  # type: ignore[assignment]
        row = field.measure({"M": 2}, Effort(1, 1.0), least=0.0)
        assert set(row["seconds"]) == set(players) and row["refused"] == {"openvino": "openvino: no such shape"}
        assert summary([row | {"case": "a"}])["refused"] == ["a: openvino: no such shape"]


class Refusing:
    """A contestant that runs no shape."""

    def run(self, shape: object, repeat: int = 1) -> list[float]:
        raise RuntimeError("openvino: no such shape")


def test_a_contestant_whose_process_ended_says_so_and_starts_again(tmp_path: Path) -> None:
    path = models.save(models.gemm(3, 4), tmp_path)
    with Contestant("numpy", path, threads=1) as player:
        player._process.kill()
        player._process.wait()
        with pytest.raises(RuntimeError, match="numpy: the process ended"):
            player.run({"M": 2})
        player.load(path)
        assert player.run({"M": 2})[0] > 0


def test_a_part_measured_again_replaces_what_the_file_held_of_it(tmp_path: Path) -> None:
    first = Results("r", tmp_path)
    first.add("a", 1, [{"x": 1}, {"x": 2}], limits={})
    first.add("b", 1, [{"x": 3}])
    first.add("a", 2, [{"x": 4}])
    again = Results("r", tmp_path)
    again.add("a", 1, [{"x": 5}])
    rows = json.loads(again.path.read_text())["rows"]
    assert [(r["case"], r["threads"], r["x"]) for r in rows] == [("b", 1, 3), ("a", 2, 4), ("a", 1, 5)]
    assert [(p["case"], p["threads"]) for p in again.parts] == [("b", 1), ("a", 2), ("a", 1)]


def test_the_spread_is_that_of_medians_or_of_pairs_of_turns() -> None:
    assert spread(Series((1.0, 1.0, 1.0)), Series((2.0, 2.0, 2.0))) == 0.5
    assert spread(Series((1.0, 2.0, 3.0)), Series((2.0, 1.0, 3.0))) == 0.5


MACHINE = Machine(Limits(1, 1e9, 1e6, ((1000, 1e8), (10_000, 1e7))), last_cache=20_000, functions={"erf": 1e-6})


def work(**changed: float) -> Work:
    return replace(Work(flops=1e6, weights=0, moved=100, written=50, calls={}, filled=1.0, tasks=1), **changed)


def test_a_launch_is_held_against_arithmetic_memory_or_a_cache() -> None:
    held = hold(2e-3, "l", "k", work(), MACHINE, streams=True)
    assert (held.limit, held.bound) == (1e-3, "arithmetic")
    held = hold(2e-3, "l", "k", work(flops=0.0), MACHINE, streams=True)
    assert (held.limit, held.bound) == (1e-6, "cache")
    held = hold(2e-1, "l", "k", work(weights=5000), MACHINE, streams=True)
    assert (held.limit, held.bound) == (5e-3, "memory")
    assert hold(2e-1, "l", "k", work(weights=5000), MACHINE, streams=False).bound == "arithmetic"


def test_time_above_the_limit_is_put_down_to_causes_until_nothing_is_left() -> None:
    held = hold(2e-3, "l", "k", work(calls={"erf": 300}, filled=0.5), MACHINE, streams=False)
    assert held.causes == pytest.approx({"erf": 3e-4, "tails": 7e-4, "rest": 0.0})
    assert explained(0.0, {"erf": 1.0}) == {"rest": 0.0}
    assert explained(3.0, {"uneven": 1.0}) == {"uneven": 1.0, "rest": 2.0}
    two = replace(MACHINE, limits=replace(MACHINE.limits, threads=2))
    assert hold(2e-3, "l", "k", work(tasks=3), two, streams=False).causes["uneven"] == pytest.approx(1e-3 / 3)


def test_kernels_are_sorted_by_what_they_lose_and_named_by_their_largest_cause() -> None:
    launches = [
        Held("good", "a", 1.0, 0.99, "arithmetic", {"rest": 0.01}),
        Held("bad", "b", 2.0, 1.0, "memory", {"erf": 0.7, "rest": 0.3}),
        Held("bad", "c", 2.0, 1.0, "memory", {"erf": 0.7, "rest": 0.3}),
    ]
    rows = merged(launches)
    assert [(r["kernel"], r["launches"], r["reason"]) for r in rows] == [("bad", 2, "erf"), ("good", 1, "at its limit")]
    (slow,) = merged([Held("slow", "d", 3.0, 1.0, "memory", {"erf": 1.0, "rest": 1.0})])
    assert slow["reason"] == "erf"
    (open_,) = merged([Held("open", "d", 3.0, 1.0, "memory", {"erf": 0.5, "rest": 1.5})])
    assert open_["reason"] == "memory at 40% of its rate"
    assert rows[0]["above"] == 2.0 and rows[0]["causes"] == pytest.approx({"erf": 1.4, "rest": 0.6})


def test_lanes_beyond_the_last_element_are_not_filled() -> None:
    assert [filled(n, 16) for n in (0, 1, 16, 17, 32)] == [1.0, 1 / 16, 1.0, 17 / 32, 1.0]


def test_every_launch_is_held_and_its_functions_are_counted(tmp_path: Path) -> None:
    constants = {"table": (120, 32), "w": (32, 24)}
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"]),
        helper.make_node("Softmax", ["rows"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["m"]),
        helper.make_node("Erf", ["m"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.INT64, ["B"])
    drawn = {n: np.ones(s, np.float32) for n, s in constants.items()}
    path = models.save(models.model("m", nodes, {"x": x}, drawn), tmp_path)
    profiled = Profiled(str(path), threads=1)
    assert profiled.functions == {"exp", "erf"}
    works = profiled.works({"B": 10})
    rows, product = works.values()
    assert rows.calls == {"exp": 10 * 32} and product.calls == {"erf": 10 * 24}
    assert rows.weights < 120 * 32 * 4  # a Gather of ten rows does not read 120
    assert rows.filled == 1.0 and product.filled in (24 / 32, 1.0)
    launches = profiled.launches(onnx.load(str(path)), {"B": 10}, MACHINE, repeats=1)
    assert [h.label for h in launches] == list(works)
    assert all(sum(h.causes.values()) == pytest.approx(max(0.0, h.seconds - h.limit)) for h in launches)


def test_pages_of_a_file_just_written_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    with (tmp_path / "f").open("r+b") as f:
        assert opening.resident(f.fileno()) == 1.0
    assert opening.share_of_memory() > 1 << 20


def test_products_of_few_bits_run_in_onnxruntime() -> None:
    x = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 64)
    for made in (models.dynamic_linear(8, 64), models.linear_of_nibbles(8, 64, accuracy=4)):
        session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": x})
        assert y.shape == (3, 8) and np.abs(y).max() > 0.1

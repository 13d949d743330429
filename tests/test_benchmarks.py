"""The measuring tools: inputs that mean what they should, turns that wait, errors that show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from stored import MODELS, load, one_head_scaled, path_of

from benchmarks import scheduling
from benchmarks.accuracy import TOLERANCE, error, reference
from benchmarks.bound import products
from benchmarks.limits import Limits
from benchmarks.models.inputs import SHAPES, family, feeds, shapes, symbols
from benchmarks.models.light import redraw
from benchmarks.ops import draw, models
from benchmarks.protocol import Contestant, spread, take_turns, verdict
from benchmarks.rows import Field, clipped, geomean, judge
from polydyn.codegen.kernel import AVX2


def test_every_model_has_eight_shapes_over_its_symbols() -> None:
    assert len(MODELS) == 13
    for name in MODELS:
        assert len(shapes(name)) == 8
        assert all(set(s) == set(symbols(load(name))) for s in shapes(name)), name
    assert {family(n) for n in MODELS} == set(SHAPES)


def test_scheduling_costs_have_all_parts() -> None:
    row = scheduling.measure(path_of("bert_tiny"), AVX2, 1)
    groups = row["groups"]
    assert isinstance(groups, list) and len(groups) >= 8
    for g in groups:
        kind = g["kernel"].partition("_")[0]
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


def test_bound_counts_operations_and_bytes(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.ones((5, 7), np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 5])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 7])
    graph = helper.make_graph([node], "g", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = str(tmp_path / "m.onnx")
    onnx.save_model(model, path)
    assert products(path, {"B": 3}) == [(2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7))]


def test_a_contestant_plays_turns_and_becomes_quiet() -> None:
    with Contestant("onnxruntime", path_of("resnet_tiny"), threads=2) as player:
        assert player.version == ort.__version__
        shape = {"N": 1, "H": 32, "W": 32}
        (series,) = take_turns([player], shape, rounds=3)
        assert len(series.turns) == 3 and min(series.turns) > 0
        assert spread(player, shape, rounds=2) >= 0


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
            row = field.measure({"M": m}, rounds=1, least=0.0)
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

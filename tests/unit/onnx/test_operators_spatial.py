"""Convolution, pooling, resizing and normalizations, with symbolic dims at ugly sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.graph import reference
from polydyn.graph.ir import Compute, Graph, SymbolSource, Tensor
from polydyn.schedules.expr import FromIndex, Op, const, load, loads, op
from polydyn.schedules.index import Index
from polydyn.testing import conformance
from tests.support.one_node import check, check_with_onnxruntime, import_model, model_of

RNG = np.random.default_rng(1)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


# -- convolution and pooling -----------------------------------------------------------------------------------------

CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((4, 3, 3), (3,), {"pads": [1, 2], "strides": [2], "dilations": [2]}),
    ((4, 3, 3, 2), (3,), {"pads": [1, 0, 1, 1]}),
    ((6, 1, 3, 3), (6,), {"group": 6, "pads": [1, 1, 1, 1]}),
    ((6, 2, 3, 3), (4,), {"group": 2, "strides": [2, 1]}),
    ((5, 3, 1, 1), (3,), {}),
    ((2, 1, 1, 1), (1,), {}),
    ((2, 2, 2, 2, 2), (2,), {"pads": [0, 0, 1, 1, 0, 0]}),
    ((4, 3, 3, 3), (3,), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((4, 3, 2, 2), (3,), {"auto_pad": "SAME_LOWER"}),
    ((4, 3, 3, 3), (3,), {"auto_pad": "VALID"}),
]


@pytest.mark.parametrize(("weight", "channels", "attributes"), CONVOLUTIONS, ids=range(len(CONVOLUTIONS)))
def test_conv(weight: tuple[int, ...], channels: tuple[int, ...], attributes: dict[str, Any]) -> None:
    rank = len(weight) - 2
    symbols = tuple("HWD"[:rank])
    inputs = {"x": ("float32", ("N", *channels, *symbols)), "w": floats(*weight), "b": floats(weight[0])}
    model = model_of("Conv", inputs, attributes)
    graph = import_model(model)
    for n, size in ((0, 7), (1, 7), (2, 9), (2, 12)):
        check(model, {"x": floats(n, *channels, *(size + i for i in range(rank)))}, 1e-4, graph)


def test_padding_is_a_guarded_copy_and_the_sum_a_plain_product() -> None:
    inputs = {"x": ("float32", ("N", 3, "H", "W")), "w": floats(4, 3, 3, 3)}
    pad, total = import_model(model_of("Conv", inputs, {"pads": [1, 1, 1, 1]})).nodes
    assert isinstance(pad, Compute) and isinstance(pad.body, Op) and pad.body.name == "where"
    assert isinstance(total, Compute) and total.reduce == "sum" and len(loads(total.body)) == 2
    (only,) = import_model(model_of("Conv", inputs)).nodes
    assert isinstance(only, Compute) and only.reduce == "sum"


def test_same_padding_keeps_the_symbolic_size() -> None:
    inputs = {"x": ("float32", ("N", 3, "H", "W")), "w": floats(4, 3, 3, 3)}
    graph = import_model(model_of("Conv", inputs, {"auto_pad": "SAME_UPPER"}))
    assert [str(d) for d in graph.tensors["y"].shape] == ["N", "4", "H", "W"]


SPREAD: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((3, 4, 2, 2), {"strides": [2, 2]}),
    ((3, 4, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((3, 4, 4, 3), {"strides": [2, 1], "pads": [1, 0, 1, 2]}),
    ((4, 2, 3), {"strides": [2], "group": 2}),
    ((4, 1, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 4}),
    ((3, 5, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((3, 2, 1, 1), {"strides": [2, 3]}),
    ((2, 3, 2, 2, 2), {"strides": [2, 2, 1]}),
    ((3, 4, 3, 2), {"strides": [2, 3], "dilations": [2, 3], "pads": [1, 0, 1, 0]}),
]


@pytest.mark.parametrize(("weight", "attributes"), SPREAD, ids=range(len(SPREAD)))
def test_transposed_convolution(weight: tuple[int, ...], attributes: dict[str, Any]) -> None:
    rank, channels = len(weight) - 2, weight[1] * attributes.get("group", 1)
    inputs = {"x": ("float32", ("N", weight[0], *"HWD"[:rank])), "w": floats(*weight), "b": floats(channels)}
    model = model_of("ConvTranspose", inputs, attributes)
    for n, size in ((0, 3), (1, 1), (2, 5)):
        x = floats(n, weight[0], *(size + i for i in range(rank)))
        check_with_onnxruntime(model, {"x": x}, 1e-4)


@pytest.mark.parametrize("strides", [[1, 1], [2, 3]])
def test_transposed_convolution_with_the_shape_of_its_output(strides: list[int]) -> None:
    """The start of the result depends on the size; a size that does not reach all of it is rejected, as in onnx."""
    inputs = {"x": ("float32", ("N", 3, "H", "W")), "w": floats(3, 2, 3, 4)}
    model = model_of("ConvTranspose", inputs, {"strides": strides, "output_shape": [9, 7]})
    for n, h, w in ((2, 7, 5), (1, 8, 6), (0, 9, 8)):
        check_with_onnxruntime(model, {"x": floats(n, 3, h, w)}, 1e-4)
    rules = [str(g.message) for g in import_model(model).guards]
    assert any("reaches every position of output_shape along axis 2" in r for r in rules)


def test_transposed_convolution_multiplies_no_inserted_zeros() -> None:
    """A kernel of 4 at stride 2 has 2 taps per axis at every output position."""
    inputs = {"x": ("float32", ("N", 3, "H", "W")), "w": floats(3, 5, 4, 4)}
    graph = import_model(model_of("ConvTranspose", inputs, {"strides": [2, 2], "pads": [1, 1, 1, 1]}))
    (total,) = (n for n in graph.nodes if isinstance(n, Compute) and n.reduce == "sum")
    assert list(map(str, total.reduction)) == ["3", "2", "2"]
    assert [str(d) for d in graph.tensors["y"].shape] == ["N", "5", "2*H", "2*W"]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [({"pads": [-1, 0, 0, 0]}, "negative padding")],
)
def test_what_transposed_convolution_refuses(attributes: dict[str, Any], message: str) -> None:
    inputs = {"x": ("float32", ("N", 3, "H", "W")), "w": floats(3, 5, 3, 3)}
    with pytest.raises(UnsupportedError, match=message):
        import_model(model_of("ConvTranspose", inputs, attributes))


POOLINGS: list[tuple[str, dict[str, Any]]] = [
    ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("MaxPool", {"kernel_shape": [2, 2], "dilations": [2, 3]}),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
]


@pytest.mark.parametrize(("operator", "attributes"), POOLINGS, ids=range(len(POOLINGS)))
def test_pooling(operator: str, attributes: dict[str, Any]) -> None:
    model = model_of(operator, {"x": ("float32", ("N", 2, "H", "W"))}, attributes)
    for n, h, w in ((1, 7, 8), (2, 5, 7), (1, 9, 6), (1, 33, 4)):
        check_with_onnxruntime(model, {"x": floats(n, 2, h, w)})


@pytest.mark.parametrize("operator", ["GlobalAveragePool", "GlobalMaxPool"])
def test_global_pooling(operator: str) -> None:
    model = model_of(operator, {"x": ("float32", ("N", 2, "H", "W"))})
    graph = import_model(model)
    for size in (1, 2, 7, 33):
        check(model, {"x": floats(2, 2, size, 3)}, graph=graph)


def test_local_response_normalization() -> None:
    model = model_of("LRN", {"x": ("float32", ("N", "C", 3, 2))}, {"size": 3, "alpha": 0.5, "beta": 0.6})
    for c in (1, 2, 7):
        check_with_onnxruntime(model, {"x": floats(2, c, 3, 2)})


# -- resizing --------------------------------------------------------------------------------------------------------

RESIZES = [
    ("nearest", "asymmetric", {"nearest_mode": "floor"}), ("nearest", "half_pixel", {}),
    ("nearest", "half_pixel", {"nearest_mode": "round_prefer_ceil"}),
    ("nearest", "asymmetric", {"nearest_mode": "ceil"}),
    ("linear", "half_pixel", {}), ("linear", "align_corners", {}), ("linear", "pytorch_half_pixel", {}),
    ("linear", "asymmetric", {}), ("cubic", "half_pixel", {"cubic_coeff_a": -0.5}), ("cubic", "align_corners", {}),
    ("cubic", "half_pixel", {"exclude_outside": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "coordinates", "settings"), RESIZES, ids=range(len(RESIZES)))
def test_resize_to_sizes_and_by_scales(mode: str, coordinates: str, settings: dict[str, Any]) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, **settings}
    x = ("float32", ("N", 2, "H", "W"))
    for h, w in ((5, 9), (1, 2), (12, 3)):
        inputs: dict[str, Any] = {"x": x, "s": np.array([1, 2, h, w])}
        model = model_of("Resize", inputs, attributes, names=("x", "", "", "s"))
        for size in (1, 2, 7):
            check(model, {"x": floats(1, 2, size, size + 3)}, 1e-4)
    model = model_of("Resize", {"x": x, "s": np.array([1, 1, 2, 3], np.float32)}, attributes, names=("x", "", "s"))
    graph = import_model(model)
    for size in (1, 2, 7):
        check(model, {"x": floats(2, 2, size, 4)}, 1e-4, graph)
    check(model, {"x": floats(0, 2, 3, 4)}, 1e-4, graph)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("outside", [0, 1])
def test_resize_that_smooths(mode: str, outside: int) -> None:
    attributes = {"mode": mode, "antialias": 1, "exclude_outside": outside}
    inputs: dict[str, Any] = {"x": ("float32", ("N", 2, "H", "W")), "s": np.array([1, 2, 3, 5])}
    model = model_of("Resize", inputs, attributes, names=("x", "", "", "s"))
    graph = import_model(model)
    for h, w in ((7, 31), (3, 5), (2, 1), (33, 7)):
        check(model, {"x": floats(1, 2, h, w)}, 1e-4, graph)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_of_a_part(mode: str) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0}
    roi = np.array([0, 0, 0.25, -0.5, 1, 1, 0.75, 1.25], np.float32)
    inputs: dict[str, Any] = {"x": ("float32", ("N", 2, "H", "W")), "r": roi, "s": np.array([1, 2, 3, 5])}
    model = model_of("Resize", inputs, attributes, names=("x", "r", "", "s"))
    for h, w in ((7, 31), (4, 4)):
        check(model, {"x": floats(1, 2, h, w)}, 1e-4)


def test_positions_of_tf2onnx_add_half_a_pixel() -> None:
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    inputs: dict[str, Any] = {"x": ("float32", ("N", 2, "W")), "s": np.array([1, 2, 5]), "e": np.zeros(0, np.float32)}
    graph = import_model(model_of("Resize", inputs, attributes, 11, names=("x", "e", "e", "s")))
    for width in (1, 2, 5, 13):
        x = floats(1, 2, width)
        places = np.floor((np.arange(5) + 0.5) / (5 / width)).astype(int).clip(0, width - 1)
        assert np.array_equal(reference.evaluate(graph, {"x": x})["y"], x[:, :, places])


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_resize_that_keeps_proportions(policy: str) -> None:
    attributes = {"mode": "linear", "keep_aspect_ratio_policy": policy, "axes": [2, 3]}
    for size in ((8, 8), (3, 9), (5, 2)):
        inputs: dict[str, Any] = {"x": ("float32", ("N", 2, 4, 6)), "s": np.array(size)}
        check(model_of("Resize", inputs, attributes, 19, names=("x", "", "", "s")), {"x": floats(1, 2, 4, 6)}, 1e-4)


@pytest.mark.parametrize(("attributes", "message"), [
    ({"coordinate_transformation_mode": "tf_crop_and_resize"}, "a roi that is not constant"),
    ({"mode": "nearest", "coordinate_transformation_mode": "other"}, "coordinate_transformation_mode other"),
])  # fmt: skip
def test_resize_modes_that_are_refused(attributes: dict[str, Any], message: str) -> None:
    inputs = {"x": ("float32", ("N", 2, "H", "W")), "s": np.array([1, 1, 2, 1.5], np.float32)}
    with pytest.raises(UnsupportedError, match=rf"{message}(.|\n)*the_Resize"):
        import_model(model_of("Resize", inputs, attributes, names=("x", "", "s")))


def test_a_crop_to_a_size_that_is_not_constant_names_the_remedy() -> None:
    inputs: dict[str, Any] = {"x": ("float32", ("N", 2, "H", "W")), "s": np.array([1, 1, 2, 1.5], np.float32)}
    inputs["roi"] = np.array([0, 0, 0.2, 0.2, 1, 1, 0.8, 0.8], np.float32)
    attributes = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
    with pytest.raises(UnsupportedError, match=r"(?s)size that is not constant.*remedy: give sizes as an initializer"):
        import_model(model_of("Resize", inputs, attributes, names=("x", "roi", "s")))


def test_depth_and_space() -> None:
    for mode in ("DCR", "CRD"):
        model = model_of("DepthToSpace", {"x": ("float32", ("N", 8, "H", "W"))}, {"blocksize": 2, "mode": mode})
        check(model, {"x": floats(2, 8, 3, 5)})
    model = model_of("SpaceToDepth", {"x": ("float32", ("N", 3, "H", "W"))}, {"blocksize": 2})
    check(model, {"x": floats(2, 3, 4, 6)})


# -- normalizations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("axis", "opset"), [(-1, 13), (1, 13), (1, 11), (0, 11)])
def test_softmax(operator: str, axis: int, opset: int) -> None:
    model = model_of(operator, {"x": ("float32", ("B", 3, "L"))}, {"axis": axis}, opset)
    graph = import_model(model)
    for n in (1, 2, 7, 33):
        check_with_onnxruntime(model, {"x": floats(2, 3, n) * 50}, 1e-4)
    assert reference.evaluate(graph, {"x": floats(0, 3, 4)})["y"].shape == (0, 3, 4)


def test_a_fully_masked_row_gives_nan() -> None:
    graph = import_model(model_of("Softmax", {"x": ("float32", ("B", "L"))}))
    got = reference.evaluate(graph, {"x": np.array([[-np.inf, -np.inf], [0, -np.inf]], np.float32)})["y"]
    assert np.isnan(got[0]).all() and got[1].tolist() == [1, 0]


@pytest.mark.parametrize("constant", [True, False])
def test_batch_normalization(constant: bool) -> None:
    parameters = {"s": floats(3), "b": floats(3), "m": floats(3), "v": np.abs(floats(3))}
    inputs: dict[str, Any] = {"x": ("float32", ("N", 3, "L"))}
    inputs |= parameters if constant else dict.fromkeys(parameters, ("float32", (3,)))
    model = model_of("BatchNormalization", inputs, {"epsilon": 1e-3})
    graph = import_model(model)
    assert len(graph.nodes) == (1 if constant else 3)
    for n in (0, 1, 7):
        check(model, {"x": floats(2, 3, n), **({} if constant else parameters)}, graph=graph)


def test_normalization_in_training_mode() -> None:
    inputs: dict[str, Any] = {"x": ("float32", ("N", 3, "L"))} | dict.fromkeys("sbmv", ("float32", (3,)))
    attributes = {"training_mode": 1, "momentum": 0.7}
    model = model_of("BatchNormalization", inputs, attributes, outputs=("y", "mean", "variance"))
    graph = import_model(model)
    for n, length in ((1, 2), (2, 7), (7, 1), (3, 33)):
        feeds = {"x": floats(n, 3, length)} | {k: np.abs(floats(3)) for k in "sbmv"}
        check(model, feeds, graph=graph)
    del attributes["training_mode"]
    with pytest.raises(UnsupportedError, match=r"without training mode(.|\n)*the_BatchNormalization"):
        import_model(model_of("BatchNormalization", inputs, attributes, outputs=("y", "mean", "variance")))


def test_instance_and_group_normalization() -> None:
    model = model_of("InstanceNormalization", {"x": ("float32", ("N", 3, "L")), "s": floats(3), "b": floats(3)})
    for n in (1, 2, 7, 33):
        check(model, {"x": floats(2, 3, n)}, 1e-4)
    model = model_of(
        "GroupNormalization", {"x": ("float32", ("N", 6, "H", "W")), "s": floats(6), "b": floats(6)},
        {"num_groups": 3}, 21,
    )  # fmt: skip
    check(model, {"x": floats(2, 6, 3, 5)}, 1e-4)


@pytest.mark.parametrize("opset", [18, 21])
def test_one_scale_for_all_channels_of_any_number(opset: int) -> None:
    """ONNX defines GroupNormalization as a function, whose products broadcast."""
    inputs: dict[str, Any] = {"x": ("float32", ("N", "C", "L")), "s": floats(1), "b": floats(1)}
    model = model_of("GroupNormalization", inputs, {"num_groups": 2}, opset)
    for channels in (2, 6):
        check(model, {"x": floats(2, channels, 5)}, 1e-4)


@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_normalization_with_its_statistics(axis: int) -> None:
    shape = (4,) if axis == -1 else (3, 4)
    inputs: dict[str, Any] = {"x": ("float32", ("B", 3, 4)), "s": floats(*shape), "b": floats(*shape)}
    model = model_of("LayerNormalization", inputs, {"axis": axis}, outputs=("y", "m", "i"))
    graph = import_model(model)
    for n in (1, 2, 7):
        check(model, {"x": floats(n, 3, 4)}, 1e-4, graph)
    check(model_of("LayerNormalization", inputs, {"axis": axis}), {"x": floats(2, 3, 4)}, 1e-4)


def test_root_mean_square_normalization() -> None:
    model = model_of("RMSNormalization", {"x": ("float32", ("B", "L")), "s": ("float32", ("L",))}, {}, 23)
    for n in (1, 2, 7, 33):
        check(model, {"x": floats(2, n), "s": floats(n)}, 1e-4)


# -- the reference evaluator -----------------------------------------------------------------------------------------


def _graph(body: Any, shape: tuple[Any, ...], reduction: tuple[Any, ...] = (), reduce: str | None = None) -> Graph:
    x = Tensor("x", "float32", (Index.of("N"),))
    y = Tensor("y", body.dtype, tuple(map(Index.of, shape)))
    node = Compute("y", body, tuple(map(Index.of, reduction)), reduce, "here")
    return Graph("g", ("x",), ("y",), {"x": x, "y": y}, {}, (node,), (SymbolSource("N", "x", 0),))


def test_a_load_out_of_range_fails_unless_a_where_guards_it() -> None:
    outside = load("x", (Index.of("d0") - 1,), "float32")
    with pytest.raises(PolydynError, match=r"x: subscript -1\.\.1 of axis 0 leaves \[0, 3\)(.|\n)*here"):
        reference.evaluate(_graph(outside, ("N",)), {"x": floats(3)})
    guarded = op("where", op("gt", FromIndex("int64", Index.of("d0")), const(0, "int64")), outside, const(9, "float32"))
    x = floats(3)
    assert reference.evaluate(_graph(guarded, ("N",)), {"x": x})["y"].tolist() == [9, x[0], x[1]]
    assert reference.evaluate(_graph(guarded, (1,)), {"x": floats(0)})["y"].tolist() == [9]


def test_sums_are_accumulated_wide_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.full(1000, 0.1, np.float32)
    x[0] = 1e6
    graph = _graph(load("x", ("r0",), "float32"), (5,), ("N",), "sum")
    want = np.float32(x.astype(np.float64).sum())
    assert (reference.evaluate(graph, {"x": x})["y"] == want).all()
    product = op("mul", load("x", ("d0",), "float32"), load("x", (Index.of("r0"),), "float32"))
    whole = reference.evaluate(_graph(product, ("N",), ("N",), "sum"), {"x": x})["y"]
    monkeypatch.setattr(reference, "BLOCK_BYTES", 1000)
    assert np.array_equal(reference.evaluate(_graph(product, ("N",), ("N",), "sum"), {"x": x})["y"], whole)


def test_wrong_inputs_are_named() -> None:
    graph = _graph(load("x", ("d0",), "float32"), ("N",))
    for feeds, words in (
        ({}, "missing"),
        ({"x": np.zeros(3)}, "dtype is float64, expected float32"),
        ({"x": floats(2, 2)}, "rank is 2, expected 1"),
    ):
        with pytest.raises(InputError, match=rf"{words}(.|\n)*tensor: x"):
            reference.evaluate(graph, feeds)


def test_a_share_of_the_onnx_node_tests() -> None:
    words = ("_conv_", "pool_", "softmax_", "_gemm_", "_matmul_", "normalization_", "reduce_", "resize_", "_einsum_")
    found = [c for c in conformance.cases() if any(w in c.name for w in words) and "expanded" not in c.name][::5]
    results = {c.name: conformance.run_case(c) for c in found}
    assert not {n: r for n, r in results.items() if r.startswith("failed")}
    assert sum(r.startswith("passed") for r in results.values()) >= 45


def test_small_ranks_and_sizes_that_formulas_skip() -> None:
    """The determinant of no rows is 1; axes past the rank are left out; integers have powers below 0."""
    check_with_onnxruntime(model_of("Det", {"x": ("float32", ("N", 0, 0))}, {}), {"x": floats(2, 0, 0)})
    check_with_onnxruntime(model_of("MeanVarianceNormalization", {"x": ("float32", ("N", 3))}, {}), {"x": floats(5, 3)})
    bases, powers = np.array([2, 1, -1, -1, 3], np.int32), np.array([-1, -2, -3, -4, 2], np.int32)
    model = model_of("Pow", {"x": ("int32", ("N",)), "p": powers}, {})
    check_with_onnxruntime(model, {"x": bases})

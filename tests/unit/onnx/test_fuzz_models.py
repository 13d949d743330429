"""Random ONNX models (``testing/fuzz_models.py``): planted faults are found, and named by the pass that made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.fusion import pipeline
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.separate import separate
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute, Graph
from polydyn.graph.reference import evaluate
from polydyn.schedules.expr import Op, Value
from polydyn.schedules.index import Index
from polydyn.testing import after_passes
from polydyn.testing.after_passes import evaluate_plan
from polydyn.testing.authorities import Array, Refused, Runtime, difference, second_opinion
from polydyn.testing.disputes import disputed_node, goes_beyond, open_question, stretches
from polydyn.testing.drafts import STRANGE
from polydyn.testing.fuzz_models import Settings, minimised, run_seed
from polydyn.testing.model_check import Check, Depth, everything, overflows
from polydyn.testing.random_onnx import THEMES, random_case


def model(opset: int = 18) -> onnx.ModelProto:
    """Build ``y = concat(-x, x + x)``, in ``z`` in another shape."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Add", ["x", "x"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["y"], axis=1),
        helper.make_node("Transpose", ["y"], ["z"], perm=[1, 0]),
    ]
    outputs = [info(n, TensorProto.FLOAT, [None, None]) for n in "yz"]
    graph = helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, ["B", 3])], outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


CALLS = [({"B": n}, {"x": np.arange(3.0 * n, dtype=np.float32).reshape(n, 3)}) for n in (2, 0, 5)]


def changed(name: str, change: Callable[[Graph], Graph]) -> tuple[pipeline.Pass, ...]:
    """Return the passes over the graph with one that also makes a mistake."""

    def f(p: pipeline.Pass) -> pipeline.Pass:
        before = p.graph
        assert before is not None
        return replace(p, graph=lambda g: change(before(g))) if p.name == name else p

    return tuple(f(p) for p in pipeline.REWRITES)


def wrong_sign(g: Graph) -> Graph:
    def f(v: Value) -> Value:
        return replace(v, name="sub") if isinstance(v, Op) and v.name == "add" else v

    nodes = [replace(n, body=f(n.body)) if isinstance(n, Compute) else n for n in g.nodes]
    return replace(g, nodes=tuple(nodes))


def test_a_model_is_a_function_of_its_seed() -> None:
    for theme in THEMES:
        one, two = random_case(3, theme), random_case(3, theme)
        assert one.model == two.model
        assert one.calls == two.calls
        onnx.checker.check_model(one.model)
    names = {d.dim_param for s in range(12) for v in random_case(s, "products").model.graph.input
             for d in v.type.tensor_type.shape.dim}  # fmt: skip
    assert len(names & set(STRANGE)) > 3


@pytest.mark.parametrize("theme", THEMES)
def test_models_agree_after_every_pass(theme: str) -> None:
    result = run_seed(50, settings=Settings(theme, compile=0, plan=0))
    assert result.finding is None, result.finding


def test_a_model_that_is_right() -> None:
    out = Check(model(), CALLS, Depth.PLAN).run()
    assert out.finding is None
    assert out.counts["models right"] == 1


def test_the_pass_that_makes_a_mistake_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_passes, "REWRITES", changed("fold", wrong_sign))
    found = Check(model(), CALLS, Depth.PASSES).run().finding
    assert found is not None
    assert (found.kind, found.stage) == ("wrong", "pass fold")


def test_a_group_that_is_lost_or_comes_late_is_named() -> None:
    plan = separate(import_model(model()))
    feeds = CALLS[0][1]
    right = evaluate_plan(plan, feeds)
    assert not difference(right, Runtime(model()).run(feeds))
    with pytest.raises(Exception, match="no earlier group left"):
        evaluate_plan(replace(plan, groups=plan.groups[::-1]), feeds)


def test_a_window_at_a_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(p: pipeline.Pass) -> pipeline.Pass:
        before = p.groups
        if p.name != "windows" or before is None:
            return p

        def f(plan: FusionPlan) -> FusionPlan:
            made = before(plan)
            return replace(made, windows={t: replace(w, offset=Index.of(0)) for t, w in made.windows.items()})

        return replace(p, groups=f)

    monkeypatch.setattr(after_passes, "FUSION", tuple(map(moved, pipeline.FUSION)))
    found = Check(model(), CALLS, Depth.PASSES).run().finding
    assert found is not None
    assert (found.kind, found.stage) == ("wrong", "pass windows")


def test_an_error_that_is_no_refusal_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a0")

    monkeypatch.setattr("polydyn.testing.plan.framed.programs_of", broken)
    found = Check(model(), CALLS, Depth.PLAN).run().finding
    assert found is not None
    assert (found.kind, found.stage, found.message) == ("error", "plan", "KeyError: 'a0'")


def test_failures_are_minimised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_passes, "REWRITES", changed("fold", wrong_sign))
    case = next(
        c for s in range(200) for c in [random_case(s, "views")]
        if "Add" in {n.op_type for n in c.model.graph.node} and len(c.model.graph.node) > 3
        and Check(c.model, list(c.feeds()), Depth.PASSES).run().finding is not None
    )  # fmt: skip
    calls = list(case.feeds())
    found = Check(case.model, calls, Depth.PASSES).run().finding
    assert found is not None
    small, call = minimised(case, calls, found)
    assert len(small.graph.node) < len(case.model.graph.node)
    assert Check(small, [call], Depth.PASSES).run().finding is not None


def test_old_operators_have_their_old_meaning() -> None:
    info = helper.make_tensor_value_info
    node = helper.make_node("Add", ["x", "b"], ["y"], broadcast=1, axis=0)
    inputs = [info("x", TensorProto.FLOAT, [2, "N"]), info("b", TensorProto.FLOAT, [2])]
    graph = helper.make_graph([node], "g", inputs, [info("y", TensorProto.FLOAT, [2, "N"])])
    old = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=3)
    feeds = {"x": np.zeros((2, 2), np.float32), "b": np.array([1, 2], np.float32)}
    assert Runtime(old).run(feeds)["y"].tolist() == [[1, 1], [2, 2]]
    with pytest.raises(Exception, match="later meanings"):
        second_opinion(old, feeds)


def test_a_second_opinion_knows_axes_in_any_order() -> None:
    """ONNX Runtime keeps the sizes of negative axes if an aspect ratio is kept; onnx.reference fails on them."""
    resize = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], axes=[-1, 0], mode="nearest",
                              keep_aspect_ratio_policy="not_smaller")  # fmt: skip
    info, sizes = helper.make_tensor_value_info, numpy_helper.from_array(np.array([3, 4]), "sizes")
    graph = helper.make_graph(
        [resize], "g", [info("x", TensorProto.FLOAT, ["N", 5, 3])], [info("y", TensorProto.FLOAT, None)], [sizes]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    feeds = {"x": np.arange(30, dtype=np.float32).reshape(2, 5, 3)}
    ours = {n: np.asarray(a) for n, a in evaluate(import_model(made), feeds).items()}
    assert ours["y"].shape == (4, 5, 6) and not difference(ours, second_opinion(made, feeds))


@pytest.mark.parametrize(("ours", "operator"), [(np.rint, "Resize"), (np.floor, "")])
def test_integers_between_two_are_rounded_to_the_nearest(
    ours: Callable[[Array], Array], operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime truncates: that is disputed. A truncation by polydyn is a fault."""
    scales = numpy_helper.from_array(np.float32([1, 1, 1, 2]), "scales")
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [info("x", TensorProto.UINT8, [1, 1, 1, 3])], [info("y", TensorProto.UINT8, None)], [scales]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = np.uint8([[[[1, 4, 2]]]])
    right = np.array([1, 1.75, 3.25, 3.5, 2.5, 2])
    monkeypatch.setattr(reference, "evaluate", lambda g, f: {"y": ours(right).reshape(1, 1, 1, 6).astype(np.uint8)})
    assert disputed_node(made, everything(made, {"x": x})) == operator


def test_old_hardmax_has_no_authority() -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Hardmax", ["x"], ["y"], axis=1)], "g",
        [info("x", TensorProto.FLOAT16, [2, 3, "N"])], [info("y", TensorProto.FLOAT16, None)],
    )  # fmt: skip
    old = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 5)], ir_version=3)
    with pytest.raises(Refused, match="along one axis"):
        Runtime(old).run({"x": np.zeros((2, 3, 2), np.float16)})


def test_sums_that_overflow_are_no_difference() -> None:
    most = np.array([2**31 - 1, 5], np.int32)
    assert overflows({"y": np.array([-7, 5], np.int32)}, {"y": most})
    assert not overflows({"y": np.array([-7, 6], np.int32)}, {"y": most})
    assert not overflows({"y": np.array([3], np.uint8)}, {"y": np.array([255], np.uint8)})


@pytest.mark.parametrize(
    ("nodes", "x", "beyond"),
    [
        ([helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[2])], (1, 1, 1), True),
        ([helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[2])], (1, 1, 2), False),
        ([helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[4], pads=[1, 1])], (1, 1, 2), False),
        ([helper.make_node("Concat", ["x", "x"], ["y"], axis=1)], (2, 3, 0), False),
        ([helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
          helper.make_node("Concat", ["x", "t"], ["y"], axis=0)], (2, 3, 0), True),
    ],
)  # fmt: skip
def test_what_onnx_runtime_runs_beyond_onnx_may_be_refused(
    nodes: list[onnx.NodeProto], x: tuple[int, ...], beyond: bool
) -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, ["a", "b", "c"])], [info("y", TensorProto.FLOAT, None)]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert goes_beyond(made, everything(made, {"x": np.zeros(x, np.float32)})) == beyond


@pytest.mark.parametrize(("dims", "beyond"), [((1, 3), True), ((2, 3), False)])
def test_an_output_of_another_rank_than_it_declares_is_beyond_onnx(dims: tuple[int, int], beyond: bool) -> None:
    info = helper.make_tensor_value_info
    nodes, x = [helper.make_node("Squeeze", ["x"], ["y"])], info("x", TensorProto.FLOAT, ["a", "b"])
    graph = helper.make_graph(nodes, "g", [x], [info("y", TensorProto.FLOAT, ["c", "d"])])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert goes_beyond(made, {"y": np.zeros(dims, np.float32).squeeze()}) == beyond


def test_a_resize_of_integers_may_follow_either_rule_for_sizes_that_are_rounded() -> None:
    """11 * 0.75 pixels are 8: ``align_corners`` divides by 7.25 in onnx.reference, by 7 in ONNX Runtime and here."""
    info, scales = helper.make_tensor_value_info, np.float32([1, 1, 1, 0.75])
    node = helper.make_node("Resize", ["x", "r", "s"], ["y"], mode="linear",
                            coordinate_transformation_mode="align_corners")  # fmt: skip
    constants = [onnx.numpy_helper.from_array(a, n) for a, n in ((scales, "s"), (np.float32([]), "r"))]
    x = np.random.default_rng(1).integers(-20, 20, (1, 2, 3, 11)).astype(np.int8)
    inputs, outputs = [info("x", TensorProto.INT8, x.shape)], [onnx.ValueInfoProto(name="y")]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    assert disputed_node(made, everything(made, {"x": x})) == "Resize"


@pytest.mark.parametrize(
    ("nodes", "x", "operator"),
    [
        ([helper.make_node("ArgMin", ["x"], ["y"], axis=0)], np.float32([2, np.nan, 1]), "ArgMin"),
        ([helper.make_node("ArgMin", ["x"], ["y"], axis=0)], np.float32([2, 3, 1]), ""),
        ([helper.make_node("Upsample", ["x"], ["y"], scales=[1.0, 1.0, 1.0, 2.0], mode="linear")],
         np.uint8([[[[1, 2]]]]), "Upsample"),
        ([helper.make_node("LRN", ["x"], ["y"], size=3)], np.float32([[[[1, np.inf]]]]), "LRN"),
        ([helper.make_node("LRN", ["x"], ["y"], size=3)], np.float32([[[[1, 2]]]]), ""),
        ([helper.make_node("GlobalMaxPool", ["x"], ["y"])], np.float32([[[-np.inf]]]), "GlobalMaxPool"),
        ([helper.make_node("MeanVarianceNormalization", ["x"], ["y"])], np.float32([[1, 2]]),
         "MeanVarianceNormalization"),
    ],
)  # fmt: skip
def test_the_node_that_is_disputed_is_named(nodes: list[onnx.NodeProto], x: Array, operator: str) -> None:
    """A NaN is the minimum for numpy, onnx.reference and polydyn, and not a number for ONNX Runtime."""
    info = helper.make_tensor_value_info
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    outputs = [onnx.ValueInfoProto(name="y")]
    graph = helper.make_graph(nodes, "g", [info("x", kind, list(x.shape))], outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=8)
    assert disputed_node(made, everything(made, {"x": x})) == operator


@pytest.mark.parametrize(
    ("node", "values", "is_open"),
    [
        (helper.make_node("GridSample", ["x", "g"], ["y"]), {"g": [[[[np.nan, 0]]]]}, True),
        (helper.make_node("GridSample", ["x", "g"], ["y"]), {"g": [[[[0.5, 0]]]]}, False),
        (helper.make_node("NegativeLogLikelihoodLoss", ["x", "g"], ["y"]), {"x": np.zeros((0, 3))}, True),
        (helper.make_node("GlobalMaxPool", ["x"], ["y"]), {"x": [[[np.nan, 1]]]}, True),
        (helper.make_node("GlobalMaxPool", ["x"], ["y"]), {}, False),
        (helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2]), {"x": [[[np.nan, 1]]]}, True),
        (helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2]), {"x": [[[np.inf, 1]]]}, False),
        (helper.make_node("Pow", ["x", "g"], ["y"]), {"x": [2**31 - 1], "g": [2], "y": [(2**31 - 1) ** 2]}, True),
        (helper.make_node("Pow", ["x", "g"], ["y"]), {"x": [3], "g": [2], "y": [9]}, False),
        (helper.make_node("ReduceMean", ["x"], ["y"]), {"x": [2**63 - 1, 8]}, True),
        (helper.make_node("ReduceMean", ["x"], ["y"]), {"x": [2**53, 8]}, False),
        (helper.make_node("ReduceSumSquare", ["x"], ["y"]), {"x": np.int32([46341])}, True),
        (helper.make_node("ReduceSumSquare", ["x"], ["y"]), {"x": np.int32([46340])}, False),
        (helper.make_node("ReduceL1", ["x"], ["y"]), {"x": np.int32([46341])}, False),
        (helper.make_node("Conv", ["x", "g"], ["y"]), {"x": np.float32([[[2e37, 1]]])}, True),
        (helper.make_node("Conv", ["x", "g"], ["y"]), {"x": np.float32([[[1e30, np.inf]]])}, False),
        (helper.make_node("MatMul", ["x", "g"], ["y"]), {"x": np.int32([[2**31 - 1]])}, False),
        (helper.make_node("QuantizeLinear", ["x", "g"], ["y"]), {"x": [np.nan], "y": np.int8([-128])}, True),
        (helper.make_node("QuantizeLinear", ["x", "g"], ["y"]), {"x": [np.inf], "y": np.int8([127])}, False),
        (helper.make_node("PRelu", ["x", "g"], ["y"]), {"y": np.zeros((1, 1, 2, 9))}, True),
        (helper.make_node("PRelu", ["x", "g"], ["y"]), {"y": np.zeros((1, 1, 2, 2))}, False),
        (helper.make_node("NegativeLogLikelihoodLoss", ["x", "g"], ["y"]), {}, False),
        (helper.make_node("NegativeLogLikelihoodLoss", ["x", "g"], ["y"], reduction="sum"),
         {"x": np.zeros((0, 3))}, False),
    ],
)  # fmt: skip
def test_what_onnx_leaves_open(node: onnx.NodeProto, values: dict[str, Any], is_open: bool) -> None:
    known = {"x": np.ones((1, 1, 2, 2), np.float32), "g": np.zeros(1), **{n: np.asarray(v) for n, v in values.items()}}
    assert open_question(node, known) == is_open


def test_a_rejected_call_that_stretches_an_axis_is_known_by_its_sizes() -> None:
    """The guard that both sizes are equal rejects a call in which one is 1 and ONNX Runtime broadcasts it."""
    graph = helper.make_graph([helper.make_node("Add", ["x", "z"], ["y"], name="sum")], "g", [], [])
    made, message = helper.make_model(graph), "Add sum broadcasts axis 1"
    for x, z, found in (((3, 1), (3, 2), True), ((3, 2), (3, 2), False), ((1, 2), (3, 2), False)):
        assert stretches(made, {"x": np.zeros(x), "z": np.zeros(z)}, message) == found
    assert not stretches(made, {"x": np.zeros((3, 1)), "z": np.zeros((3, 2))}, "Mul sum broadcasts axis 1")


def test_answers_are_compared_by_type() -> None:
    nan = np.array([np.nan, 1], np.float32)
    assert not difference({"y": nan}, {"y": nan.copy()})
    assert "differ" in difference({"y": np.array([np.nan, 2], np.float32)}, {"y": nan})
    assert "expected float32" in difference({"y": nan.astype(np.float64)}, {"y": nan})
    assert "differ" in difference({"y": np.array([1])}, {"y": np.array([2])})
    assert not difference({"y": np.float32([1.0001])}, {"y": np.float32([1])})
    assert difference({"y": np.array([1.0001])}, {"y": np.array([1.0])})

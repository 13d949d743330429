"""Convolutions of 3x3 taps as products of tiles (``polydyn/fusion/winograd.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from polydyn.backends.cuda import Cuda
from polydyn.checked import CheckedProgram
from polydyn.compiler import Options, plan_program
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.winograd import SUFFIX, pays
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.lowering.prologue import prove_prologue
from polydyn.program.assemble import build_program
from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import Array
from polydyn.schedules.index import ONE
from tests.support.marks import slow
from tests.support.tiny import model, node

RNG = np.random.default_rng(7)
F = "float32"
SHAPES = ((2, 5, 18), (1, 1, 1), (1, 2, 7), (0, 4, 4), (1, 6, 33))


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def two() -> onnx.ModelProto:
    """From planes to channels last and to planes again, the second with a bias and dilations."""
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b u c", "d", pads=[2, 3, 3, 4], dilations=[2, 3]),
        node("Relu", "d", "y"),
    ]
    constants = {"w": floats(88, 80, 3, 3) / 25, "u": floats(80, 88, 3, 3) / 25, "c": floats(80)}
    return model(nodes, {"x": (F, ["N", 80, "H", "W"])}, ["y"], constants)


def plan_of(m: onnx.ModelProto) -> FusionPlan:
    return fusion_plan(rewrite_graph(import_model(m)))


def products(plan: FusionPlan) -> list[str]:
    return [n.output for n in plan.graph.nodes if n.output.endswith(f"{SUFFIX}.sums")]


@pytest.mark.parametrize("target", [slow("cpu:avx512"), "cpu:avx2"])
def test_tiles_agree_with_the_sums_at_every_edge(target: str) -> None:
    """Odd and even sizes, one pixel, no batch; images in planes and channels last; two threads."""
    m = two()
    plan, graph = plan_program(m, target=target), import_model(m)
    assert "rows copied" in "\n".join(note for k in plan.kernels for note in k.notes)
    checked = [CheckedProgram(plan)] if target == "cpu:avx512" else []
    programs: list[Any] = [build_program(plan, threads=2), *checked]
    for n, h, w in SHAPES:
        feeds = {"x": floats(n, 80, h, w)}
        want = reference.evaluate(graph, feeds)["y"]
        for p in programs:
            np.testing.assert_allclose(p.run(feeds)["y"], want, 1e-4, 1e-5)


def test_a_convolution_is_a_copy_a_product_and_a_map_that_joins_what_follows() -> None:
    plan = plan_of(two())
    assert len(products(plan)) == 2
    (group,) = (g for g in plan.groups if g.nodes[0].output == products(plan)[1])
    assert group.prologue is not None and len(group.prologue.maps) == 1, "the elements of tiles are never in memory"
    assert not products(fusion_plan(rewrite_graph(import_model(two())), without=["winograd"]))
    assert not products(fusion_plan(rewrite_graph(import_model(two())), Cuda("cuda:sm_80", Options()).without))


OTHERS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((80, 80, 3, 3), {"strides": [1, 2]}),
    ((80, 80, 3, 3), {"dilations": [5, 1]}),
    ((160, 80, 3, 3), {"group": 2}),
    ((80, 80, 5, 3), {}),
    ((80, 80, 3), {}),
    ((16, 80, 3, 3), {}),
]


@pytest.mark.parametrize(("weight", "attributes"), OTHERS, ids=range(len(OTHERS)))
def test_other_convolutions_stay_what_they_are(weight: tuple[int, ...], attributes: dict[str, Any]) -> None:
    dims = ["N", weight[1] * attributes.get("group", 1), *"HW"[: len(weight) - 2]]
    m = model([node("Conv", "x w", "y", **attributes)], {"x": (F, dims)}, ["y"], {"w": floats(*weight)})
    assert not products(plan_of(m))


def test_what_a_pixel_moves_decides() -> None:
    assert pays(80, 80) and pays(512, 64) and not pays(64, 64) and not pays(512, 16) and not pays(3, 512)


def test_weights_of_the_caller_stay_a_convolution() -> None:
    m = model([node("Conv", "x w", "y")], {"x": (F, ["N", 80, "H", "W"]), "w": (F, [80, 80, 3, 3])}, ["y"])
    assert not products(plan_of(m))


def test_an_image_that_ends_before_its_last_tile_is_refused() -> None:
    plan = plan_of(two())
    (group,) = (g for g in plan.groups if g.nodes[0].output == products(plan)[0])
    assert group.prologue is not None and prove_prologue(plan, group) == ()
    image = next(t for m in group.prologue.maps for t in m.inputs)
    tensor = plan.graph.tensors[image]
    for axis in (1, 2):
        shape = tuple(e - ONE if a == axis else e for a, e in enumerate(tensor.shape))
        tensors = {**plan.graph.tensors, image: replace(tensor, shape=shape)}
        with pytest.raises(LegalityError):
            prove_prologue(replace(plan, graph=replace(plan.graph, tensors=tensors)), group)

"""3x3 convolutions as products of tiles (``polydyn/fusion/winograd.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from polydyn.backends.cuda import Cuda
from polydyn.checked import CheckedProgram
from polydyn.cli.machine import CompileSettings
from polydyn.compiler import Options, plan_program
from polydyn.errors import InputError, UnsupportedError
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.winograd import SIDE, SUFFIX, pays
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.lowering.prologue import prove_prologue
from polydyn.program.assemble import build_program
from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import Array
from polydyn.schedules.index import ONE
from polydyn.session import SessionOptions
from polydyn.testing.accuracy import error
from tests.support.marks import slow
from tests.support.tiny import model, node

RNG = np.random.default_rng(7)
F = "float32"
SHAPES = ((2, 5, 18), (1, 1, 1), (1, 2, 7), (0, 4, 4), (1, 6, 33))


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def two(dilations: tuple[int, int] = (2, 3)) -> onnx.ModelProto:
    """Build one from planes to channels-last and one back to planes, the second with a bias and dilations."""
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b u c", "d", pads=[2, 3, 3, 4], dilations=[*dilations]),
        node("Relu", "d", "y"),
    ]
    constants = {"w": floats(88, 80, 3, 3) / 25, "u": floats(80, 88, 3, 3) / 25, "c": floats(80)}
    return model(nodes, {"x": (F, ["N", 80, "H", "W"])}, ["y"], constants)


def plan_of(m: onnx.ModelProto, side: int = SIDE) -> FusionPlan:
    return fusion_plan(rewrite_graph(import_model(m)), side=side)


def products(plan: FusionPlan) -> list[str]:
    return [n.output for n in plan.graph.nodes if n.output.endswith(f"{SUFFIX}.sums")]


@pytest.mark.parametrize(("target", "side"), [slow("cpu:avx512", 2), ("cpu:avx2", 2), ("cpu:avx512", 4)])
def test_tiles_agree_with_the_sums_at_every_edge(target: str, side: int) -> None:
    """Odd and even sizes, one pixel, no batch; images in planes and channels-last; two threads."""
    m = two((2, 3) if side == 2 else (2, 1))
    plan, graph = plan_program(m, target=target, options=Options(winograd=side)), import_model(m)
    assert "rows copied" in "\n".join(note for k in plan.kernels for note in k.notes)
    checked = [CheckedProgram(plan)] if (target, side) == ("cpu:avx512", 2) else []
    programs: list[Any] = [build_program(plan, threads=2), *checked]
    for n, h, w in SHAPES:
        feeds = {"x": floats(n, 80, h, w)}
        want = reference.evaluate(graph, feeds)["y"]
        for p in programs:
            np.testing.assert_allclose(p.run(feeds)["y"], want, 1e-4, {2: 1e-5, 4: 4e-5}[side])


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
    gains = {2: [(64, 64), (512, 64), (512, 512)], 4: [(48, 48), (512, 16), (192, 192)]}
    does_not = {2: [(48, 48), (512, 16), (3, 512)], 4: [(24, 24), (3, 512), (256, 256)]}
    for side in gains:
        assert all(pays(*x, side) for x in gains[side]) and not any(pays(*x, side) for x in does_not[side])


def test_larger_tiles_are_made_where_they_fit_and_a_wrong_entry_shows() -> None:
    """48 channels gain only with them; a dilation of 3 is too far apart, 256 to 256 channels have too many weights."""
    shapes = [(48, 48), (80, 80), (256, 256)]
    layers = [((o, c, 3, 3), d) for c, o in shapes for d in (1, 3)]
    sides = []
    for weight, d in layers:
        case = node("Conv", "x w", "y", dilations=[1, d])
        plan = plan_of(model([case], {"x": (F, ["N", weight[1], "H", "W"])}, ["y"], {"w": floats(*weight)}), 4)
        sides.append([plan.graph.tensors[p].shape[-2].constant for p in products(plan)])
    assert sides == [[6], [], [6], [4], [4], [4]]
    m = model([node("Conv", "x w", "y")], {"x": (F, [1, 48, 7, 9])}, ["y"], {"w": floats(48, 48, 3, 3)})
    graph, feeds = plan_of(m, 4).graph, {"x": floats(1, 48, 7, 9)}
    want = reference.evaluate(import_model(m), feeds)
    assert error(reference.evaluate(graph, feeds), want) < 5e-6
    tables = [t for t in graph.constants if t.startswith(SUFFIX)]
    assert len(tables) == 2
    for t in tables:
        factors = (graph.constants[t] != 1).any(0)  # a column of ones needs no multiplication
        for at in np.argwhere(np.broadcast_to(factors, graph.constants[t].shape)):
            wrong = graph.constants[t].copy()
            wrong[tuple(at)] += 1e-2
            other = replace(graph, constants={**graph.constants, t: wrong})
            assert error(reference.evaluate(other, feeds), want) > 1e-4


@pytest.mark.parametrize("options", [{"winograd": 3}, {"winograd": 4, "precision": "bf16"}])
def test_other_sizes_of_tiles_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="Winograd tiles of"):
        Options(**options)
    with pytest.raises(UnsupportedError, match="winograd 4 on cuda"):
        Cuda("cuda:sm_80", Options(winograd=4))


def test_everywhere_that_takes_options() -> None:
    said = SessionOptions()
    said.add_session_config_entry("polydyn.winograd", "4")
    assert said.arguments("cpu", {}).options == Options(winograd=4) == CompileSettings(winograd=4).options
    said.add_session_config_entry("polydyn.winograd", "four")
    with pytest.raises(InputError, match="winograd is 'four'"):
        said.arguments("cpu", {})


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

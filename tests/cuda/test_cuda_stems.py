"""First convolutions of images on CUDA: few channels in planes, filters whose steps are no whole vectors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering import contract
from polydyn.lowering.place import Placed
from tests.support.cuda_groups import Arrays, placed, plan_of, run

node = helper.make_node
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
STEMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "7x7": ((64, 3, 7, 7), {"pads": [3, 3, 3, 3], "strides": [2, 2]}),
    "3x3, 10 filters": ((10, 3, 3, 3), {"pads": [1, 0, 1, 2], "strides": [2, 1], "dilations": [1, 2]}),
    "3x3, two filters": ((2, 5, 3, 3), {"pads": [1, 1, 1, 1]}),
    "in groups": ((36, 3, 3, 3), {"pads": [1, 1, 1, 1], "group": 2}),
}
"""Filters and attributes; 147, 27, 45 and 27 steps are no whole vectors of 16 bits."""
SIZES = ((2, 31, 17), (1, 1, 1), (3, 8, 23), (0, 5, 7))
"""Images, lines and columns."""
SIZED = [(name, sizes) for name in STEMS for sizes in SIZES if name != "3x3, 10 filters" or sizes[2] > 4]
"""Both, where an image with its padding holds a window."""


def stem(name: str, dtype: str) -> tuple[FusionPlan, Array, dict[str, Any]]:
    """A convolution of planes, its filters and attributes."""
    shape, attributes = STEMS[name]
    w = (RNG.standard_normal(shape) / 4).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    inputs = {"x": ("B", shape[1] * attributes.get("group", 1), "H", "W")}
    return plan_of([node("Conv", ["x", "w"], ["y"], **attributes)], inputs, ["y"], {"w": w}, dtype), w, attributes


Made = dict[str, tuple[FusionPlan, Array, dict[str, Any], tuple[Placed, ...], tuple[Placed, ...]]]


@pytest.fixture(scope="module")
def made() -> Made:
    """Every stem in float16: its kernels, and those with filters as they are stored."""
    found: Made = {}
    for name in STEMS:
        plan, w, attributes = stem(name, "float16")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contract._Builder, "_wanted", lambda self, v: 0)
            before = placed(plan)
        found[name] = plan, w, attributes, placed(plan), before
    return found


def image(made: Made, name: str, sizes: tuple[int, int, int]) -> Arrays:
    channels = int(made[name][0].graph.tensors["x"].shape[1])
    return {"x": RNG.standard_normal((sizes[0], channels, *sizes[1:])).astype(np.float16)}


def by_hand(x: Array, w: Array, attributes: dict[str, Any]) -> Array:
    """In float64."""
    p, (s, t), (d, e) = attributes["pads"], *(attributes.get(n, [1, 1]) for n in ("strides", "dilations"))
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (p[0], p[2]), (p[1], p[3])))
    lines, columns = (d * (w.shape[2] - 1) + 1, e * (w.shape[3] - 1) + 1)
    every = np.lib.stride_tricks.sliding_window_view(x, (lines, columns), (2, 3))[:, :, ::s, ::t, ::d, ::e]
    groups = attributes.get("group", 1)
    parts = zip(np.split(every, groups, 1), np.split(w.astype(np.float64), groups), strict=True)
    return np.concatenate([np.einsum("bchwij,ocij->bohw", a, b) for a, b in parts], 1)


def test_filters_come_by_16_bytes(made: Made) -> None:
    """Along filters, whose number is filled up to whole vectors; as they are stored they came by 2 bytes."""
    for name, (*_, now, before) in made.items():
        (p,), (other,) = now, before
        (pack,) = p.lowered.packs.values()
        filters = STEMS[name][0][0] // STEMS[name][1].get("group", 1)
        assert pack.shape[-1] == -(-filters // 8) * 8 and pack.shape[-1 - len(pack.reduction) - 1] == 1
        versions = [k.version for k in p.kernels if k.version.startswith("mma")]
        assert versions and all("_2_16" in v for v in versions), versions
        assert (
            all("_2_2" in k.version for k in other.kernels if k.version.startswith("mma")) and not other.lowered.packs
        )


@pytest.mark.parametrize(("name", "sizes"), SIZED)
def test_stems_have_the_same_bits(name: str, sizes: tuple[int, int, int], made: Made) -> None:
    """What is summed, and in which order, does not depend on where filters lie."""
    plan, w, attributes, now, before = made[name]
    feeds = image(made, name, sizes)
    (got, counts), (other, _) = (run(plan, feeds, kernels=k) for k in (now, before))
    want = by_hand(feeds["x"], w, attributes)
    np.testing.assert_array_equal(got["y"].view(np.uint16), other["y"].view(np.uint16))
    assert got["y"].shape == want.shape
    assert np.abs(got["y"] - want).max(initial=0) <= 2e-3 * max(1.0, np.abs(want).max(initial=0))
    assert not any(c.ldmatrix_conflicts for c in counts)


def test_filters_that_lie_well_stay_as_they_are() -> None:
    """float32, which is copied by 4 bytes at least, and steps that are whole vectors."""
    w = RNG.standard_normal((8, 3, 3, 3))
    for dtype, filters in (("float32", w), ("float16", np.concatenate([w] * 8, 1))):
        inputs = {"x": ("B", filters.shape[1], "H", "W")}
        (p,) = placed(plan_of([node("Conv", ["x", "w"], ["y"])], inputs, ["y"], {"w": filters.astype(dtype)}, dtype))
        assert not any(pack.width > 1 for pack in p.lowered.packs.values())


def test_stems_of_bfloat16() -> None:
    plan, w, attributes = stem("3x3, 10 filters", "bfloat16")
    x = RNG.standard_normal((2, 3, 9, 11)).astype(ml_dtypes.bfloat16)
    got, _ = run(plan, {"x": x})
    want = by_hand(x, w, attributes)
    assert np.abs(got["y"].astype(np.float64) - want).max() <= 1e-2 * np.abs(want).max()

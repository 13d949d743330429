"""First convolutions of images on CUDA: few channels in planes, filters whose steps are not whole vectors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.errors import DeviceError
from polydyn.lowering import contract
from polydyn.lowering.place import PlacedGroup
from tests.support.cuda_groups import Arrays, placed, plan_of, run, version, with_bugs

node = helper.make_node
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
STEMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "7x7": ((64, 3, 7, 7), {"pads": [3, 3, 3, 3], "strides": [2, 2]}),
    "3x3, 10 filters": ((10, 3, 3, 3), {"pads": [1, 0, 1, 2], "strides": [2, 1], "dilations": [1, 2]}),
    "3x3, two filters": ((2, 5, 3, 3), {"pads": [1, 1, 1, 1]}),
    "in groups": ((36, 3, 3, 3), {"pads": [1, 1, 1, 1], "group": 2}),
    "many steps": ((24, 9, 7, 7), {"pads": [3, 2, 3, 4]}),
}
"""Filters and attributes; 147, 27, 45, 27 and 441 steps are not whole vectors of 16 bits."""
SIZES = ((2, 31, 17), (1, 1, 1), (3, 8, 23), (0, 5, 7))
"""Images, rows and columns."""
STEMS_AND_SIZES = [(name, sizes) for name in STEMS for sizes in SIZES if name != "3x3, 10 filters" or sizes[2] > 4]
"""Stems and sizes for which a padded image holds a window."""
FULL_ROW, HALF_ROW = "mma_128x64x32_4_2_16", "mma_64x64x32_4_2_16"
"""Versions: a thread copies the elements of a separate row; two threads share a row."""


def stem(name: str, dtype: str) -> tuple[FusionPlan, Array]:
    """Plan a convolution of planes, and return its filters."""
    shape, attributes = STEMS[name]
    w = (RNG.standard_normal(shape) / 4).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    inputs = {"x": ("B", shape[1] * attributes.get("group", 1), "H", "W")}
    return plan_of([node("Conv", ["x", "w"], ["y"], **attributes)], inputs, ["y"], {"w": w}, dtype), w


def right(name: str, x: Array, w: Array) -> Array:
    """Return ONNX Runtime's result, in float32."""
    x, w = x.astype(np.float32), w.astype(np.float32)
    infos = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * 4) for n in "xy")
    graph = helper.make_graph([node("Conv", ["x", "w"], ["y"], **STEMS[name][1])], "g", [next(infos)], [next(infos)],
                              [numpy_helper.from_array(w, "w")])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


Made = dict[str, tuple[FusionPlan, Array, tuple[PlacedGroup, ...], tuple[PlacedGroup, ...]]]


@pytest.fixture(scope="module")
def stem_kernels() -> Made:
    """Return every stem in float16: its kernels, and kernels with unchanged filters."""
    found: Made = {}
    for name in STEMS:
        plan, w = stem(name, "float16")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contract._Builder, "_panel_columns", lambda self, v: 0)
            before = placed(plan)
        found[name] = plan, w, placed(plan), before
    return found


def image(stem_kernels: Made, name: str, sizes: tuple[int, int, int]) -> Arrays:
    channels = int(stem_kernels[name][0].graph.tensors["x"].shape[1])
    return {"x": RNG.standard_normal((sizes[0], channels, *sizes[1:])).astype(np.float16)}


def test_filters_come_by_16_bytes(stem_kernels: Made) -> None:
    """Filters are copied along K, whose size is padded to whole vectors; unchanged filters need 2-byte copies."""
    for name, (*_, now, before) in stem_kernels.items():
        (p,), (other,) = now, before
        (pack,) = p.lowered.packs.values()
        filters = STEMS[name][0][0] // STEMS[name][1].get("group", 1)
        assert pack.shape[-1] == -(-filters // 8) * 8 and pack.shape[-2 - len(pack.reduction)] == 1
        for k in p.kernels:
            assert "mma" not in k.version or "_2_16" in k.version, k.version
        assert not other.lowered.packs
        assert all("_2_2" in k.version for k in other.kernels if "mma" in k.version)


def of_version(p: PlacedGroup, env: dict[str, int], word: str) -> Kernel:
    return version(p, word)


@pytest.mark.parametrize(("name", "sizes"), STEMS_AND_SIZES)
def test_stems_have_the_same_bits(name: str, sizes: tuple[int, int, int], stem_kernels: Made) -> None:
    """The order of the sum depends neither on the layout of filters nor on the thread that copies an element."""
    plan, w, now, before = stem_kernels[name]
    feeds = image(stem_kernels, name, sizes)
    want, (other, _) = right(name, feeds["x"], w), run(plan, feeds, kernels=before)
    for word in (FULL_ROW, HALF_ROW):
        got, counts = run(plan, feeds, partial(of_version, word=word), now, reverse=word == HALF_ROW)
        np.testing.assert_array_equal(got["y"].view(np.uint16), other["y"].view(np.uint16))
        assert got["y"].shape == want.shape
        assert np.abs(got["y"] - want).max(initial=0) <= 2e-3 * max(1.0, np.abs(want).max(initial=0))
        assert not any(c.ldmatrix_conflicts or c.shared_conflicts for c in counts)


def test_a_thread_copies_a_row_at_steps_that_all_share(stem_kernels: Made) -> None:
    """So taps are numbers if the steps are few: no thread divides them by the size of a window."""
    for name, (_, _, (p,), _) in stem_kernels.items():
        mine, others = (version(p, word) for word in (FULL_ROW, HALF_ROW))
        copies, shared = ([x for x in k.text.splitlines() if "pd_sts<pd_half>" in x] for k in (mine, others))
        assert copies and not any("tid/" in x for x in copies) and all("tid/64" in x for x in shared)
        assert ("int32_t b_k" in mine.text) == (name == "many steps"), "all steps are written out where they are few"
        assert mine.device.work and others.device.work
        assert mine.device.work.instructions < others.device.work.instructions, "a block of twice the rows"


BUGS = {
    "a line below the image": ("< (uint32_t)n3", "< (uint32_t)(n3 + 1)"),
    "a step is left out": ("(-1)*u + 147", "(-1)*u + 31"),
    "the next row": ("(int)u, (int)tid", "(int)u, (int)((tid+1)%128)"),
    "the next step": ("(int)u, (int)tid", "(int)((u+1)%32), (int)tid"),
    "the filters of another step": ("8*tid + 1024*u", "8*tid + 1024*u + 64"),
}


def test_wrong_copies_are_seen(stem_kernels: Made) -> None:
    plan, w, (p,), _ = stem_kernels["7x7"]
    bugs = with_bugs(version(p, FULL_ROW), BUGS)
    broken = replace(p, kernels=bugs)
    feeds = image(stem_kernels, "7x7", (1, 12, 15))
    want = right("7x7", feeds["x"], w)
    for k in bugs:
        try:
            got, _ = run(plan, feeds, partial(of_version, word=k.version), (broken,))
            assert not np.abs(got["y"] - want).max() <= 2e-3 * np.abs(want).max(), k.version
        except DeviceError:
            pass


def test_filters_that_lie_well_stay_as_they_are() -> None:
    """float32, which is copied by 4 bytes at least, and steps that are whole vectors."""
    w = RNG.standard_normal((8, 3, 3, 3))
    for dtype, filters in (("float32", w), ("float16", np.concatenate([w] * 8, 1))):
        inputs = {"x": ("B", filters.shape[1], "H", "W")}
        (p,) = placed(plan_of([node("Conv", ["x", "w"], ["y"])], inputs, ["y"], {"w": filters.astype(dtype)}, dtype))
        assert not any(pack.width > 1 for pack in p.lowered.packs.values())


def test_computed_rows_and_wide_tiles_share_their_copies() -> None:
    """A row per thread needs registers for all loads of a tile: tiles of 128 sums per thread and computed rows have
    none.
    """
    x = node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    w = RNG.standard_normal((128, 3, 3, 3)).astype(np.float16)
    (p,) = placed(plan_of([x], {"x": ("B", 3, "H", "W")}, ["y"], {"w": w}, "float16"))
    assert "tid/" in version(p, "mma_128x128x32_4_2_16").text and not any("128x64" in k.version for k in p.kernels)
    nodes = [node("Relu", ["a"], ["x"]), x]
    (p,) = placed(plan_of(nodes, {"a": ("B", 3, "H", "W")}, ["y"], {"w": w[:64]}, "float16"))
    assert not any("128x64" in k.version for k in p.kernels) and "pd_max" in p.kernels[0].text


def test_stems_of_bfloat16() -> None:
    plan, w = stem("3x3, 10 filters", "bfloat16")
    x = RNG.standard_normal((2, 3, 9, 11)).astype(ml_dtypes.bfloat16)
    got, _ = run(plan, {"x": x})
    want = right("3x3, 10 filters", x, w)
    assert np.abs(got["y"].astype(np.float64) - want).max() <= 1e-2 * np.abs(want).max()

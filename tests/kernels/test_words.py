"""Products of bytes four at a time (VNNI): exact for every dtype, zero point and number of steps.

Wide vectors and narrow ones. A machine without the instruction runs its plain C form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydyn.backends import cpu
from polydyn.build.features import machine_features
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.lowering.group import Pack
from polydyn.lowering.pack import pack
from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import OPS, Array
from polydyn.schedules.index import Index
from tests.support.marks import slow
from tests.support.quantized import Qdq, quantized_model, random_bytes, same_as_reference
from tests.support.tiny import node

WIDE = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}
PROCESSORS = [{"avx_vnni"}, *([WIDE] if "avx512bw" in machine_features() else [])]
RNG = np.random.default_rng(5)
ROWS = (0, 1, 9)


@pytest.fixture(params=PROCESSORS, ids=lambda f: "wide" if f is WIDE else "narrow")
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "machine_features", lambda: frozenset(request.param))
    yield


def byte(dtype: str, *shape: int) -> Array:
    return random_bytes(RNG, dtype, *shape)


def products(plan: HostPlan) -> str:
    """Return the texts of all kernels."""
    return "".join(k.text for k in plan.kernels)


@pytest.mark.parametrize("dtype", ["uint8", slow("int8")])
def test_products_of_bytes(processor: None, dtype: str) -> None:
    """A zero point passed at run time; steps that fill their words and steps that do not; the ends of all dtypes."""
    for k, n in ((68, 50), (71, 5)):
        inputs: Any = {"a": (dtype, ["M", k]), "za": (dtype, [])}
        m = quantized_model([node("MatMulInteger", "a b za", "y")], inputs, ["y"], b=byte("int8", k, n))
        ends = np.iinfo(dtype)
        feeds = [{"a": byte(dtype, r, k), "za": byte(dtype)} for r in ROWS]
        feeds += [
            {"a": np.full((3, k), e, dtype), "za": np.array(z, dtype)}
            for e, z in ((ends.max, ends.min), (ends.min, ends.max))
        ]
        plan = same_as_reference(m, *feeds)
        assert [launch.kind for launch in plan.launches] == ["contract"], "the zero point is an epilogue"
        assert "pd_dot4_add" in products(plan)
        notes = [note for kernel in plan.kernels for note in kernel.notes]
        assert not any("element by element" in note for note in notes)
        whole = dtype == "uint8" and k % 4 == 0
        assert any("rows copied" in note for note in notes) != whole, "whole words are read where they lie"
        checked = CheckedProgram(plan).run(feeds[2])["y"]
        np.testing.assert_array_equal(checked, reference.evaluate(import_model(m), feeds[2])["y"])


def test_weights_that_no_cache_holds_are_one_stream(processor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are as wide as a register tile; the last one is partial."""
    monkeypatch.setattr(cpu, "with_system_cache", lambda core: replace(core, l2=1 << 12))
    k, n = 70, 100
    inputs: Any = {"a": ("uint8", ["M", k]), "za": ("uint8", [])}
    m = quantized_model([node("MatMulInteger", "a b za", "y")], inputs, ["y"], b=byte("int8", k, n))
    plan = same_as_reference(m, *({"a": byte("uint8", r, k), "za": byte("uint8")} for r in (0, 1, 8, 9)))
    panels = {a.shape for a in plan.constants.values() if a.ndim > 2}
    assert panels in ({(3, 18, 3, 16)}, {(7, 18, 2, 8)})
    assert "pd_prefetch_i32" in products(plan)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_columns_of_any_zero_point_are_moved_and_rows_summed(processor: None, dtype: str) -> None:
    """uint8 weights around 3 become signed bytes after subtracting 125; also with batches of rows."""
    constants = {"b": byte("uint8", 40, 20), "zb": np.uint8(3)}
    inputs: Any = {"a": (dtype, ["B", "M", 40]), "za": (dtype, [])}
    m = quantized_model([node("MatMulInteger", "a b za zb", "y")], inputs, ["y"], **constants)
    ends = np.iinfo(dtype)
    plan = same_as_reference(m, *({"a": byte(dtype, 2, r, 40), "za": np.array(ends.max, dtype)} for r in (0, 1, 9)))
    assert "pd_dot4_add" in products(plan) and "pd_dot2_add" not in products(plan)


def test_columns_that_are_no_bytes_are_taken_in_pairs(processor: None) -> None:
    constants = {"b": byte("uint8", 40, 9), "zb": np.linspace(0, 255, 9).astype(np.uint8)}
    m = quantized_model([node("MatMulInteger", "a b za zb", "y")], {"a": ("uint8", ["M", 40]), "za": ("uint8", [])},
                        ["y"], **constants)  # fmt: skip
    plan = same_as_reference(m, {"a": byte("uint8", 7, 40), "za": np.uint8(255)})
    assert "pd_dot2_add" in products(plan) and "pd_dot4_add" not in products(plan)


def test_a_padding_holds_the_zero_point(processor: None) -> None:
    """Taps of 3 channels are partial words; rows outside of the image are zero points, which are hoisted out of the
    sum.
    """
    inputs: Any = {"x": ("uint8", ["N", 3, "H", "W"]), "z": ("uint8", [])}
    first = node("ConvInteger", "x w z", "y", pads=[1, 1, 1, 1], strides=[2, 2])
    m = quantized_model([first], inputs, ["y"], w=byte("int8", 18, 3, 3, 3))
    feeds = [{"x": byte("uint8", n, 3, h, w), "z": byte("uint8")} for n, h, w in ((2, 7, 9), (1, 1, 1), (0, 4, 4))]
    plan = same_as_reference(m, *feeds)
    assert "pd_dot4_add" in products(plan)
    assert any("footprint copied" in note for kernel in plan.kernels for note in kernel.notes)
    checked = CheckedProgram(plan).run(feeds[0])["y"]
    np.testing.assert_array_equal(checked, reference.evaluate(import_model(m), feeds[0])["y"])


def test_a_layer_of_signed_activations_quantizes_in_the_copy(processor: None) -> None:
    """QDQ with activations of int8: rows are quantized and moved by 128 in their copy."""
    q = Qdq()
    x = q.step("x", 0.03, np.int8(-7))
    w = q.weight(byte("int8", 40, 20), q.rng.random(20) / 300 + 1e-3)
    m = q.model({"x": ("float32", ["M", 40])}, q.step(q.add("Relu", q.add("MatMul", x, w)), 0.05))
    plan = plan_program(m)
    assert [launch.kind for launch in plan.launches] == ["contract"]
    assert "pd_dot4_add" in products(plan)


def test_words_hold_their_steps_from_the_lowest_bits_on() -> None:
    """Panels of five steps and three columns: the second word is partial; and products of words are exact."""
    source = RNG.integers(-128, 128, (5, 3)).astype(np.int32)
    k, n = Index.of("k"), Index.of("n")
    panels = pack(Pack("w", (), ("n", 3), (("k", 5),), k * 3 + n, 4, 4), {"w": source})
    assert panels.shape == (1, 2, 4) and panels.dtype == np.int32
    parts = panels.view(np.int8).reshape(1, 2, 4, 4)
    np.testing.assert_array_equal(parts[0, :, :3].transpose(0, 2, 1).reshape(8, 3)[:5], source)
    assert not parts[0, 1, :, 1:].any() and not parts[0, :, 3].any()
    rows = RNG.integers(0, 256, (4, 7))
    word = OPS["quad"].numpy(*rows)
    columns = OPS["quad"].numpy(*source[:4, :1])
    np.testing.assert_array_equal(OPS["dot4"].numpy(word, columns), rows.T @ source[:4, 0])

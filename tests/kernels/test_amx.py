"""Products in tiles of the matrix unit (AMX): disassembled, and emulated strictly; on the unit itself if it is here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import polydyn
from polydyn import Options
from polydyn.backends import cpu
from polydyn.build.features import machine_features
from polydyn.checked import CheckedProgram, CheckError
from polydyn.compiler import plan_program
from polydyn.errors import BuildError, PolydynError, UnsupportedError
from polydyn.program.assemble import build_artifact, build_program
from polydyn.program.plan import HostPlan
from polydyn.runtime.native import Native
from tests.support.quantized import quantized_model
from tests.support.tiny import node

pytestmark = pytest.mark.skipif("avx512bw" not in machine_features(), reason="the emulation is for AVX-512")
AMX_TARGET = "cpu:amx-emulated"
RNG = np.random.default_rng(7)
Inputs: TypeAlias = dict[str, np.ndarray]
W, B = RNG.standard_normal((96, 50)).astype(np.float32), RNG.standard_normal(50).astype(np.float32)
FILTERS = RNG.standard_normal((24, 32, 1, 1)).astype(np.float32)
IN_PLACE_BYTES, COPIED_BYTES = (RNG.integers(-128, 128, s).astype(np.int8) for s in ((128, 40), (40, 9)))


def products(rows: str | int = "M") -> onnx.ModelProto:
    """Build a layer of float32, bytes that are read in place, bytes that are copied, planes of an image."""
    nodes = [
        node("MatMul", "x w", "t"), node("Add", "t b", "u"), node("Relu", "u", "f"), node("MatMulInteger", "a p", "g"),
        node("MatMulInteger", "c q", "h"), node("Conv", "i v", "k"),
    ]  # fmt: skip
    inputs: Any = {"x": ("float32", ["N", rows, 96]), "a": ("uint8", [rows, 128]), "c": ("int8", [rows, 40]),
                   "i": ("float32", ["N", 32, rows, 1])}  # fmt: skip
    return quantized_model(nodes, inputs, ["f", "g", "h", "k"], w=W, b=B, p=IN_PLACE_BYTES, q=COPIED_BYTES, v=FILTERS)


def feeds(rows: int, batch: int = 1) -> dict[str, np.ndarray]:
    x = RNG.standard_normal((batch, rows, 96)).astype(np.float32)
    return {"x": x, "a": RNG.integers(0, 256, (rows, 128)).astype(np.uint8),
            "c": RNG.integers(-128, 128, (rows, 40)).astype(np.int8),
            "i": RNG.standard_normal((batch, 32, rows, 1)).astype(np.float32)}  # fmt: skip


def check(got: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> None:
    x, w, i, v = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in (inputs["x"], W, inputs["i"], FILTERS))
    np.testing.assert_allclose(got["f"], np.maximum(x @ w + B, 0), 1e-5, 1e-4)
    np.testing.assert_allclose(got["k"], np.einsum("nchw,oc->nohw", i, v[..., 0, 0]), 1e-5, 1e-4)
    np.testing.assert_array_equal(got["g"], inputs["a"].astype(np.int32) @ IN_PLACE_BYTES.astype(np.int32))
    np.testing.assert_array_equal(got["h"], inputs["c"].astype(np.int32) @ COPIED_BYTES.astype(np.int32))


@pytest.fixture(scope="module")
def plan() -> HostPlan:
    return plan_program(products(), target=AMX_TARGET, options=Options(precision="bf16"))


def test_products_at_sizes_around_the_tiles(plan: HostPlan) -> None:
    assert sum(k.amx for k in plan.kernels) == 4
    program = build_program(plan, target=AMX_TARGET, threads=2)
    for rows, batch in ((0, 1), (1, 3), (15, 1), (16, 1), (17, 1), (11, 3), (33, 2), (64, 1), (100, 0)):
        given = feeds(rows, batch)
        check(program.run(given), given)


def test_few_rows_are_tiles_too(plan: HostPlan) -> None:
    for launch in plan.launches:
        assert "tiles of the matrix unit (AMX)" in launch.reasons
        assert all(k.amx for k in plan.kernels if k.name in {c.kernel for c in launch.candidates})


def test_every_access_of_a_tile_is_in_bounds_and_what_was_written(plan: HostPlan) -> None:
    checked = CheckedProgram(plan)
    for rows in (3, 16, 17, 45):
        given = feeds(rows)
        check(checked.run(given), given)


WINDOWS = {
    "3x3": (32, 48, 3, 1, 1), "strided": (64, 40, 3, 2, 1), "dilated": (32, 16, 3, 1, 2),
    "narrow words": (24, 40, 5, 1, 1),
}  # fmt: skip
"""Convolutions: channels, results, taps along a side, stride, dilation."""
IMAGES = ((1, 7, 7), (2, 14, 9), (1, 5, 17), (1, 3, 40), (3, 2, 1), (2, 1, 16), (0, 4, 4))
"""Images around the tiles: lines of fewer pixels than a tile has rows, of as many, of more."""


def window(name: str) -> onnx.ModelProto:
    """Build a convolution between products, so that its image has channels last."""
    channels, results, taps, stride, dilation = WINDOWS[name]
    rng = np.random.default_rng(3)
    ones = np.eye(channels)[rng.permutation(channels)][..., None, None]
    few = rng.integers(-1, 2, (results, channels, taps, taps)) * (rng.random((results, channels, taps, taps)) < 0.05)
    last = rng.integers(-1, 2, (32, results, 1, 1))
    ws = {n: w.astype(np.float32) for n, w in (("a", ones), ("b", few), ("c", last))}
    pads = [dilation * (taps // 2)] * 4
    nodes = [
        node("Conv", "x a", "t"), node("Conv", "t b", "u", pads=pads, strides=[stride] * 2, dilations=[dilation] * 2),
        node("Relu", "u", "v"), node("Conv", "v c", "y"),
    ]  # fmt: skip
    return quantized_model(nodes, {"x": ("float32", ["N", channels, "H", "W"])}, ["y"], **ws)


def check_window(name: str, run: Callable[[Inputs], Inputs], images: Iterable[tuple[int, int, int]]) -> None:
    """Compare a program with ONNX Runtime: all numbers are integers that bfloat16 has."""
    m = window(name)
    exact, channels = onnxruntime.InferenceSession(m.SerializeToString()), WINDOWS[name][0]
    for n, height, width in images:
        x = RNG.integers(-3, 4, (n, channels, height, width)).astype(np.float32)
        got = run({"x": x})["y"]
        assert got.shape[:2] == (n, 32)
        if n:
            np.testing.assert_array_equal(got, exact.run(None, {"x": x})[0], f"{name} at {n, height, width}")


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_at_images_around_the_tiles(name: str) -> None:
    plan = plan_program(window(name), target=AMX_TARGET, options=Options(precision="bf16"))
    assert all(k.amx for k in plan.kernels), [k.name for k in plan.kernels]
    check_window(name, build_program(plan, target=AMX_TARGET, threads=2).run, IMAGES)


@pytest.mark.parametrize("name", ["strided", "narrow words"])
def test_every_access_of_a_window_s_tile_is_in_bounds_and_what_was_written(name: str) -> None:
    plan = plan_program(window(name), target=AMX_TARGET, options=Options(precision="bf16"))
    check_window(name, CheckedProgram(plan).run, IMAGES[2:5])


@pytest.mark.skipif("amx_tile" not in machine_features(), reason="the processor has no matrix unit")
def test_the_unit_and_its_emulation_agree() -> None:
    given = feeds(45)
    rounded = Options(precision="bf16")
    real, emulated = (
        polydyn.compile(products(), target=t, options=rounded).run(given) for t in ("cpu:amx", AMX_TARGET)
    )
    for name in real:
        np.testing.assert_allclose(real[name], emulated[name], 1e-6, 1e-5)


FAULTS = {
    "no shapes": (r"pd_amx_begin\(.*\);", "", "none has a shape"),
    "shapes that stay": (r"pd_amx_end\(\);", "", "were not released"),
    "one tile as both operands": (r"add_bf16\(0, 4, 6\)", "add_bf16(0, 4, 4)", "not three"),
    "other shapes": (r"pd_amx_load\(7,", "pd_amx_begin(16, 8); pd_amx_load(7,", "loaded over others"),
    "rows behind the last": (r"load\(5, rows, (.*?), 64,", r"load(5, rows, \1 + 12 * 64, 64,", "never written"),
    "tiles without rows": (r"pd_amx_begin\(tile_rows", "pd_amx_begin(0", "only one of the two"),
}
"""Changes of the text, and the expected messages."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_finds_what_the_unit_refuses(fault: str) -> None:
    pattern, new, said = FAULTS[fault]
    m = quantized_model([node("MatMul", "x w", "y")], {"x": ("float32", [40, 32])}, ["y"], w=W[:32, :32])
    small = plan_program(m, target=AMX_TARGET, options=Options(precision="bf16"))
    matrix = [replace(k, text=re.sub(pattern, new, k.text)) if k.amx else k for k in small.kernels]
    assert [k.text for k in matrix] != [k.text for k in small.kernels]
    with pytest.raises(CheckError, match=said):
        CheckedProgram(replace(small, kernels=tuple(matrix))).run({"x": feeds(40)["x"][0, :, :32]})


def test_the_instructions_are_the_unit_s_and_a_process_without_permission_is_refused(tmp_path: Path) -> None:
    plan = plan_program(products(40), target="cpu:amx", options=Options(precision="bf16"))
    artifact, _ = build_artifact(plan, "cpu:amx")
    assert set(artifact.manifest["features"]) >= cpu.UNIT
    if shutil.which("objdump"):
        (tmp_path / "lib.so").write_bytes(artifact.library)
        text = subprocess.run(["objdump", "-d", tmp_path / "lib.so"], capture_output=True, text=True, check=True).stdout
        for name in ("ldtilecfg", "tileloadd", "tilezero", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"):
            assert name in text, name
    if "amx_tile" not in machine_features():
        with pytest.raises(PolydynError, match="refuses this process the matrix unit"):
            Native(artifact)
        with pytest.raises(UnsupportedError, match="features that are missing here: amx_"):
            polydyn.compile(products(40), target="cpu:amx")


def test_this_machine_s_target_takes_the_unit_where_compiler_and_processor_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
    monkeypatch.setattr(cpu, "machine_features", lambda: frozenset(wide | cpu.UNIT))
    for known, unit in ((wide | cpu.UNIT, True), (wide, False)):
        monkeypatch.setattr(cpu, "required_features", lambda *_, known=known: tuple(known))
        assert cpu.cpu_target("cpu").amx == unit

    def missing() -> None:
        raise BuildError("no C compiler found")

    monkeypatch.setattr(cpu, "find_compiler", missing)
    assert cpu.cpu_target("cpu").amx, "plans need no compiler"

"""The driver interface, end to end on the CPU libcuda: results, and every kind of failure."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polydyn.codegen.device import HEADERS
from polydyn.gpu import cpu_libcuda, emulator
from polydyn.gpu.emulator import compile_emulated
from polydyn.gpu.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    DriverMissingError,
    WrongArchitectureError,
)
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.driver_pycuda import pycuda_installed
from polydyn.runtime.cuda.drivers import open_driver
from polydyn.runtime.cuda.tensormap import TF32, PixelBox, TensorMap
from polydyn.testing.device.cases import Mapped
from polydyn.testing.device.gemms import MMA_SOURCE, WGMMA_SOURCE, Problem
from tests.support.paths import ROOT

KINDS = [
    "ctypes",
    pytest.param("pycuda", marks=pytest.mark.skipif(not pycuda_installed(), reason="pycuda is not installed")),
]
STRAY = """
#include "pd_device.cuh"
PD_KERNEL(stray, 32, 1)(float *out, int at) { pd_stg(out + at + pd_tid(), 1.f); }
PD_EXPORT(stray, 32);
"""

TWICE = """
#include "pd_device.cuh"
PD_KERNEL(twice, 32, 1)(const float *x, float *y) { pd_stg(y + pd_tid(), 2.f * pd_ldg(x + pd_tid())); }
PD_EXPORT(twice, 32);
"""


@pytest.fixture(scope="module")
def library() -> str:
    path = str(cpu_libcuda.build())
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)  # so that pycuda finds it under its name
    return path


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, library: str) -> Driver:
    return open_driver(request.param, library=library)


def device_gemm(driver: Driver, problem: Problem, source: str, kernel: str, arch: int) -> None:
    blocks, smem, args = problem.mma() if kernel == "gemm_mma" else problem.wgmma()
    function = driver.get_function(driver.load_module(compile_emulated(source, arch=arch).read_bytes()), kernel)
    driver.set_smem(function, smem)
    pointers, values = [], []
    for a in args:
        host = a.array.base if isinstance(a, Mapped) else a
        if isinstance(host, np.ndarray):
            pointers.append(driver.alloc(host.nbytes))
            driver.h2d(pointers[-1], host)
            values.append(driver.encode_tensor_map(a.map, pointers[-1]) if isinstance(a, Mapped) else pointers[-1])
        else:
            values.append(a)
    stream, start, end = driver.stream(), driver.event(), driver.event()
    driver.record(start, stream)
    driver.launch(function, (blocks, 1, 1), 256 if kernel == "gemm_mma" else 384, smem, values, stream)
    driver.record(end, stream)
    assert driver.elapsed(start, end) >= 0
    driver.synchronize(stream)
    driver.d2h(problem.c.base, pointers[-1])
    for p in pointers:
        driver.free(p)
    driver.free_stream(stream)


def test_gemms_through_the_driver(driver: Driver) -> None:
    for source, kernel, arch in ((MMA_SOURCE, "gemm_mma", 80), (WGMMA_SOURCE, "gemm_wgmma", 90)):
        problem = Problem(131, 77, 150)
        device_gemm(driver, problem, source, kernel, arch)
        assert problem.error() < 1e-3


def test_copies_and_empty_arrays(driver: Driver) -> None:
    x, y = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    p, empty = driver.alloc(x.nbytes), driver.alloc(0)
    driver.h2d(p, x)
    driver.d2h(y, p)
    driver.h2d(empty, x[:0])
    assert np.array_equal(x, y) and p != empty
    with pytest.raises(DeviceError, match="contiguous"):
        Driver.h2d(driver, p, x[::2])  # type: ignore[arg-type]
    driver.free(p)
    with pytest.raises(DeviceError, match="not a"):
        driver.free(p)


def test_copies_from_pageable_memory_have_arrived(driver: Driver, library: str) -> None:
    """cuMemcpyHtoD may return before; a kernel on a stream that does not wait for it would read old data."""
    function = driver.get_function(driver.load_module(compile_emulated(TWICE).read_bytes()), "twice")
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    p, q, stream = driver.alloc(128), driver.alloc(128), driver.stream()

    def copy(by_hand: bool) -> np.ndarray:
        if by_hand:
            cuda = ctypes.CDLL(library)
            assert not cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(p), ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(128))
        else:
            driver.h2d(p, x)
        driver.launch(function, (1, 1, 1), 32, 0, [p, q], stream)
        driver.synchronize(stream)
        driver.d2h(y, q)
        return y

    assert np.isnan(copy(by_hand=True)).all(), "the CPU libcuda is strict about it"
    x += 1
    assert np.array_equal(copy(by_hand=False), 2 * x)
    for pointer in (p, q):
        driver.free(pointer)
    driver.free_stream(stream)


def test_work_on_a_stream_is_done_when_it_is_waited_for(driver: Driver) -> None:
    """It is late on the CPU libcuda, as it may be on a GPU; events order it between streams."""
    function = driver.get_function(driver.load_module(compile_emulated(TWICE).read_bytes()), "twice")
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    p, q, r, first, second, event = driver.alloc(128), driver.alloc(128), driver.alloc(128), *(
        make() for make in (driver.stream, driver.stream, driver.event)
    )  # fmt: skip
    driver.h2d(p, x)
    driver.launch(function, (1, 1, 1), 32, 0, [p, q], first)
    driver.record(event, first)
    driver.wait_event(second, event)
    driver.free_event(event)
    driver.launch(function, (1, 1, 1), 32, 0, [q, r], second)
    driver.d2h(y, q)
    assert np.isnan(y).all(), "the default stream does not wait for others"
    driver.synchronize(second)
    driver.d2h(y, r)
    assert np.array_equal(y, 4 * x)
    for pointer in (p, q, r):
        driver.free(pointer)


def test_a_failing_kernel_is_named_and_the_driver_goes_on(driver: Driver) -> None:
    image = compile_emulated(STRAY).read_bytes()
    function = driver.get_function(driver.load_module(image), "stray")
    p, generation = driver.alloc(128), driver.generation
    driver.launch(function, (1, 1, 1), 32, 0, [p, np.int32(0)])
    driver.synchronize()
    driver.launch(function, (1, 1, 1), 32, 0, [p, np.int32(1)])
    with pytest.raises(DeviceLostError, match="out-of-bounds global access of 4 bytes at line 3"):
        driver.synchronize()
    assert driver.generation == generation + 1
    with pytest.raises(DeviceError):
        driver.free(p)
    function = driver.get_function(driver.load_module(image), "stray")
    p = driver.alloc(128)
    driver.launch(function, (1, 1, 1), 32, 0, [p, np.int32(0)])
    out = np.zeros(32, np.float32)
    driver.d2h(out, p)
    assert (out == 1).all()


def test_out_of_memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDEMU_MEMORY", "1000000")
    with pytest.raises(DeviceMemoryError, match="2000000 bytes"):
        driver.alloc(2_000_000)
    driver.free(driver.alloc(1000))


def test_wrong_architecture(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    image = compile_emulated(STRAY, arch=90).read_bytes()
    monkeypatch.setenv("PDEMU_SM", "80")
    with pytest.raises(WrongArchitectureError, match=r"209|kernel image"):
        driver.load_module(image)
    cubin = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + bytes(200)
    with pytest.raises(WrongArchitectureError):
        driver.load_module(cubin)
    with pytest.raises(WrongArchitectureError):
        driver.load_module(b"no image at all")


def test_refusals_name_the_numbers(driver: Driver) -> None:
    module = driver.load_module(compile_emulated(STRAY).read_bytes())
    with pytest.raises(DeviceError, match="nothing"):
        driver.get_function(module, "nothing")
    function = driver.get_function(module, "stray")
    with pytest.raises(DeviceError, match="300000"):
        driver.set_smem(function, 300_000)
    p = driver.alloc(128)
    for grid, threads, smem in (((1, 1, 1), 64, 0), ((0, 1, 1), 32, 0), ((1, 1, 1), 32, 50_000)):
        with pytest.raises(DeviceError, match=f"{threads} threads, {smem} bytes"):
            driver.launch(function, grid, threads, smem, [p, np.int32(0)])
    driver.launch(function, (1, 1, 1), 32, 0, [p, np.int32(0)])
    driver.synchronize()


def test_missing_driver_and_device(library: str) -> None:
    with pytest.raises(DriverMissingError, match="no CUDA driver"):
        Driver(library="libno-such-cuda.so.1")
    with pytest.raises(DriverMissingError, match="device 3"):
        Driver(3, library)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"strides": (200,)}, "multiples of 16"), ({"box": (128, 8)}, "no wider than the swizzle"),
        ({"box": (64, 257)}, "box sizes"), ({"dims": (0, 4)}, "dims from 1"), ({"dtype": "float8"}, "float8"),
        ({"box": (12, 8), "swizzle": 0}, "inner box"),
    ],
)  # fmt: skip
def test_tensor_map_rules(change: dict, rule: str) -> None:
    good = {"dtype": "float16", "dims": (100, 4), "strides": (208,), "box": (64, 8)}
    TensorMap(**good).check_address(32)
    with pytest.raises(DeviceError, match=rule):
        TensorMap(**{**good, **change})
    with pytest.raises(DeviceError, match="16-byte"):
        TensorMap(**good).check_address(8)


IMAGE = TensorMap("float16", (72, 20, 10, 4), (144, 2880, 28800), (64, 384), pixels=PixelBox((-1, -2), (-1, 0), (2, 1)))
"""A map in im2col mode."""


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"lower": (-129, 0)}, "corners from -128 to 127"), ({"upper": (0, 128)}, "corners"),
        ({"lower": (-1,)}, "for each dim"), ({"steps": (9, 1)}, "steps from 1 to 8"), ({"steps": (0, 1)}, "steps"),
        ({"upper": (-21, 0)}, "with a pixel in it"), ({"box": (64, 1025)}, "1 to 1024 pixels"),
        ({"box": (68, 8)}, "multiple of 16 bytes"), ({"box": (128, 8)}, "no wider than the swizzle"),
    ],
)  # fmt: skip
def test_rules_of_maps_of_pixels(change: dict, rule: str, library: str) -> None:
    """Python names the rule; a driver rejects the same numbers."""
    changed = change if "box" in change else {"pixels": replace(IMAGE.pixels, **change)}
    with pytest.raises(DeviceError, match=rule):
        replace(IMAGE, **changed)
    if len(change.get("lower", IMAGE.strides)) > 1:
        unchecked = copy(IMAGE)
        for name, value in changed.items():
            object.__setattr__(unchecked, name, value)
        with pytest.raises(DeviceError, match="cuTensorMapEncodeIm2col failed: invalid argument"):
            Driver(library=library).encode_tensor_map(unchecked, 4096)


def test_emulated_and_driver_tensor_maps_agree(library: str) -> None:
    driver = Driver(library=library)
    bfloat = TensorMap("bfloat16", (100, 9, 4), (208, 2000), (64, 8, 2))
    for described in (bfloat, IMAGE, *(TensorMap(t, (100, 9), (416,), (32, 8)) for t in ("float32", TF32))):
        assert driver.encode_tensor_map(described, 4096) == described.emulated(4096)


def test_headers_say_what_python_says() -> None:
    """The constants that both sides define."""
    text = (HEADERS / "pd_emu_abi.h").read_text()
    names = text.split("enum pdemu_counter {")[1].split("PDEMU_COUNTERS")[0]
    found = [
        line.split("PDEMU_")[1].split(",")[0].lower()
        for line in names.splitlines()
        if line.strip().startswith("PDEMU_")
    ]
    assert found == [n.rstrip("_") for n in emulator.COUNTER_NAMES]
    assert f"#define PDEMU_ABI {emulator.ABI}\n" in text and f"#define PDEMU_MESSAGE {emulator.MESSAGE}\n" in text


def test_a_driver_works_from_another_thread(driver: Driver) -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)

    def work() -> None:
        p = driver.alloc(x.nbytes)
        driver.h2d(p, x)
        driver.d2h(y, p)
        driver.free(p)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert np.array_equal(x, y)


@pytest.mark.slow
def test_conformance_script_runs_emulated(tmp_path: Path) -> None:
    """The script for the first day with a GPU, on the CPU libcuda: every case conforms, the report is JSON."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.gpu.conformance", "--emulate", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    names = [r["name"] for r in report["results"]]
    assert all(r["ok"] for r in report["results"]) and len(set(names)) == len(names) > 60
    assert report["arch"] == 90


def test_conformance_script_needs_only_numpy() -> None:
    """A GPU machine has this repository and numpy, but none of polydyn's other requirements."""
    blocked = ("islpy", "onnx", "sympy", "networkx", "click", "rich", "torch", "pycuda")
    code = f"import sys\nfor m in {blocked}: sys.modules[m] = None\nimport benchmarks.gpu.conformance"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

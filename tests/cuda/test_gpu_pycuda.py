"""pycuda together with programs and drivers, on the CPU libcuda; skipped if not installed (``make pycuda-test``)."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.errors import InputError
from polydyn.gpu import cpu_libcuda
from polydyn.gpu.emulator import compile_emulated
from polydyn.gpu.errors import DeviceError, DeviceLostError, DeviceMemoryError
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.driver_pycuda import PycudaDriver
from polydyn.runtime.cuda.drivers import open_driver
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.testing.accuracy import TOLERANCE, error, reference
from polydyn.testing.inputs import feeds as inputs_of
from tests.support.cuda_programs import relu, shift, softmax_and_gather
from tests.support.paths import ROOT
from tests.support.stored import path_of

pytest.importorskip("pycuda")
ctypes.CDLL(str(cpu_libcuda.build()), ctypes.RTLD_GLOBAL)  # so that pycuda finds it under its name
cuda = pytest.importorskip("pycuda.driver")
gpuarray = pytest.importorskip("pycuda.gpuarray")

KERNELS = """
#include "pd_device.cuh"
PD_KERNEL(twice, 32, 1)(const float *x, float *y) { pd_stg(y + pd_tid(), 2.f * pd_ldg(x + pd_tid())); }
PD_EXPORT(twice, 32);
PD_KERNEL(scalars, 32, 1)(int64_t *y, uint8_t a, uint16_t h, int32_t i, uint64_t l) {
  if (pd_tid() > 0) return;
  pd_stg(y, (int64_t)a); pd_stg(y + 1, (int64_t)h); pd_stg(y + 2, (int64_t)i); pd_stg(y + 3, (int64_t)l);
}
PD_EXPORT(scalars, 32);
PD_KERNEL(stray, 32, 1)(float *out) { pd_stg(out + 100000 + pd_tid(), 1.f); }
PD_EXPORT(stray, 32);
"""


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield open_session(prefer="pycuda")


@pytest.fixture(scope="module")
def layer(device: Session) -> CudaProgram:
    return softmax_and_gather()


@pytest.fixture
def primary() -> Iterator[Any]:
    """Make the primary context current for a test, like ``import pycuda.autoprimaryctx``."""
    context = cuda.Device(0).retain_primary_context()
    context.push()
    yield context
    gc.collect()  # arrays are freed while their context is current
    context.pop()


@pytest.fixture
def driver(device: Session) -> Iterator[PycudaDriver]:
    opened = open_driver("pycuda", library=device.library)
    assert isinstance(opened, PycudaDriver)
    yield opened
    opened.close()


def feeds(b: int, seed: int = 0) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed + b)
    x = r.standard_normal((b, 8)).astype(np.float32)
    return {"x": x, "i": r.integers(-5, 5, b), "table": r.standard_normal((5, 8)).astype(np.float32)}


def same(got: dict[str, Any], want: dict[str, Any]) -> bool:
    """Compare bit for bit, on host or device."""
    host = [{n: a.numpy() if isinstance(a, DeviceArray) else np.asarray(a) for n, a in x.items()} for x in (got, want)]
    return host[0].keys() == host[1].keys() and all(a.tobytes() == host[1][n].tobytes() for n, a in host[0].items())


def subprocess_says(code: str, **environment: str) -> str:
    """Return the output of a separate script; it must end well, with nothing on the error stream."""
    begin = "import ctypes, gc, os, threading\nimport numpy as np\nfrom polydyn.gpu import cpu_libcuda\n"
    command = [sys.executable, "-W", "error", "-c", begin + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


# -- programs ----------------------------------------------------------------------------------------------------------


def test_the_device_is_opened_by_pycuda_where_it_is_installed(device: Session) -> None:
    assert open_session() is device and device.driver.name == "pycuda"
    assert open_session(prefer="ctypes") is not device


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_past_tiny", "resnet_tiny"])
def test_models_end_to_end(name: str, primary: Any) -> None:
    """Arrays that pycuda made, on a stream of pycuda's; run, and bound to CUDA graphs."""
    path = path_of(name)
    program, loaded, stream = polydyn.compile(path, target="cuda:emulated"), onnx.load(path), cuda.Stream()
    assert isinstance(program, CudaProgram) and program.session.driver.name == "pycuda"
    some = {
        "bert_tiny": [{"B": 2, "L": 13}, {"B": 1, "L": 1}],
        "gpt2_past_tiny": [{"B": 2, "L": 3, "P": 0, "T": 3}, {"B": 1, "L": 1, "P": 9, "T": 10}],
        "resnet_tiny": [{"N": 2, "H": 18, "W": 33}],
    }[name]
    for shape, want in zip(some, reference(path, some), strict=True):
        given = inputs_of(loaded, shape)
        host = program.run(given)
        assert error(host, want) <= TOLERANCE, shape
        arrays = {n: gpuarray.to_gpu(np.ascontiguousarray(a)) for n, a in given.items()}
        bound = program.bind(arrays, stream=stream)
        for got in (program.run(arrays), program.run(arrays, stream=stream), bound(), bound()):
            stream.synchronize()
            assert same(got, host), shape


@pytest.mark.parametrize("b", [0, 1, 37])
def test_arrays_of_pycuda_in_and_out(layer: CudaProgram, primary: Any, b: int) -> None:
    f = feeds(b)
    want = layer.run(f)
    arrays = {n: gpuarray.to_gpu(a) for n, a in f.items()}
    out = {"y": gpuarray.empty((b, 36), np.float32), "z": gpuarray.empty((b, 8), np.float32)}
    moved = layer.counters["bytes_copied"]
    got = layer.run(arrays, out)
    assert got["y"] is out["y"] and same({n: a.get() for n, a in out.items()}, want)
    assert layer.counters["bytes_copied"] == moved, "they are used where they lie"
    call = layer.bind(arrays, out)
    for a in out.values():
        a.set(np.full(a.shape, 7, np.float32))
    assert same({n: a.get() for n, a in call().items()}, want)
    assert same(layer.run(f | {"x": arrays["x"]}), want)


def test_what_pycuda_still_does_to_an_array_is_waited_for(layer: CudaProgram, primary: Any) -> None:
    """Copies and kernels of pycuda are on the default stream, for which a run's own stream does not wait by itself."""
    f = feeds(6)
    x = gpuarray.to_gpu(f["x"])
    layer.run(f | {"x": x})
    for k in range(3):
        f["x"] = f["x"] + k
        cuda.memcpy_htod(x.gpudata, f["x"])  # arrives late, as it may from pageable memory
        assert same(layer.run(f | {"x": x}), layer.run(f))
        cuda.memcpy_htod(x.gpudata, f["x"] + 1)
        stream = cuda.Stream(1)
        got = layer.run(f | {"x": x}, stream=stream)
        stream.synchronize()
        assert same(got, layer.run(f | {"x": f["x"] + 1}))


def test_outputs_go_on_in_kernels_of_pycuda(layer: CudaProgram, primary: Any) -> None:
    """pycuda accepts ``__cuda_array_interface__`` as an argument; its kernel follows the run on one stream."""
    twice = cuda.module_from_buffer(compile_emulated(KERNELS).read_bytes()).get_function("twice")
    f, stream, y = feeds(4), cuda.Stream(1), gpuarray.empty((4, 8), np.float32)
    got = layer.run({n: gpuarray.to_gpu(a) for n, a in f.items()}, stream=stream)
    twice(got["z"], y, grid=(1, 1), block=(32, 1, 1), stream=stream)
    again = layer.run(f | {"x": y}, stream=stream)
    stream.synchronize()
    z = f["table"][f["i"]] + f["x"]
    assert np.array_equal(y.get(), 2 * z)
    assert np.array_equal(again["z"].numpy(), f["table"][f["i"]] + 2 * z)


def test_arrays_that_cannot_be_used_are_refused(layer: CudaProgram, primary: Any) -> None:
    f = feeds(8)
    with pytest.raises(InputError, match="not dense"):
        layer.run(f | {"x": gpuarray.to_gpu(np.asfortranarray(f["x"]))})
    with pytest.raises(InputError, match="float64"):
        layer.run(f | {"x": gpuarray.to_gpu(f["x"].astype(np.float64))})
    with pytest.raises(InputError, match="has the type <c8"):
        layer.run(f | {"x": gpuarray.to_gpu(f["x"].astype(np.complex64))})
    with pytest.raises(InputError, match="element 0 is 5"):
        layer.run(f | {"i": gpuarray.to_gpu(np.full(8, 5))})
    close = layer.run(f)
    assert same(layer.run(f | {"i": gpuarray.to_gpu(f["i"])}), close)


def test_a_context_of_its_own_stays_current_and_its_arrays_are_refused(layer: CudaProgram) -> None:
    """``import pycuda.autoinit`` makes one: it is not the primary context."""
    own = cuda.Device(0).make_context()
    try:
        f = feeds(4)
        theirs = gpuarray.to_gpu(f["x"])
        with pytest.raises(InputError, match=r"(?s)'x' is in memory of another CUDA context.*autoprimaryctx"):
            layer.run(f | {"x": theirs})
        with pytest.raises(DeviceError, match=r"(?s)invalid resource handle.*autoprimaryctx"):
            layer.run(f, stream=cuda.Stream())
        kept = DeviceArray.of(layer.session, f["x"])
        assert same(layer.run(f | {"x": kept}), layer.run(f))
        del kept
        assert np.array_equal(gpuarray.to_gpu(f["x"]).get(), f["x"])
        assert np.array_equal(theirs.get(), f["x"])
        del theirs
    finally:
        own.pop()
        own.detach()


def test_threads(layer: CudaProgram) -> None:
    """Threads that pycuda does not know use programs, and end without a context of ours on pycuda's stack."""
    wants = [layer.run(feeds(1 + k)) for k in range(4)]

    def work(k: int) -> bool:
        f = feeds(1 + k % 4)
        with layer.session.use() as used:
            stream = used.stream()
        bound = layer.bind(f, stream=stream)
        right = same(layer.run(f, stream=stream), wants[k % 4]) and same(bound(), wants[k % 4])
        del bound
        with layer.session.use() as used:
            used.free_stream(stream)
        return right

    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))


def test_a_thread_with_a_context_of_pycuda(layer: CudaProgram) -> None:
    results: list[bool] = []

    def work() -> None:
        context = cuda.Device(0).retain_primary_context()
        context.push()
        f, stream = feeds(5), cuda.Stream()
        arrays = {n: gpuarray.to_gpu(a) for n, a in f.items()}
        got = layer.run(arrays, stream=stream)
        stream.synchronize()
        results.append(same(got, layer.run(f)))
        del arrays, got, stream
        context.pop()

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [True, True]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failing_kernel_leaves_pycuda_usable(device: Session, primary: Any) -> None:
    bad, good = shift(), relu()
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    bound = good.bind({"x": gpuarray.to_gpu(x)})
    assert np.array_equal(bound()["y"].numpy(), x)
    with device.use() as used:
        stream = used.stream()
    before = device.generation
    with pytest.raises(DeviceLostError, match="out-of-bounds global access"):
        bad.run({"x": np.zeros(101, np.float32)}, stream=stream)
    assert device.generation == before + 1
    with pytest.raises(DeviceLostError, match="bind it again"):
        bound()
    with device.use() as used, pytest.raises(DeviceError, match="not a handle of this context"):
        used.free_stream(stream)
    assert np.array_equal(good.run({"x": x})["y"], x)


def test_memory_runs_out(layer: CudaProgram, primary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {n: gpuarray.to_gpu(a) for n, a in feeds(3).items()}
    want = layer.run(feeds(3))
    monkeypatch.setenv("PDEMU_MEMORY", "1")
    big = {n: np.zeros((40000, *a.shape[1:]), a.dtype) if n != "table" else a for n, a in feeds(1).items()}
    with pytest.raises(DeviceMemoryError, match="bytes for intermediates"):
        layer.run(big)
    with pytest.raises(cuda.MemoryError):
        gpuarray.empty(10, np.float32)
    monkeypatch.delenv("PDEMU_MEMORY")
    assert same(layer.run(arrays), want)


def test_an_array_that_was_lost(device: Session) -> None:
    """pycuda's own arrays are lost with the context as well: a run reports it, and their destructors report no more."""
    said = subprocess_says("""
ctypes.CDLL(str(cpu_libcuda.build()), ctypes.RTLD_GLOBAL)
import sys; sys.path.insert(0, "tests")
from tests.support.cuda_programs import relu, shift
from polydyn.errors import PolydynError
import pycuda.autoprimaryctx, pycuda.gpuarray as gpuarray
good, x = relu(), np.arange(8, dtype=np.float32).reshape(1, 8)
print(good.session.driver.name, np.array_equal(good.run({"x": gpuarray.to_gpu(x)})["y"].numpy(), x))
try:
    shift().run({"x": np.zeros(101, np.float32)})
except PolydynError as e:
    print(type(e).__name__)
print(np.array_equal(good.run({"x": x})["y"], x))
""", POLYDYN_LIBCUDA="emulated")  # fmt: skip
    assert said.split() == ["pycuda", "True", "DeviceLostError", "True"]


# -- the driver --------------------------------------------------------------------------------------------------------


def test_arguments_have_the_bytes_and_places_that_are_meant(driver: PycudaDriver) -> None:
    function = driver.get_function(driver.load_module(compile_emulated(KERNELS).read_bytes()), "scalars")
    got, p = np.zeros(4, np.int64), driver.alloc(32)
    half, flag = np.float16(1.5), np.bool_(True)
    driver.launch(function, (1, 1, 1), 32, 0, [p, flag, half, np.int32(-7), np.uint64(1 << 63)])
    driver.d2h(got, p)
    assert got.tolist() == [1, int(half.view(np.uint16)), -7, -(1 << 63)]
    driver.launch(function, (1, 1, 1), 32, 0, [p, np.uint8(2), np.uint16(3), np.int32(4), np.int64(5)])
    driver.d2h(got, p)
    assert got.tolist() == [2, 3, 4, 5]
    driver.free(p)


def test_another_driver_resets_the_context(driver: PycudaDriver) -> None:
    """Modules and streams of the lost context are never destroyed: pycuda would abort."""
    image = compile_emulated(KERNELS).read_bytes()
    lost, stream = driver.load_module(image), driver.stream()
    function = driver.get_function(lost, "twice")
    Driver(library=driver._key[0]).renew()
    for what in (lambda: driver.get_function(lost, "twice"), lambda: driver.free_stream(stream)):
        with pytest.raises(DeviceError, match="not a handle of this context"):
            what()
    with pytest.raises(DeviceError, match="not a handle"):
        driver.launch(function, (1, 1, 1), 32, 0, [0, 0])
    assert driver.get_function(driver.load_module(image), "twice") and driver.stream()


def test_a_foreign_stream_is_refused_by_name(driver: PycudaDriver) -> None:
    function = driver.get_function(driver.load_module(compile_emulated(KERNELS).read_bytes()), "twice")
    with pytest.raises(DeviceError, match=r"(?s)0x7 is not a handle of this context.*ctypes takes any"):
        driver.launch(function, (1, 1, 1), 32, 0, [0, 0], 7)


def test_contexts_are_given_back(device: Session, tmp_path: Path) -> None:
    """The primary context ends when the last driver releases it, and can be created again."""
    said = subprocess_says("""
library = str(cpu_libcuda.build())
raw = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
from polydyn.runtime.cuda.drivers import open_driver
def active():
    flags, on = ctypes.c_uint(), ctypes.c_int()
    raw.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(on))
    return on.value
for lose in (False, True, False):
    for thread in (False, True):
        d = open_driver("pycuda", library=library)
        d.stream(), d.free_stream(d.stream())
        if lose:
            d.renew(), d.stream()
        if thread:
            t = threading.Thread(target=d.close); t.start(); t.join()
        else:
            d.close()
        print(active(), end=" ")
current = ctypes.c_void_p()
raw.cuCtxGetCurrent(ctypes.byref(current))
print(current.value)
""")  # fmt: skip
    assert said.split() == ["0"] * 6 + ["None"]


ABORTS = """
library = str(cpu_libcuda.build())
ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
from polydyn.runtime.cuda.drivers import open_driver
from polydyn.gpu.emulator import compile_emulated
from polydyn.gpu.errors import DeviceLostError
image = compile_emulated(KERNELS).read_bytes()
d = open_driver("pycuda", library=library)
def work():
    f = d.get_function(d.load_module(image), "stray")
    d.stream()
    p = d.alloc(128)
    try:
        d.launch(f, (1, 1, 1), 32, 0, [p])
        d.synchronize()
    except DeviceLostError:
        print("lost", end=" ")
    f = d.get_function(d.load_module(image), "twice")
    d.free_stream(d.stream())
    s = d.stream()
    d.launch(f, (1, 1, 1), 32, 0, [d.alloc(128), d.alloc(128)], s)
    print("goes on", end=" ")
for _ in range(2):
    t = threading.Thread(target=work); t.start(); t.join()
work()
END
print("end")
"""


@pytest.mark.parametrize("end", ["", "del d; gc.collect()", "d.close()", "threading.Thread(target=d.close).start()"])
@pytest.mark.parametrize("sticky", ["0", "1"])
def test_nothing_aborts_where_threads_and_processes_end(end: str, sticky: str) -> None:
    code = ABORTS.replace("END", end).replace("KERNELS", repr(KERNELS))
    said = subprocess_says(code, PDEMU_STICKY=sticky)
    assert said.split() == [*(["lost", "goes", "on"] * 3), "end"]


def test_a_broken_context_at_the_end() -> None:
    """A kernel that fails after the last call: the context is not renewed, and nothing is destroyed in it."""
    code = (
        ABORTS.split("def work")[0]
        + """
f, s, p = d.get_function(d.load_module(image), "stray"), d.stream(), d.alloc(128)
d.launch(f, (1, 1, 1), 32, 0, [p], s)
t = threading.Thread(target=d.launch, args=(f, (1, 1, 1), 32, 0, [p])); t.start(); t.join()
END
print("end")
"""
    )
    for end in ("", "del d; gc.collect()", "d.close()"):
        for sticky in "01":
            said = subprocess_says(code.replace("END", end).replace("KERNELS", repr(KERNELS)), PDEMU_STICKY=sticky)
            assert said.split() == ["end"]


def test_a_callers_context_survives_a_broken_one() -> None:
    """pycuda takes the caller's context down before it finds that the broken one is unavailable."""
    code = (
        ABORTS.split("def work")[0]
        + """
import pycuda.driver as cuda
own = cuda.Device(0).make_context()
f, s = d.get_function(d.load_module(image), "stray"), d.stream()
p, mine = d.alloc(128), cuda.mem_alloc(128)
d.deferred = True
d.launch(f, (1, 1, 1), 32, 0, [p])
d.free_stream(s)
cuda.memcpy_htod(mine, np.ones(32, np.float32))
mine.free()
own.pop()
own.detach()
print("end")
"""
    )
    for sticky in "01":
        said = subprocess_says(code.replace("KERNELS", repr(KERNELS)), PDEMU_STICKY=sticky)
        assert said.split() == ["end"]


def test_another_libcuda_is_refused(tmp_path: Path) -> None:
    """pycuda binds the driver once for a process; a session over another one would hand it foreign objects."""
    other = tmp_path / "libcuda.so.1"
    shutil.copy(cpu_libcuda.build(), other)
    said = subprocess_says(f"""
from polydyn.runtime.cuda.session import open_session
from polydyn.gpu.errors import DriverMissingError
print(open_session(library="emulated").driver.name)
try:
    open_session(library={str(other)!r})
except DriverMissingError as e:
    print("another libcuda.so.1 than" in str(e), "ctypes driver" in str(e))
print(open_session(library={str(other)!r}, prefer="ctypes").driver.name)
""")  # fmt: skip
    assert said.split() == ["pycuda", "True", "True", "ctypes"]

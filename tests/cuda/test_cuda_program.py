"""Programs for a CUDA device, compiled once for every shape, on the CPU libcuda: results, arrays, streams, callers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.compiler import Options
from polydyn.errors import InputError, UnsupportedError
from polydyn.gpu.errors import DeviceError
from polydyn.runtime.cuda import dlpack
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.dlpack import CUDA, capsule, view
from polydyn.runtime.cuda.program import CudaProgram, stream_handle
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.testing.accuracy import TOLERANCE, error, reference
from polydyn.testing.inputs import feeds as inputs_of
from tests.support.cuda_programs import W, softmax_and_gather
from tests.support.marks import slow
from tests.support.stored import path_of
from tests.support.tiny import model, node


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Session]:
    """Use the CPU libcuda for everything that opens a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield open_session()


@pytest.fixture(scope="module")
def layer() -> CudaProgram:
    return softmax_and_gather()


def compiled(m: Any) -> CudaProgram:
    program = polydyn.compile(m, target="cuda:emulated")
    assert isinstance(program, CudaProgram)
    return program


def feeds(b: int, t: int = 5, seed: int = 0) -> dict[str, Any]:
    r = np.random.default_rng(seed + b)
    x = r.standard_normal((b, 8)).astype(np.float32)
    return {"x": x, "i": r.integers(-t, t, b), "table": r.standard_normal((t, 8)).astype(np.float32)}


def expected(f: dict[str, Any]) -> dict[str, Any]:
    e = np.exp(f["x"] @ W - (f["x"] @ W).max(-1, keepdims=True))
    return {"y": e / e.sum(-1, keepdims=True), "z": f["table"][f["i"]] + f["x"]}


def close(got: dict[str, Any], f: dict[str, Any]) -> None:
    want = expected(f)
    for name, a in got.items():
        a = a.numpy() if isinstance(a, DeviceArray) else a
        np.testing.assert_allclose(a, want[name], 1e-5, 1e-6, err_msg=name)


def on_device(session: Session, f: dict[str, Any]) -> dict[str, Any]:
    return {n: DeviceArray.of(session, a) for n, a in f.items()}


SOME = [{"B": 1, "L": 1}, {"B": 2, "L": 13}, {"B": 3, "L": 67}]


@pytest.mark.parametrize(
    ("name", "some"), [("bert_tiny", SOME[1:2]), slow("bert_tiny", SOME), slow("gpt2_tiny", SOME)],
    ids=["bert_tiny at one shape", "bert_tiny", "gpt2_tiny"],
)  # fmt: skip
def test_models_run_at_every_shape_compiled_once(name: str, some: list[dict[str, int]]) -> None:
    """Each shape launches other versions of kernels, which the emulation compiles: one shape takes half the time."""
    path = path_of(name)
    program, loaded = compiled(path), onnx.load(path)
    for shape, want in zip(some, reference(path, some), strict=True):
        assert error(program.run(inputs_of(loaded, shape)), want) <= TOLERANCE, shape
    counters = program.counters
    assert counters["evaluations"] == len(some) and counters["contexts"] == 1
    one, two = (program.run(inputs_of(loaded, some[-1])) for _ in range(2))
    bound = program.bind(inputs_of(loaded, some[-1]))()
    assert all(np.array_equal(a, two[n]) and np.array_equal(a, bound[n]) for n, a in one.items())
    assert program.counters["evaluations"] == len(some), "a known shape costs no evaluation"
    seen = program.shapes_seen()
    assert [x["count"] for x in seen] == [4, *(1 for _ in some[1:])] and some[-1].items() <= seen[0]["dims"].items()


def test_explain_says_what_runs() -> None:
    nodes = [node("MatMul", "x y", "m"), node("Softmax", "m", "z", axis=-1)]
    program = compiled(model(nodes, {"x": ("float32", ["M", "K"]), "y": ("float32", ["K", "N"])}, ["z"]))
    chosen = set()
    for m, k, n in ((5, 8, 12), (5, 7, 9), (130, 4, 4), (2, 3, 9000)):
        f = {"x": np.ones((m, k), np.float32), "y": np.ones((k, n), np.float32)}
        ran, explained = program.profile(f, 1), program.explain(M=m, K=k, N=n).launches  # of the device that is open
        assert [(e.kernel, e.tasks, e.threads) for e in explained] == [(r.kernel, r.tasks, r.threads) for r in ran]
        chosen.add(tuple(e.kernel for e in explained))
    assert len(chosen) >= 3, "pitches and lengths of rows take different versions"
    wide = program.explain(M=2, K=3, N=9000).details()
    assert "not warp: it needs 288000 bytes of shared memory" in wide and "taken: block" in wide
    assert "of 4" not in wide and "% 4" not in wide


def test_tf32_only_when_asked_for() -> None:
    m = model([node("MatMul", "x y", "z")], {"x": ("float32", ["M", "K"]), "y": ("float32", ["K", "N"])}, ["z"])
    r = np.random.default_rng(0)
    f = {n: r.standard_normal(s).astype(np.float32) for n, s in (("x", (70, 40)), ("y", (40, 66)))}
    exact = f["x"].astype(np.float64) @ f["y"]
    for tf32, low, high in ((False, 0, 1e-6), (True, 1e-5, 1e-3)):
        program = polydyn.compile(m, target="cuda:emulated", options=Options(tf32=tf32))
        assert low <= np.abs(program.run(f)["z"] - exact).max() / np.abs(exact).max() <= high
        (launch,) = program.explain(M=70, K=40, N=66).launches
        assert ("tf32" in launch.kernel) == tf32
    with pytest.raises(UnsupportedError, match="tf32 on cpu"):
        polydyn.compile(m, options=Options(tf32=True))


def test_explain_takes_caches_as_dense() -> None:
    shapes = {"p": ("float32", ["B", "P", 4]), "x": ("float32", ["B", "L", 4])}
    program = compiled(model([node("Concat", "p x", "q", axis=1)], shapes, ["q"]))
    f = {"p": np.ones((2, 3, 4), np.float32), "x": np.ones((2, 1, 4), np.float32)}
    ran, explained = program.profile(f, 1), program.explain(B=2, P=3, L=1).launches
    assert [(e.kernel, e.tasks) for e in explained] == [(r.kernel, r.tasks) for r in ran]


def test_sizes_0_and_1_and_changing_shapes(layer: CudaProgram) -> None:
    for b in (3, 0, 1, 40, 1, 129, 0, 3):
        f = feeds(b)
        got = layer.run(f)
        assert got["y"].shape == (b, 36)
        close(got, f)


def test_host_arrays_of_any_kind_and_the_callers_outputs(layer: CudaProgram) -> None:
    f = feeds(6)
    strided = {n: np.repeat(a, 2, 0)[::2] if n != "x" else np.asfortranarray(a) for n, a in f.items()}
    close(layer.run(strided), f)
    out = {"y": np.empty((6, 36), np.float32), "z": np.empty((6, 8), np.float32)}
    got = layer.run(f, out)
    assert got["y"] is out["y"] and got["z"] is out["z"]
    close(got, f)
    wrong = (
        ({"q": out["y"]}, "no output 'q'"), ({"y": out["z"]}, "shape"), ({"y": out["y"].astype(np.float64)}, "float32"),
        ({"z": f["x"]}, "share memory"),
    )  # fmt: skip
    for bad, message in wrong:
        with pytest.raises(InputError, match=message):
            layer.run(f, bad)
    with pytest.raises(InputError, match="float64"):
        layer.run(f | {"x": f["x"].astype(np.float64)})
    with pytest.raises(InputError, match="axis 0 is 6, but B"):
        layer.run(f | {"x": f["x"][:5]})


def test_indices_outside_are_refused_on_host_and_device(layer: CudaProgram, device: Session) -> None:
    bad = feeds(4) | {"i": np.array([0, 5, 1, 1])}
    for f in (bad, on_device(device, bad)):
        with pytest.raises(InputError, match="element 1 is 5"):
            layer.run(f)
    close(layer.run(feeds(4)), feeds(4))


def test_tensors_stay_on_the_device(layer: CudaProgram, device: Session) -> None:
    f = feeds(9)
    moved = layer.counters["bytes_copied"]
    got = layer.run(on_device(device, f))
    assert all(isinstance(a, DeviceArray) for a in got.values()) and layer.counters["bytes_copied"] == moved
    close(got, f)
    mixed = layer.run(f | {"x": DeviceArray.of(device, f["x"])})
    assert isinstance(mixed["y"], DeviceArray)
    close(mixed, f)
    y, z = DeviceArray(device, (9, 36), "float32", 4), np.empty((9, 8), np.float32)
    got = layer.run(f, {"y": y, "z": z})
    assert got["y"] is y and got["z"] is z
    close(got, f)


class Foreign:
    """A tensor of another library: a part of an allocation, with its own strides."""

    def __init__(self, base: DeviceArray, offset: int, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.base, self.offset, self.shape, self.dtype = base, offset, shape, dtype
        self.asked: list[int] = []

    def __dlpack__(self, stream: int | None = None) -> object:
        self.asked.append(stream or 0)
        return capsule(self.base.pointer + self.offset, self.shape, self.dtype, self.base, (CUDA, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


def test_tensors_of_other_libraries(layer: CudaProgram, device: Session) -> None:
    f = feeds(4)
    table = np.concatenate([np.zeros(3, np.float32), f["table"].reshape(-1)])
    tensor = Foreign(DeviceArray.of(device, table), 12, (5, 8))  # not aligned to 16 bytes
    close(layer.run(f | {"table": tensor}), f)
    close(layer.run(f | {"table": tensor}, stream=2), f)
    assert tensor.asked[0] > 2 and tensor.asked[1] == 2, "the exporter learns on which stream its tensor is read"
    with pytest.raises(InputError, match="float16"):
        layer.run(f | {"x": Foreign(tensor.base, 0, (4, 8), "float16")})
    with pytest.raises(InputError, match=r"3 axes|2 axes|has 1 axes"):
        layer.run(f | {"x": Foreign(tensor.base, 0, (32,))})

    class Interface:
        __cuda_array_interface__ = DeviceArray.of(device, f["x"].T.copy()).__cuda_array_interface__ | {
            "shape": (4, 8), "strides": (4, 16),
        }  # fmt: skip

    with pytest.raises(InputError, match="not dense"):
        layer.run(f | {"x": Interface()})
    base = DeviceArray.of(device, np.concatenate([f["x"].reshape(-1)] * 2))
    with pytest.raises(InputError, match="shares memory with 'x'"):
        layer.run(f | {"x": Foreign(base, 0, (4, 8))}, {"z": Foreign(base, 16, (4, 8))})


def test_tensors_that_are_refused(layer: CudaProgram, device: Session) -> None:
    f = feeds(4)
    base = DeviceArray.of(device, np.zeros(200, np.float32))
    said = base.__cuda_array_interface__ | {"shape": (4, 8)}

    def interface(**other: Any) -> Any:
        return type("Other", (), {"__cuda_array_interface__": said | other})()

    class Busy(Foreign):
        def __dlpack__(self, stream: int | None = None) -> object:
            raise BufferError("it needs a gradient")

    fixed = np.empty((4, 8), np.float32)
    fixed.flags.writeable = False
    for out, message in (
        ({"y": Foreign(base, 4, (4, 36))}, "output 'y' is not aligned to 16 bytes"),
        ({"z": interface(strides=(64, 4))}, "out\\['z'\\] must be dense"),
        ({"z": list(np.empty((4, 8), np.float32))}, "is not an array"),
        ({"z": fixed}, "must be aligned and writeable"), ({"z": interface(shape=(4, 9))}, "of shape"),
        ({"y": Foreign(base, 0, (4, 36)), "z": Foreign(base, 64, (4, 8))}, "shares memory with 'y'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            layer.run(f, out)
    for x, message in (
        (Busy(base, 0, (4, 8)), "needs a gradient"),
        (interface(typestr="<c8"), "has the type <c8"), ([[1.0], [1.0, 2.0]], "input 'x' is not an array"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            layer.run(f | {"x": x})
    with pytest.raises(DeviceError, match="invalid resource handle"):
        layer.run(f | {"x": interface(stream=77)})
    with pytest.raises(InputError, match="repeats is 0"):
        layer.profile(f, 0)
    with pytest.raises(UnsupportedError, match="not on a device"):
        layer.trace(f)
    close(layer.run(f), f)


class Interface:
    """An array of pycuda or numba; ``stream``: the stream that it reports for its contents."""

    def __init__(self, base: DeviceArray, stream: int | None) -> None:
        self.base = base
        self.__cuda_array_interface__ = base.__cuda_array_interface__ | {"stream": stream}


@pytest.mark.parametrize("separate", [False, True])
def test_work_of_exporters_without_dlpack_is_waited_for(layer: CudaProgram, device: Session, separate: bool) -> None:
    """pycuda names no stream though its copies and kernels are on the default one; numba names its stream."""
    f = feeds(4)
    x = DeviceArray.of(device, f["x"])
    with device.use() as driver:
        theirs, ours = driver.stream(), driver.stream()
    given = f | {"x": Interface(x, theirs if separate else None)}

    def change() -> None:
        f["x"] = f["x"] + 1
        with device.use() as driver:
            if separate:
                driver.h2d(x.pointer, f["x"], theirs)
            else:  # from pageable memory: not there when it returns
                raw = ctypes.c_void_p(f["x"].ctypes.data), ctypes.c_size_t(x.nbytes)
                driver._call("cuMemcpyHtoD_v2", ctypes.c_uint64(x.pointer), *raw)  # type: ignore[attr-defined]

    for stream in (None, ours):
        change()
        close(layer.run(given, stream=stream), f)
        bound = layer.bind(given, stream=stream)
        close(bound(), f)
        change()
        close(bound(), f)
        del bound
    with device.use() as driver:
        driver.free_stream(theirs)
        driver.free_stream(ours)


def test_other_contexts_stay_current_and_their_memory_is_refused(layer: CudaProgram, device: Session) -> None:
    """A kernel that reads memory of another context breaks its own; ``pycuda.autoinit`` makes such a context."""
    cuda, other, now = ctypes.CDLL(device.library), ctypes.c_void_p(), ctypes.c_void_p()
    f = feeds(4)
    kept = DeviceArray.of(device, f["x"])
    assert not cuda.cuCtxCreate_v2(ctypes.byref(other), 0, 0)
    try:
        foreign, stream = ctypes.c_uint64(), ctypes.c_void_p()
        assert not cuda.cuMemAlloc_v2(ctypes.byref(foreign), ctypes.c_size_t(kept.nbytes))
        assert not cuda.cuStreamCreate(ctypes.byref(stream), 1)
        x = Interface(kept, None)
        close(layer.run(f | {"x": x}), f)
        x.__cuda_array_interface__["data"] = (foreign.value, False)
        with pytest.raises(InputError, match=r"(?s)'x' is in memory of another CUDA context.*primary context"):
            layer.run(f | {"x": x})
        with pytest.raises(DeviceError, match=r"(?s)invalid resource handle.*primary context"):
            layer.run(f, stream=stream.value)
        DeviceArray.of(device, f["x"])
        assert not cuda.cuCtxGetCurrent(ctypes.byref(now)) and now.value == other.value
    finally:
        cuda.cuCtxDestroy_v2(other)


def test_capsules_keep_and_free_their_memory(device: Session) -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3)
    a = DeviceArray.of(device, data)
    tensor = Foreign(a, 0, (2, 3), "int16")
    seen = view(tensor, 1)
    assert (seen.shape, seen.strides, seen.dtype, seen.dense) == ((2, 3), (6, 2), "int16", True)
    pointer, allocated = a.pointer, device.driver._allocated  # type: ignore[attr-defined]
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(a)
    del a, tensor
    assert pointer in allocated, "a view keeps the memory"
    del seen
    capsule(0, (1,), "float32", None, (CUDA, 0))
    assert pointer not in allocated, "capsules that nobody took, or that are gone, keep nothing"


def test_a_consumer_frees_what_it_took(device: Session) -> None:
    host = np.arange(4, dtype=np.float32)

    class Host:
        def __dlpack__(self, **_: object) -> object:
            return capsule(host.ctypes.data, (4,), "float32", host, (1, 0))

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    taken = np.from_dlpack(Host())
    assert np.array_equal(taken, host) and any(e.owner is host for e in dlpack._exported.values())
    del taken
    assert not any(e.owner is host for e in dlpack._exported.values())


def test_streams(layer: CudaProgram, device: Session) -> None:
    with device.use() as driver:
        first, second = driver.stream(), driver.stream()
    f = feeds(7)
    x = on_device(device, f)
    results = [layer.run(x, stream=s) for s in (first, second, first)]
    assert layer.counters["contexts"] == 1, "a run on another stream waits for the arena, on the device"
    for got in results:
        close(got, f)
    close(layer.run(f, stream=second), f)
    for bad in ("s", 1.5, object()):
        with pytest.raises(InputError, match="is not a CUDA stream"):
            layer.run(f, stream=bad)

    class Torch:
        cuda_stream = 0

    assert stream_handle(Torch()) == 1 and stream_handle(None) == 0
    with device.use() as driver:
        driver.synchronize(first)
        driver.free_stream(first)
        driver.free_stream(second)


def test_two_callers_and_two_programs(layer: CudaProgram) -> None:
    other = compiled(model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"]))

    def call(k: int) -> None:
        f = feeds(1 + k % 5, seed=k)
        close(layer.run(f), f)
        x = np.arange(-k, 9.0, dtype=np.float32)
        assert np.array_equal(other.run({"x": x})["y"], np.maximum(x, 0))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(12)))


def test_outputs_that_are_inputs_and_constants() -> None:
    past = model(
        [node("Concat", "p x", "q", axis=0), node("Relu", "x", "y"), node("Identity", "x", "same")],
        {"p": ("float32", ["P", 4]), "x": ("float32", ["L", 4])}, ["q", "y", "same", "c"],
        {"c": np.arange(4, dtype=np.float32)},
    )  # fmt: skip
    program = compiled(past)
    for p, n in ((3, 2), (0, 1), (1, 0)):
        a, b = np.arange(p * 4, dtype=np.float32).reshape(p, 4), -np.arange(n * 4, dtype=np.float32).reshape(n, 4)
        got = program.run({"p": a, "x": b})
        assert np.array_equal(got["q"], np.concatenate([a, b])) and np.array_equal(got["y"], np.maximum(b, 0))
        assert np.array_equal(got["same"], b) and np.array_equal(got["c"], np.arange(4))


def test_a_cache_grows_in_place_on_the_device(device: Session) -> None:
    program = compiled(
        model(
            [node("Concat", "p x", "q", axis=0)],
            {"p": ("float32", ["P", 4]), "x": ("float32", ["L", 4])}, ["q"],
        )
    )  # fmt: skip
    assert program.appendable == {"q": "p"}
    cache = DeviceArray.of(device, np.zeros((9, 4), np.float32))
    for n in range(9):
        row = np.full((1, 4), n, np.float32)
        got = program.run({"p": Foreign(cache, 0, (n, 4)), "x": row}, {"q": Foreign(cache, 0, (n + 1, 4))})
        assert isinstance(got["q"], Foreign)
    assert np.array_equal(cache.numpy(), np.repeat(np.arange(9, dtype=np.float32), 4).reshape(9, 4))


def test_where_caches_may_grow(device: Session) -> None:
    """Overlapping rows, rows of another rank, or on another device are rejected by name."""
    shapes = {"p": ("float32", ["B", "P", 4]), "x": ("float32", ["B", "L", 4])}
    program = compiled(model([node("Concat", "p x", "q", axis=1)], shapes, ["q"]))
    cache = DeviceArray.of(device, np.zeros((2, 4, 4), np.float32))

    def part(shape: tuple[int, ...], strides: tuple[int, ...], number: int = 0) -> Any:
        said = cache.__cuda_array_interface__ | {"shape": shape, "strides": strides}
        there = {"__cuda_array_interface__": said} | ({"__dlpack_device__": lambda s: (2, number)} if number else {})
        return type("Part", (), there)()

    feeds = {"p": part((2, 2, 4), (64, 16, 4)), "x": DeviceArray.of(device, np.ones((2, 1, 4), np.float32))}
    for wrong, message in (
        (part((2, 3, 4), (16, 16, 4)), "elements of out\\['q'\\] share memory"),
        (part((2, 3), (64, 16)), "must be an array of 3 axes"),
        (part((2, 3, 4), (64, 16, 4), 1), "is on device 1, the program runs on device 0"),
    ):
        with pytest.raises(InputError, match=message):
            program.run(feeds, {"q": wrong})
    with pytest.raises(InputError, match="is on device 1"):
        program.run(feeds | {"p": part((2, 2, 4), (64, 16, 4), 1)})
    program.run(feeds, {"q": part((2, 3, 4), (64, 16, 4))})
    assert np.array_equal(cache.numpy()[:, :, 0], [[0, 0, 1, 0]] * 2)

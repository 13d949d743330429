"""CUDA graphs on the CPU libcuda: bound calls and cached graphs of repeated runs."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import polydyn
from polydyn.codegen.kernel import Block
from polydyn.codegen.printers.cuda import PRELUDE
from polydyn.errors import ArtifactError, InputError
from polydyn.gpu.errors import DeviceError, DeviceLostError, DeviceMemoryError
from polydyn.program.assemble import build_program
from polydyn.program.plan import COUNTERS, Candidate
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.program import Call, CudaProgram
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.schedules.index import Index
from tests.support.cuda_programs import add, check, one_launch, relu, shift, softmax_and_gather, version, with_block
from tests.support.marks import slow
from tests.support.programs import B, kernel_of_text
from tests.support.tiny import model, node

USAGE = 5
"""``PD_USAGE``."""


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield open_session()


@pytest.fixture(scope="module")
def layer() -> CudaProgram:
    return softmax_and_gather()


def feeds(b: int, seed: int = 0) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed + b)
    x = r.standard_normal((b, 8)).astype(np.float32)
    return {"x": x, "i": r.integers(-5, 5, b), "table": r.standard_normal((5, 8)).astype(np.float32)}


def on_device(session: Session, f: dict[str, np.ndarray]) -> dict[str, DeviceArray]:
    return {n: DeviceArray.of(session, a) for n, a in f.items()}


def same(got: dict[str, Any], want: dict[str, Any]) -> bool:
    """Compare bit for bit, on host or device."""
    host = [{n: a.numpy() if isinstance(a, DeviceArray) else a for n, a in x.items()} for x in (got, want)]
    return host[0].keys() == host[1].keys() and all(a.tobytes() == host[1][n].tobytes() for n, a in host[0].items())


def out_of(session: Session, b: int, stream: int = 0) -> dict[str, DeviceArray]:
    """Allocate outputs of b rows in device memory, on a stream."""
    return {n: DeviceArray(session, (b, k), "float32", 4, stream) for n, k in (("y", 36), ("z", 8))}


def used(session: Session) -> int:
    """Return the bytes of device memory in use."""
    free, total = session.driver.memory()
    return total - free


# -- results
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [0, 1, 9])
def test_host_arrays_are_copied_around_the_replay(layer: CudaProgram, b: int) -> None:
    f = feeds(b)
    f["table"] = np.asfortranarray(f["table"])
    seen = sum(x["count"] for x in layer.shapes_seen())
    call = layer.bind(f)
    assert sum(x["count"] for x in layer.shapes_seen()) == seen, "binding computes nothing"
    first = call()
    assert same(first, layer.run(f)) and first is call.outputs and copy.copy(call) is call
    f["x"] *= -2
    f["i"][:] = f["i"][::-1].copy()
    assert same(call(), layer.run(f)) and call()["y"] is first["y"]


def test_arrays_of_the_device_are_used_where_they_are(layer: CudaProgram, device: Session) -> None:
    f = feeds(7)
    x = on_device(device, f)
    call = layer.bind(x)
    y, moved = call.outputs["y"], layer.counters["bytes_copied"]
    assert isinstance(y, DeviceArray)
    for scale in (1, -3):
        device.driver.h2d(x["x"].pointer, f["x"] * np.float32(scale))
        assert call()["y"] is y and same(call.outputs, layer.run(f | {"x": f["x"] * np.float32(scale)}))
    del x  # the call keeps them alive
    gc.collect()
    assert same(call(), layer.run(f | {"x": f["x"] * np.float32(-3)}))
    copied = {n: f[n].nbytes for n in f}  # runs on the host's arrays copy inputs, bound ones nothing
    assert layer.counters["bytes_copied"] == moved + 3 * sum(copied.values())


def test_the_callers_outputs_and_stream(layer: CudaProgram, device: Session) -> None:
    f = feeds(6)
    want = layer.run(f)
    z, wide = DeviceArray(device, (6, 8), "float32", 4), np.zeros((6, 72), np.float32)
    got = layer.bind(f, {"y": wide[:, ::2], "z": z})()
    assert got["z"] is z and same(got, want) and not wide[:, 1::2].any()
    with device.use() as driver:
        stream = driver.stream()
    legacy = 1  # cannot capture: the capture uses a separate stream
    for s in (stream, legacy):
        call = layer.bind(on_device(device, f), stream=s)
        call()
        assert call.outputs["y"].stream == s and same(call(), want)
    host = layer.bind(f, stream=stream)
    assert same(host(), want), "outputs on the host are waited for"
    del call, host
    with device.use() as driver:
        driver.synchronize(stream)
        driver.free_stream(stream)


def test_a_call_that_goes_while_it_is_at_work(layer: CudaProgram, device: Session) -> None:
    f = feeds(6)
    with device.use() as driver:
        stream = driver.stream()
    out = out_of(device, 6, stream)
    call = layer.bind(on_device(device, f), out, stream=stream)
    call()
    del call
    gc.collect()
    assert same(out, layer.run(f))
    with device.use() as driver:
        driver.free_stream(stream)


COUNTING_KERNEL = f"""{PRELUDE}PD_KERNEL(counted, 32, 1)(const float *x, float *y, uint32_t *counters, int64_t n) {{
  pd_grid_begin();
  if (pd_last_block(counters, (int)n))
    for (int64_t i = 0; i < n; i++) pd_stg(y + i * 32 + pd_tid(), pd_ldg(x + i * 32 + pd_tid()));
}}
PD_EXPORT(counted, 32);
"""


def test_counters_are_zero_before_a_call_on_another_stream(device: Session) -> None:
    """The counters are made on the context's stream; the call uses another one."""
    counted = kernel_of_text("counted", COUNTING_KERNEL, 3, 1, Block(32))
    only = Candidate("counted", ("x", "y", COUNTERS), (B,), B, block=Block(32), workspace=Index.of(16))
    program: Any = build_program(one_launch(only, kernels=(counted,)), target="cuda:emulated")
    x = {"x": np.random.default_rng(1).standard_normal((5, 32)).astype(np.float32)}
    with device.use() as driver:
        stream = driver.stream()
    call = program.bind(on_device(device, x), stream=stream)
    assert same(call(), {"y": x["x"]})
    del call
    with device.use() as driver:
        driver.synchronize(stream)
        driver.free_stream(stream)


def test_a_stream_that_captures_is_refused(layer: CudaProgram, device: Session) -> None:
    """The graph would use memory of a context that other calls use, and events that cannot be waited for."""
    x, cuda, graph = on_device(device, feeds(6)), ctypes.CDLL(device.library), ctypes.c_void_p()
    with device.use() as driver:
        stream = driver.stream()
        out = out_of(device, 6, stream)
        call = layer.bind(x, out, stream=stream)
        assert cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 1) == 0
        try:
            given, new = lambda: layer.run(x, out, stream=stream), lambda: layer.run(x, stream=stream)
            for work in (call, given, new, lambda: layer.bind(x, stream=stream)):  # making outputs would end it
                with pytest.raises(InputError, match="the stream is capturing a graph"):
                    work()
        finally:
            assert cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0, "it goes on"
            assert cuda.cuGraphDestroy(graph) == 0
    want = layer.run(feeds(6))
    assert same(call(), want) and same(layer.run(x, out, stream=stream), want)
    del call
    with device.use() as driver:
        driver.free_stream(stream)


@pytest.mark.parametrize("order", [slow((0, 1)), (1, 0)])
def test_calls_of_several_shapes_side_by_side_freed_in_any_order(
    layer: CudaProgram, device: Session, order: tuple[int, int]
) -> None:
    fed = [feeds(3), feeds(40)]
    for f in (*fed, fed[0]):
        layer.run(f)
    calls: list[Any] = [layer.bind(f) for f in fed]
    for _ in range(2):
        for call, f in zip(calls, fed, strict=True):
            f["x"] += 1
            assert same(call(), layer.run(f))
    del call
    contexts = layer.counters["contexts"]
    for k in order:
        gc.collect()
        before, calls[k] = used(device), None
        gc.collect()
        assert before - used(device) >= 65536, "a graph goes with its call"
        assert all(same(c(), layer.run(f)) for c, f in zip(calls, fed, strict=True) if c is not None)
    repeated = layer.bind(fed[1])
    assert same(repeated(), layer.run(fed[1])) and layer.counters["contexts"] == contexts


def test_caches_grow_in_place(device: Session) -> None:
    shapes = {"p": ("float32", ["P", 4]), "x": ("float32", ["L", 4])}
    program: Any = polydyn.compile(model([node("Concat", "p x", "q", axis=0)], shapes, ["q"]), target="cuda:emulated")
    cache = DeviceArray.of(device, np.zeros((4, 4), np.float32))

    def rows(n: int) -> Any:
        said = cache.__cuda_array_interface__ | {"shape": (n, 4)}
        return type("Rows", (), {"__cuda_array_interface__": said})()

    row = DeviceArray.of(device, np.ones((1, 4), np.float32))
    calls = [program.bind({"p": rows(n), "x": row}, {"q": rows(n + 1)}) for n in range(4)]
    moved = program.counters["bytes_copied"]
    for n, call in enumerate(calls):
        device.driver.h2d(row.pointer, np.full((1, 4), n + 1, np.float32))
        call()
    assert np.array_equal(cache.numpy(), np.repeat(np.arange(1, 5, dtype=np.float32), 4).reshape(4, 4))
    assert program.counters["bytes_copied"] == moved + 4 * 16, "what is in the cache stays there"


# -- checks
# -------------------------------------------------------------------------------------------------------------


def test_indices_are_checked_by_every_call(layer: CudaProgram, device: Session) -> None:
    f, good, bad = feeds(4), feeds(4)["i"], np.array([0, 5, 1, 1])
    x = on_device(device, f)
    base = DeviceArray.of(device, np.concatenate([good[:1], good]))
    said = base.__cuda_array_interface__ | {"shape": (4,), "data": (base.pointer + 8, False)}
    odd = type("Odd", (), {"__cuda_array_interface__": said})()  # not aligned: the graph copies it

    def upload(to: int) -> Callable[[np.ndarray], None]:
        return lambda indices: device.driver.h2d(to, indices)

    for fed, change in (
        (f, lambda indices: np.copyto(f["i"], indices)), (x, upload(x["i"].pointer)),
        (x | {"i": odd}, upload(base.pointer + 8)),
    ):  # fmt: skip
        call = layer.bind(fed)
        assert same(call(), layer.run(feeds(4)))
        change(bad)
        with pytest.raises(InputError, match="element 1 is 5"):
            call()
        change(good)
        assert same(call(), layer.run(feeds(4)))


def test_what_cannot_be_bound_is_refused(layer: CudaProgram, device: Session) -> None:
    f = feeds(4)
    odd = np.frombuffer(b"x" + f["x"].tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 8)
    before, memory = layer.counters["contexts"], used(device)
    for name, wrong in (("x", odd), ("i", f["i"].tolist())):
        with pytest.raises(InputError, match=f"'{name}' cannot be bound"):
            layer.bind(f | {name: wrong})
    for fed, out, message in (
        (f | {"x": f["x"][:3]}, {}, "axis 0 is 4, but B"), ({"x": f["x"]}, {}, "'i' is missing"),
        (f, {"y": np.zeros((4, 35), np.float32)}, "shape"), (f, {"z": f["x"]}, "share memory"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            layer.bind(fed, out)
    assert layer.counters["contexts"] <= before + 1 and used(device) <= memory + 1_000_000
    assert same(layer.bind(f)(), layer.run(f))


def test_a_record_is_of_one_shape(layer: CudaProgram, device: Session) -> None:
    """Below Python: changed sizes invalidate the recording; it is never replayed for others."""
    f, other = feeds(4), feeds(5)
    with device.use():
        context = layer._take_ready(device)
        call, replay = Call(layer, context, f, {}, 0), context.replay(0, False)
        for resized in (True, False):
            call = Call(layer, context, f, {}, 0)
            assert replay() == USAGE
            context.record(call.inputs, call.outputs)
            assert replay() == 0 and same(call.results(), layer.run(f))
            if resized:
                Call(layer, context, other, {}, 0)
            else:
                context.run_on(call.inputs, call.outputs, 0, False)
            assert replay() == USAGE
        context._cuda = object()
        with pytest.raises(ArtifactError, match="compile it again"):
            context.record(call.inputs, call.outputs)
        context._cuda = layer._cuda.library
        layer._idle.append(context)


# -- failures
# -----------------------------------------------------------------------------------------------------------


def test_a_driver_without_graphs(layer: CudaProgram, device: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    f = feeds(4)
    layer.run(f)
    before = used(device)
    monkeypatch.setenv("PDEMU_GRAPHS", "0")
    with pytest.raises(DeviceError, match=r"cuGraphCreate failed: operation not supported .*801"):
        layer.bind(f)
    assert used(device) == before
    monkeypatch.delenv("PDEMU_GRAPHS")
    assert same(layer.bind(f)(), layer.run(f))


def test_no_memory_for_the_graph(layer: CudaProgram, device: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    f = feeds(4)
    monkeypatch.setattr(layer, "graphs", 0)  # cached ones would make room
    layer.run(f)
    before = used(device)
    monkeypatch.setenv("PDEMU_MEMORY", str(before + 60_000))
    with pytest.raises(DeviceMemoryError, match=r"cuGraphInstantiateWithFlags failed: out of memory .* \d+ nodes"):
        layer.bind(f)
    assert used(device) == before
    monkeypatch.delenv("PDEMU_MEMORY")
    assert same(layer.bind(f)(), layer.run(f))


def test_a_launch_that_is_refused_ends_the_recording() -> None:
    small = replace(version("a", Index.of(1)), conditions=((B, "<=", Index.of(2)),))
    wide = with_block(version("a", Index.of(1)), threads=64)
    program: Any = build_program(one_launch(small, wide, kernels=(add("a"),)), target="cuda:emulated")
    x = np.zeros((3, 32), np.float32)
    for _ in range(2):
        with pytest.raises(DeviceError, match="cuGraphAddKernelNode failed: too many resources"):
            program.bind({"x": x})
    call = program.bind({"x": x[:2]})  # on the same stream
    assert (call()["y"] == 1).all() and program.counters["contexts"] == 1


def test_a_failing_kernel_takes_all_bound_calls_with_it(device: Session) -> None:
    bad, good = shift(), relu()
    x, eight = np.zeros(101, np.float32), np.ones((2, 8), np.float32)
    doomed, fine = bad.bind({"x": x}), good.bind({"x": eight})
    assert np.array_equal(fine()["y"], eight)
    before = device.generation
    with pytest.raises(DeviceLostError, match="out-of-bounds global access"):
        doomed()
    assert device.generation == before + 1
    for lost in (doomed, fine):
        with pytest.raises(DeviceLostError, match="bind it again"):
            lost()
    check(good, 3)  # frees the lost contexts and loads again
    with pytest.raises(DeviceLostError, match="bind it again"):
        fine()
    recovered = good.bind({"x": eight})
    del doomed, lost, fine
    gc.collect()
    check(good, 2)
    assert np.array_equal(recovered()["y"], eight) and device.generation == before + 1
    detached = bad.bind({"x": DeviceArray.of(device, x)}, stream=2)
    with pytest.raises(DeviceLostError, match="out-of-bounds"):
        detached()["y"].numpy()
    check(good, 2)


def test_a_context_that_another_library_destroyed(device: Session) -> None:
    program = relu()
    x = np.ones((2, 8), np.float32)
    call = program.bind({"x": x})
    ctypes.CDLL(device.library).cuDevicePrimaryCtxReset_v2(0)
    with pytest.raises(DeviceError, match="invalid device context"):
        call()
    device.driver.renew()
    with pytest.raises(DeviceLostError, match="bind it again"):
        call()
    del call
    gc.collect()
    assert np.array_equal(program.bind({"x": x})()["y"], x)


# -- repeated runs -----------------------------------------------------------------------------------------------------


def runs(program: CudaProgram, run: Callable[[], Any]) -> tuple[int, int]:
    """Return how many runs were recorded, and how many were replayed, during ``run``."""
    before = program.counters
    run()
    return tuple(program.counters[n] - before[n] for n in ("recorded", "replayed"))  # type: ignore[return-value]


@pytest.fixture
def alone(device: Session) -> CudaProgram:
    """Return a program with one context that has run nothing."""
    return relu()


def rows(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((n, 8)).astype(np.float32)}


def right(program: CudaProgram, f: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(program.run(f)["y"], np.maximum(f["x"], 0), rtol=1e-6)


def test_a_run_that_comes_again_is_one_launch(layer: CudaProgram, device: Session) -> None:
    f = feeds(11)
    want, moved = layer.run(f), layer.counters["bytes_copied"]
    x, out = on_device(device, f), out_of(device, 11)
    assert runs(layer, lambda: same(layer.run(f), want)) == (1, 1), "the second time"
    copied = layer.counters["bytes_copied"] - moved
    found: dict[str, np.ndarray] = {}
    for seed in (1, 2):
        f.update(feeds(11, seed))  # other arrays on the host, with other contents
        assert runs(layer, lambda: found.update(layer.run(f))) == (0, 1)
        assert np.array_equal(found["z"], f["table"][f["i"]] + f["x"])
    assert layer.counters["bytes_copied"] - moved == 3 * copied
    wrong = f | {"i": np.full(11, 5)}
    with pytest.raises(InputError, match="element 0 is 5"):
        layer.run(wrong)
    device.driver.h2d(x["i"].pointer, f["i"])
    assert runs(layer, lambda: [layer.run(x, out) for _ in range(3)]) == (1, 2), "arrays on the device where they are"
    assert runs(layer, lambda: layer.run(x, out_of(device, 11))) == (0, 0), "another output"
    for n in x:
        device.driver.h2d(x[n].pointer, f[n])
    assert runs(layer, lambda: layer.run(x, out)) == (0, 1) and same(out, layer.run(f))
    device.driver.h2d(x["i"].pointer, wrong["i"])
    with pytest.raises(InputError, match="element 0 is 5"):
        layer.run(x, out)


def test_few_graphs_are_kept_however_calls_go_round(alone: CudaProgram, device: Session) -> None:
    alone.graphs = 2
    for _ in range(2):
        right(alone, rows(1))
        right(alone, rows(2))
    assert alone.counters["graphs"] == 2 and alone.counters["graph_nodes"] >= 6
    sizes = (3, 1, 2)
    assert runs(alone, lambda: [right(alone, rows(n)) for _ in range(4) for n in sizes]) == (0, 8)
    assert runs(alone, lambda: [right(alone, rows(n, n)) for n in (3, 3, 2, 3)]) == (1, 3), "in place of the oldest"
    right(alone, rows(500))  # more memory is needed: graphs of the old memory are dropped
    assert alone.counters["graphs"] == 0
    assert runs(alone, lambda: [right(alone, rows(500, k)) for k in range(2)]) == (1, 2)
    before, alone.graphs = used(device), 0
    assert runs(alone, lambda: right(alone, rows(500))) == (0, 0) and before - used(device) >= 65536
    with pytest.raises(InputError, match="graphs is 65"):
        alone.graphs = 65


def test_graphs_are_kept_while_they_take_few_bytes(alone: CudaProgram) -> None:
    def sized(*sizes: int) -> None:
        for n in sizes:
            right(alone, rows(n, n))
            right(alone, rows(n))

    sized(3)
    most = alone.counters["graph_bytes"]
    assert most == alone.counters["graph_nodes"] * 16384 > 0 and alone.graph_bytes == 64 << 20
    alone.graph_bytes = 2 * most
    assert runs(alone, lambda: sized(2, 1)) == (2, 2) and alone.counters["graph_bytes"] == 2 * most
    assert runs(alone, lambda: [right(alone, rows(n)) for _ in range(3) for n in (4, 2, 1)]) == (0, 6), "round in three"
    alone.graph_bytes = most
    assert runs(alone, lambda: right(alone, rows(1))) == (0, 1) and alone.counters["graphs"] == 1, "the oldest go"
    alone.graph_bytes = most - 1
    assert runs(alone, lambda: sized(1, 1)) == (0, 0), "it would be too large"
    assert alone.counters["not_recorded"] > 0 and alone.counters["graphs"] == 0
    alone.graph_bytes = most
    assert runs(alone, lambda: right(alone, rows(1))) == (1, 1)
    with pytest.raises(InputError, match="graph_bytes is -1"):
        alone.graph_bytes = -1


@pytest.mark.parametrize("lacking", [("PDEMU_GRAPHS", "0"), ("PDEMU_MEMORY", "")])
def test_without_graphs_or_memory_for_them_runs_are_plain(
    alone: CudaProgram, device: Session, monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, str]
) -> None:
    right(alone, rows(3))
    monkeypatch.setenv(lacking[0], lacking[1] or str(used(device) + 60_000))
    assert runs(alone, lambda: [right(alone, rows(3, k)) for k in range(3)]) == (0, 0)
    assert alone.counters["not_recorded"] == 1 and alone.counters["graphs"] == 0


# -- callers -----------------------------------------------------------------------------------------------------------


def test_threads_share_a_call_and_bind_their_own(layer: CudaProgram) -> None:
    f = feeds(5)
    shared, want = layer.bind(f), layer.run(f)

    def work(k: int) -> bool:
        mine = feeds(1 + k % 3, seed=k)
        call = layer.bind(mine)
        return same(shared(), want) and same(call(), layer.run(mine)) and same(call(), call())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))
    assert layer.counters["contexts"] <= 14

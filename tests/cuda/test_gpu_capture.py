"""Stream capture and graphs of the CPU libcuda, compared with the driver's documentation, rejections included."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from polydyn.gpu import cpu_libcuda
from polydyn.gpu.emulator import compile_emulated
from polydyn.gpu.errors import DeviceError, DeviceLostError
from polydyn.runtime.cuda.driver import Driver

INVALID_VALUE, INVALID_HANDLE, ILLEGAL_STATE, NO_SUPPORT = 1, 400, 401, 801
UNCAPTURABLE, BAD_CAPTURE, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 900, 901, 905, 906, 907, 908
GLOBAL, THREAD_LOCAL, RELAX = 0, 1, 2
ADD_ONE = """
#include "pd_device.cuh"
PD_KERNEL(add_one, 32, 1)(float *x) { pd_stg(x + pd_tid(), pd_ldg(x + pd_tid()) + 1.f); }
PD_EXPORT(add_one, 32);
"""


class Cuda(Driver):
    """The CPU driver, with calls that return their CUresult; integers are handles and addresses."""

    def __call__(self, name: str, *arguments: Any) -> int:
        self._enter()
        given = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
        code: int = getattr(self._cuda, name)(*given)
        return code

    def begin(self, stream: int, mode: int = THREAD_LOCAL) -> int:
        return self("cuStreamBeginCapture_v2", stream, ctypes.c_int(mode))

    def end(self, stream: int) -> tuple[int, int]:
        graph = ctypes.c_void_p()
        code = self("cuStreamEndCapture", stream, ctypes.byref(graph))
        return code, graph.value or 0

    def status(self, stream: int) -> int:
        found = ctypes.c_int(-1)
        return self("cuStreamIsCapturing", stream, ctypes.byref(found)) or found.value

    def instantiate(self, graph: int, flags: int = 0) -> tuple[int, int]:
        made = ctypes.c_void_p()
        code = self("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_uint64(flags))
        return code, made.value or 0


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    """Open a separate driver, whose contexts break without affecting others."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    shutil.copyfile(cpu_libcuda.build(), path)
    ctypes.CDLL(str(path), os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    return Cuda(library=str(path))


@pytest.fixture
def stream(cuda: Cuda) -> Iterator[int]:
    made = cuda.stream()
    yield made
    assert cuda.status(made) == 0, "every capture was ended"
    cuda.free_stream(made)


def elsewhere(work: Callable[[], int]) -> int:
    """Return a call's result from another thread."""
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


def test_work_is_kept_and_replayed_in_order(cuda: Cuda, stream: int) -> None:
    function = cuda.get_function(cuda.load_module(compile_emulated(ADD_ONE).read_bytes()), "add_one")
    p, out, host = cuda.alloc(128), np.full(32, 7, np.float32), np.zeros(32, np.float32)
    free = cuda.memory()[0]
    assert cuda.begin(stream) == 0 and cuda.status(stream) == 1
    cuda.h2d(p, host, stream)
    for _ in range(2):
        cuda.launch(function, (1, 1, 1), 32, 0, [p], stream)
    cuda.d2h(out, p, stream)
    code, graph = cuda.end(stream)
    assert code == 0 and (out == 7).all(), "nothing has run"
    count = ctypes.c_size_t()
    assert cuda("cuGraphGetNodes", graph, None, ctypes.byref(count)) == 0 and count.value == 4
    code, made = cuda.instantiate(graph)
    assert code == 0 and cuda.instantiate(graph, 16)[0] == INVALID_VALUE and cuda.memory()[0] < free
    assert cuda("cuGraphDestroy", graph) == 0 and cuda("cuGraphDestroy", graph) == INVALID_VALUE
    for add in (0, 5):
        host[:] = add
        assert cuda("cuGraphLaunch", made, stream) == 0 == cuda("cuStreamSynchronize", stream)
        assert (out == add + 2).all()
    assert cuda.begin(stream) == 0
    assert cuda("cuGraphLaunch", made, stream) == NO_SUPPORT and cuda.end(stream) == (BAD_CAPTURE, 0)
    assert cuda("cuGraphExecDestroy", made) == 0 and cuda("cuGraphExecDestroy", made) == INVALID_VALUE
    assert cuda("cuGraphLaunch", made, stream) == INVALID_VALUE and cuda.memory()[0] == free
    cuda.free(p)


def test_an_empty_capture_is_a_graph(cuda: Cuda, stream: int) -> None:
    assert cuda.begin(stream) == 0 and cuda.begin(stream) == ILLEGAL_STATE
    code, graph = cuda.end(stream)
    assert code == 0 and graph and cuda.end(stream)[0] == ILLEGAL_STATE
    assert cuda("cuGraphDestroy", graph) == 0


UNSAFE = {
    "cuMemAlloc_v2": lambda a: (ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(64)),
    "cuMemFree_v2": lambda a: (a["p"],),
    "cuMemcpyHtoD_v2": lambda a: (a["p"], a["host"].ctypes.data, ctypes.c_size_t(4)),
    "cuMemcpyDtoH_v2": lambda a: (a["host"].ctypes.data, a["p"], ctypes.c_size_t(4)),
    "cuMemcpyDtoD_v2": lambda a: (a["p"], a["p"], ctypes.c_size_t(4)),
    "cuMemsetD8_v2": lambda a: (a["p"], ctypes.c_int(0), ctypes.c_size_t(4)),
    "cuStreamSynchronize": lambda a: (a["other"],),
    "cuStreamQuery": lambda a: (a["other"],),
    "cuEventSynchronize": lambda a: (a["event"],),
    "cuEventQuery": lambda a: (a["event"],),
    "cuModuleUnload": lambda a: (a["module"],),
}
"""Maps calls without a stream to their arguments."""
HOST_CALLS = {
    "cuMemHostAlloc": lambda a: (ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64), ctypes.c_int(0)),
    "cuMemFreeHost": lambda a: (a["pinned"],),
}
"""Calls that no mode allows."""


@pytest.fixture
def things(cuda: Cuda) -> dict[str, Any]:
    """Yield the objects for the calls; successful calls leave little behind."""
    pinned = ctypes.c_void_p()
    assert cuda("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(64), ctypes.c_int(0)) == 0
    module = cuda.load_module(compile_emulated(ADD_ONE).read_bytes())
    event, other = cuda.event(), cuda.stream()
    cuda.record(event, other)
    made = {"p": cuda.alloc(64), "host": np.zeros(16, np.float32), "pinned": pinned.value, "module": module}
    return made | {"event": event, "other": other}


def test_unsafe_calls_end_the_capture(cuda: Cuda, stream: int, things: dict[str, Any]) -> None:
    for mode in (GLOBAL, THREAD_LOCAL):
        for name, arguments in (UNSAFE | HOST_CALLS).items():
            assert cuda.begin(stream, mode) == 0
            assert (cuda(name, *arguments(things)), cuda.status(stream)) == (UNCAPTURABLE, 2), name
            assert cuda("cuMemsetD8Async", things["p"], ctypes.c_int(0), ctypes.c_size_t(4), stream) == BAD_CAPTURE
            assert cuda.end(stream) == (BAD_CAPTURE, 0)
            assert cuda("cuStreamSynchronize", stream) == 0, "the stream is as before"
    for name, arguments in HOST_CALLS.items():
        assert cuda.begin(stream, RELAX) == 0
        assert cuda(name, *arguments(things)) == UNCAPTURABLE and cuda.end(stream)[0] == BAD_CAPTURE, name
    for name, arguments in (HOST_CALLS | dict(reversed(UNSAFE.items()))).items():  # p is freed last
        assert cuda.begin(stream, RELAX) == 0
        assert name in HOST_CALLS or cuda(name, *arguments(things)) == 0, name
        assert cuda("cuGraphDestroy", cuda.end(stream)[1]) == 0


def test_waiting_for_what_captures_is_refused_in_every_mode(cuda: Cuda, stream: int) -> None:
    calls = (("cuStreamSynchronize", stream), ("cuStreamQuery", stream), ("cuCtxSynchronize",))
    for mode in (GLOBAL, THREAD_LOCAL, RELAX):
        for call in calls:
            assert cuda.begin(stream, mode) == 0
            assert cuda(*call) == UNCAPTURABLE and cuda.end(stream) == (BAD_CAPTURE, 0)
    assert cuda.begin(stream) == 0
    assert elsewhere(lambda: cuda("cuCtxSynchronize")) == UNCAPTURABLE, "whoever it is that waits for the whole device"
    assert cuda.end(stream) == (BAD_CAPTURE, 0) and cuda("cuCtxSynchronize") == 0


def test_other_threads(cuda: Cuda, stream: int, things: dict[str, Any]) -> None:
    def copy() -> int:
        return cuda("cuMemcpyHtoD_v2", *UNSAFE["cuMemcpyHtoD_v2"](things))

    def relaxed() -> int:
        mode = ctypes.c_int(RELAX)
        assert cuda("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0 and mode.value == GLOBAL
        return copy()

    for mode, work, answer in (
        (THREAD_LOCAL, copy, 0), (RELAX, copy, 0), (GLOBAL, copy, UNCAPTURABLE), (GLOBAL, relaxed, 0),
    ):  # fmt: skip
        assert cuda.begin(stream, mode) == 0
        assert elsewhere(work) == answer
        code, graph = cuda.end(stream)
        assert code == (BAD_CAPTURE if answer else 0) and (not graph or cuda("cuGraphDestroy", graph) == 0)
    assert cuda.begin(stream) == 0
    assert elsewhere(lambda: cuda.end(stream)[0]) == WRONG_THREAD
    code, graph = cuda.end(stream)
    assert code == 0 == cuda("cuGraphDestroy", graph)
    assert cuda("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(3))) == INVALID_VALUE


def test_the_legacy_stream(cuda: Cuda, stream: int, things: dict[str, Any]) -> None:
    assert [cuda.begin(s) for s in (0, 1)] == [UNCAPTURABLE] * 2 and cuda.begin(2) == NO_SUPPORT
    work = ("cuMemsetD8Async", things["p"], ctypes.c_int(0), ctypes.c_size_t(4), 1)
    assert cuda.begin(stream) == 0
    assert cuda(*work) == 0, "a stream that does not wait for the legacy one is not disturbed"
    code, graph = cuda.end(stream)
    assert code == 0 == cuda("cuGraphDestroy", graph)
    blocking = cuda._create("cuStreamCreate", 0)
    for call in (work, ("cuMemcpyHtoD_v2", *UNSAFE["cuMemcpyHtoD_v2"](things)), ("cuStreamSynchronize", 0)):
        assert cuda.begin(blocking) == 0
        assert cuda.status(0) == IMPLICIT and cuda.status(blocking) == 1
        assert elsewhere(lambda call=call: cuda(*call)) == IMPLICIT and cuda.end(blocking) == (BAD_CAPTURE, 0)
    cuda.free_stream(blocking)


def test_events(cuda: Cuda, stream: int, things: dict[str, Any]) -> None:
    assert cuda.begin(stream) == 0
    assert cuda("cuStreamWaitEvent", stream, things["event"], 0) == ISOLATION and cuda.end(stream) == (BAD_CAPTURE, 0)
    mine = cuda.event()
    assert cuda.begin(stream) == 0
    assert cuda("cuEventRecord", mine, stream) == 0 == cuda("cuStreamWaitEvent", stream, mine, 0)
    assert [cuda(n, mine) for n in ("cuEventQuery", "cuEventSynchronize")] == [CAPTURED_EVENT] * 2
    assert cuda("cuStreamWaitEvent", things["other"], mine, 0) == NO_SUPPORT, "streams do not join a capture here"
    code, graph = cuda.end(stream)
    assert code == 0 == cuda("cuGraphDestroy", graph)
    cuda.record(mine, stream)
    assert cuda("cuEventSynchronize", mine) == 0
    cuda.free_event(mine)


def test_nothing_survives_its_context(cuda: Cuda, things: dict[str, Any]) -> None:
    stream, function = cuda.stream(), cuda.get_function(things["module"], "add_one")
    cuda.renew()
    p, event = cuda.alloc(128), things["event"]
    for call in (
        ("cuStreamSynchronize", stream), ("cuEventRecord", event, None), ("cuEventSynchronize", event),
        ("cuModuleUnload", things["module"]), ("cuFuncSetAttribute", function, 8, 0), ("cuStreamDestroy_v2", stream),
        ("cuMemsetD8Async", p, ctypes.c_int(0), ctypes.c_size_t(4), stream), ("cuStreamWaitEvent", None, event, 0),
    ):  # fmt: skip
        assert cuda(*call) == INVALID_HANDLE, call
    with pytest.raises(DeviceError, match="invalid resource handle"):
        cuda.launch(function, (1, 1, 1), 32, 0, [p])
    assert cuda("cuMemFreeHost", things["pinned"]) == INVALID_VALUE == cuda("cuMemFree_v2", things["p"])
    cuda.free(p)


class Side(ctypes.Structure):
    """Half of a CUDA_MEMCPY3D, of device memory."""

    _fields_ = (
        ("at", ctypes.c_size_t * 4), ("kind", ctypes.c_uint32), ("host", ctypes.c_void_p), ("device", ctypes.c_uint64),
        ("rest", ctypes.c_size_t * 4),
    )  # fmt: skip


class Move(ctypes.Structure):
    """A CUDA_MEMCPY3D."""

    _fields_ = (("source", Side), ("to", Side), ("extent", ctypes.c_size_t * 3))


@pytest.mark.parametrize("ordered", [True, False])
def test_branches_of_a_graph_that_race_break_the_context(cuda: Cuda, ordered: bool) -> None:
    """Two copies to one address, with an edge between them and without it."""
    p, stream, graph, made = cuda.alloc(12), cuda.stream(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.h2d(p, np.arange(3, dtype=np.float32))
    assert cuda("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint32(0)) == 0
    nodes = (ctypes.c_void_p * 2)()
    for k in range(2):
        size = ctypes.sizeof(ctypes.c_void_p)
        move = Move(Side(kind=2, device=p + 4 * k), Side(kind=2, device=p + 8), (4, 1, 1))
        after = ctypes.c_size_t(k if ordered else 0)
        node = ctypes.byref(nodes, k * size)
        context = ctypes.c_void_p(cuda.context)
        assert cuda("cuGraphAddMemcpyNode", node, graph, nodes, after, ctypes.byref(move), context) == 0
    code, made = cuda.instantiate(graph.value or 0)
    assert code == 0 == cuda("cuGraphLaunch", made, stream)
    if ordered:
        cuda.synchronize(stream)
        got = np.zeros(3, np.float32)
        cuda.d2h(got, p)
        assert got.tolist() == [0, 1, 1]
        return
    with pytest.raises(DeviceLostError, match="branches of a graph race"):
        cuda.synchronize(stream)
    cuda.renew()


@pytest.mark.parametrize("freed", ["memory", "pinned memory", "module"])
def test_a_graph_that_uses_what_is_gone_breaks_the_context(cuda: Cuda, things: dict[str, Any], freed: str) -> None:
    stream = cuda.stream()
    function = cuda.get_function(things["module"], "add_one")
    p, pinned = cuda.alloc(128), things["pinned"]
    assert cuda.begin(stream) == 0
    if freed == "module":
        cuda.launch(function, (1, 1, 1), 32, 0, [p], stream)
    else:
        assert cuda("cuMemcpyHtoDAsync_v2", p, pinned, ctypes.c_size_t(64), stream) == 0
    code, made = cuda.instantiate(cuda.end(stream)[1])
    assert code == 0 == cuda("cuGraphLaunch", made, stream)
    cuda.synchronize(stream)
    if freed == "memory":
        cuda.free(p)
    elif freed == "module":
        assert cuda("cuModuleUnload", things["module"]) == 0
    else:
        assert cuda("cuMemFreeHost", pinned) == 0
    assert cuda("cuGraphLaunch", made, stream) == 0
    with pytest.raises(DeviceLostError, match=r"memory that was freed|module was unloaded"):
        cuda.synchronize(stream)
    assert cuda("cuGraphExecDestroy", made) == INVALID_VALUE, "it went with its context"

"""Programs for a CUDA device that fail, on the CPU libcuda: a clear error, and the context recovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import polydyn
from polydyn.codegen.kernel import Block
from polydyn.compiler import compile_artifact
from polydyn.errors import FallbackWarning, PolydynError, ScheduleError, UnsupportedError
from polydyn.gpu.errors import DeviceLostError, DeviceMemoryError, DriverMissingError, WrongArchitectureError
from polydyn.graph.ir import SymbolSource
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.program.verify import verify_host_plan
from polydyn.runtime.cuda import session
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.images import ImageSource
from polydyn.runtime.cuda.native import _Images
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.schedules.decision import cheapest
from polydyn.schedules.index import Index
from tests.support.cuda_programs import check, relu, shift, with_block
from tests.support.programs import B, buffers, kernel_of_text
from tests.support.tiny import model, node


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield open_session()


def test_a_failing_kernel_breaks_nothing_for_long(device: Session) -> None:
    bad, good = shift(), relu()
    x = np.arange(100, dtype=np.float32)
    assert np.array_equal(bad.run({"x": x})["y"], x)
    check(good, 3)
    kept, before = DeviceArray.of(device, x), device.generation
    with pytest.raises(DeviceLostError, match="out-of-bounds global access"):
        bad.run({"x": np.zeros(101, np.float32)})
    assert device.generation == before + 1
    with pytest.raises(DeviceLostError, match="the memory was lost"):
        kept.numpy()
    with pytest.raises(DeviceLostError, match="the memory was lost"):
        bad.run({"x": kept})
    assert device.generation == before + 1, "what was lost breaks nothing that is new"
    check(good, 5)  # loads its kernels and weights again
    assert np.array_equal(bad.run({"x": x})["y"], x)
    assert good.counters["contexts"] == 1


def test_another_driver_of_the_process_may_renew_the_context(device: Session) -> None:
    """All share the primary context: programs and arrays detect any reset of it."""
    good, x = relu(), np.arange(100, dtype=np.float32)
    check(good, 2)
    kept, before = DeviceArray.of(device, x), device.generation
    Driver(library=device.library).renew()
    assert device.generation == before + 1
    with pytest.raises(DeviceLostError, match="the memory was lost"):
        kept.numpy()
    check(good, 3)
    assert np.array_equal(DeviceArray.of(device, x).numpy(), x)


def test_a_detached_run_reports_later(device: Session) -> None:
    bad, good = shift(), relu()
    x = DeviceArray.of(device, np.zeros(101, np.float32))
    with pytest.raises(DeviceLostError, match="out-of-bounds"):
        bad.run({"x": x}, stream=2)["y"].numpy()
    check(good, 2)


def test_callers_of_other_threads_go_on(device: Session) -> None:
    """A thread that uses the broken context gets DeviceLostError, never a wrong result, and may call again."""
    bad, good = shift(), relu()
    check(good, 1)
    results: list[str] = []
    go_on = threading.Event()

    def caller() -> None:
        while not go_on.is_set():
            try:
                check(good, 4)
                results.append("right")
            except DeviceLostError:
                results.append("lost")

    thread = threading.Thread(target=caller)
    thread.start()
    try:
        for _ in range(5):
            with pytest.raises(DeviceLostError):
                bad.run({"x": np.zeros(101, np.float32)})
    finally:
        go_on.set()
        thread.join()
    check(good, 4)
    assert results


def test_out_of_memory_names_the_bytes_and_smaller_calls_work(monkeypatch: pytest.MonkeyPatch) -> None:
    program = relu()
    check(program, 2)
    monkeypatch.setenv("PDEMU_MEMORY", "1000000")
    with pytest.raises(DeviceMemoryError, match="bytes for intermediates"):
        check(program, 100_000)
    check(program, 3)
    fresh = relu()
    monkeypatch.setenv("PDEMU_MEMORY", "10")
    with pytest.raises(DeviceMemoryError, match="bytes of weights"):
        check(fresh, 1)
    monkeypatch.delenv("PDEMU_MEMORY")
    check(fresh, 1)


def test_the_arena_grows_and_stays() -> None:
    program = relu()
    sizes = []
    for n in (2, 50, 7, 99, 2):
        check(program, n)
        sizes.append(program.counters["arena_bytes"])
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4] and sizes[0] % 256 == 0


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    program = relu()
    monkeypatch.setenv("POLYDYN_LIBCUDA", "libno-such-cuda.so.1")
    with pytest.raises(DriverMissingError, match="no CUDA driver"):
        program.run({"x": np.zeros((1, 8), np.float32)})
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    check(program, 2)  # a driver that is installed later is found


def test_wrong_architecture(device: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    program = relu()
    monkeypatch.setenv("PDEMU_SM", "75")
    with pytest.raises(WrongArchitectureError, match="no kernel image"):
        check(program, 1)
    monkeypatch.delenv("PDEMU_SM")
    check(program, 1)

    class Old:
        device_name, arch = "Tesla T4", 75

    with pytest.raises(WrongArchitectureError, match="sm_75, kernels need sm_80"):
        ImageSource(Old(), [], {}, {})  # type: ignore[arg-type]


def test_a_context_that_cannot_be_renewed_says_so(device: Session) -> None:
    class Dead:
        generation, deferred = 0, False

        def renew(self) -> None:
            raise DriverMissingError("the device fell off the bus")

    dead = session.Session(Dead(), "")  # type: ignore[arg-type]

    def lose() -> None:
        with dead.use(), dead.use():  # nested uses count once
            raise DeviceLostError("gone", code=719)

    with pytest.raises(DeviceLostError, match="gone"):
        lose()
    with pytest.raises(DeviceLostError, match="fell off the bus"):
        lose()


def test_a_kernel_that_cannot_be_had_is_the_failure_of_who_asked() -> None:
    class Source:
        def image(self, kernel: int) -> bytes:
            raise WrongArchitectureError(f"no kernel {kernel}")

    images = _Images(Source())  # type: ignore[arg-type]
    thread = threading.Thread(target=images.callback, args=(None, 3))
    thread.start()
    thread.join()
    assert images.failure() is None, "another thread's"
    assert images.callback(None, 4) is None and str(images.failure()).startswith("no kernel 4")
    assert images.failure() is None


def test_who_interrupts_the_loading_of_a_kernel_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a callback is lost: the program reports it, and works as before."""
    program = relu()

    def interrupted(self: ImageSource, kernel: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ImageSource, "image", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check(program, 2)
    check(program, 2)
    assert program.counters["contexts"] == 1


def test_threads_that_meet_a_new_context_keep_what_they_allocate(
    device: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(library=device.library)
    adopted: list[int] = []

    def retain() -> int:
        adopted.append(threading.get_ident())
        time.sleep(0.05)
        return Driver._retain(driver)

    driver.renew()
    monkeypatch.setattr(driver, "_retain", retain)
    driver._seen -= 1
    pointers: list[int] = []
    threads = [threading.Thread(target=lambda: pointers.append(driver.alloc(64))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(adopted) == 1
    for p in pointers:
        driver.free(p)


def test_malformed_device_plans_are_refused() -> None:
    version = Candidate("k", ("x",), (), B, B, "v", block=Block(32))
    launch = Launch((version,), B, B, label="l")
    plan = HostPlan(
        name="p", inputs=("x",), outputs=(), buffers=buffers(("x", "float32", (B,), "input")), constants={},
        sources=(SymbolSource("B", "x", 0),), guards=(), kernels=(kernel_of_text("k", "", 1, 0, Block(32)),),
        launches=(launch,), place="cuda",
    )  # fmt: skip
    verify_host_plan(plan)
    for bad, message in (
        (replace(version, block=None), "is not for cuda"),
        (replace(version, kernel="q"), "kernel 'q', which is not in the plan"),
        (replace(version, buffers=("y",)), "uses an unknown buffer"),
        (with_block(version, threads=2000), "blocks of 2000 threads"),
        (replace(version, symbols=(B,)), "1 symbols"),
        (replace(version, tasks=Index.of("Q")), "without a source"),
        (replace(version, conditions=((B, "!=", B),)), "unknown condition"),
        (replace(version, after=(replace(version, tasks=Index.of("Q")),)), "without a source"),
        (replace(version, after=(replace(version, after=(version,)),)), "something other than a single kernel"),
    ):  # fmt: skip
        with pytest.raises(PolydynError, match=message):
            verify_host_plan(replace(plan, launches=(replace(launch, candidates=(bad,)),)))
    with pytest.raises(ScheduleError, match="names kernel 1 of 1"):
        verify_host_plan(replace(plan, launches=(replace(launch, decision=cheapest(2)),)))
    with pytest.raises(UnsupportedError, match="unknown target cuda:sm_70"):
        polydyn.compile(model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"]), target="cuda:sm_70")


@pytest.mark.parametrize(
    ("op", "dtype", "said"),
    [
        ("Exp", "float64", "exp of float64"), ("Relu", "float64", "max of float64"), ("Sign", "int32", "sign of int32"),
        ("ReduceL2", "int64", "sqrt of float64"),
    ],
)  # fmt: skip
def test_an_operation_that_kernels_lack_is_named_with_its_node_and_left_to_onnx_runtime_on_request(
    op: str, dtype: str, said: str
) -> None:
    m = model([node(op, "x", "y")], {"x": (dtype, ["N", 4])}, ["y"], opset=18)
    with pytest.raises(UnsupportedError, match=f"{said} is not built for cuda:sm_80") as e:
        compile_artifact(m, target="cuda:sm_80")
    assert e.value.node == f"{op}_y" and e.value.remedy and "fallback='onnxruntime'" in e.value.remedy
    assert ("cast its inputs to float32" in e.value.remedy) == ("float64" in said)
    with pytest.warns(FallbackWarning, match=f"{op}_y .*{said}"):
        artifact, _ = compile_artifact(m, target="cuda:sm_80", options=polydyn.Options(fallback="onnxruntime"))
    assert any(f"{op}_y ({op}) runs in ONNX Runtime" in n for n in artifact.manifest["notes"])

"""Programs of several parts on the CPU libcuda: parts and bodies on the device, steps on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.errors import InputError, UnsupportedError
from polydyn.gpu.errors import DeviceLostError, DeviceMemoryError
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.parts import CudaPartsProgram
from polydyn.runtime.cuda.session import Session, open_session
from tests.program.test_control_flow import IF, f32, parsed
from tests.program.test_parts_from_c import CASES
from tests.program.test_recurrent import recurrent
from tests.support.cuda_programs import shift
from tests.support.marks import slow
from tests.support.tiny import model, node

Feeds = Mapping[str, Any]


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield open_session()


def compiled(m: onnx.ModelProto) -> CudaPartsProgram:
    program = polydyn.compile(m, target="cuda:emulated")
    assert isinstance(program, CudaPartsProgram)
    return program


@pytest.fixture(scope="module")
def picked() -> CudaPartsProgram:
    """Compile: rows of x by |h|, then the rows that a mask selects, then the positions of values above 1."""
    nodes = [
        node("Abs", "h", "a"), node("Gather", "x a", "g"), node("Exp", "g", "e"),
        node("NonZero", "m", "i"), node("Transpose", "i", "t"), node("GatherND", "e t", "v"),
        node("Greater", "v one", "c"), node("NonZero", "c", "j"),
    ]  # fmt: skip
    inputs = {"x": ("float32", ["H", "W"]), "h": ("int64", ["N"]), "m": ("bool", ["N", "W"])}
    return compiled(model(nodes, inputs, ["v", "j"], {"one": np.float32(1)}))


def feeds(h: int, w: int, n: int) -> dict[str, Any]:
    r = np.random.default_rng(h + n)
    x = r.standard_normal((h, w)).astype(np.float32)
    return {"x": x, "h": r.integers(1 - h, h, n), "m": r.random((n, w)) < 0.5}


def right(program: CudaPartsProgram, f: Feeds) -> None:
    got, want = program.run(f), np.exp(f["x"][np.abs(f["h"])])[f["m"]]
    np.testing.assert_allclose(got["v"], want, 1e-5)
    assert np.array_equal(got["j"], [*np.nonzero(got["v"] > 1)])


def test_only_what_a_step_reads_is_waited_for(picked: CudaPartsProgram) -> None:
    sizes = [(3, 4, 5), (31, 7, 33), (1, 1, 1), (4, 2, 0)]
    right(picked, feeds(*sizes[0]))
    before = picked.counters
    for s in sizes:
        right(picked, feeds(*s))
    after = picked.counters
    assert after["waits"] - before["waits"] == 2 * len(sizes), "one for what a step reads, one for the results"
    assert after["contexts"] == 1
    assert [t["name"] for t in picked.manifest["tensors"] if t["device"]] == ["e"]
    assert [n for n in picked.manifest["notes"] if "waits for the device" in n] == [
        "a call waits for the device after part 1, which writes v, c: non_zero of NonZero_j reads it",
        "a call waits for the device after part 2, which writes j: it is a result",
    ]


def test_a_part_that_was_not_waited_for_still_says_what_was_wrong(picked: CudaPartsProgram) -> None:
    f = feeds(3, 4, 5)
    with pytest.raises(InputError, match=r"an index in 'a' .* of size H, here 3: element 2 is 3"):
        picked.run(f | {"h": np.array([0, 1, -3, 2, 2])})
    right(picked, f)


def test_failures_of_the_device_leave_the_program_usable(
    picked: CudaPartsProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDEMU_MEMORY", "100000")
    with pytest.raises(DeviceMemoryError):
        picked.run(feeds(2, 3, 20_000))
    monkeypatch.delenv("PDEMU_MEMORY")
    right(picked, feeds(3, 4, 5))
    with pytest.raises(DeviceLostError):
        shift().run({"x": np.zeros(101, np.float32)})
    right(picked, feeds(3, 4, 5))  # opens its parts again


def test_what_stays_out_is_refused_by_name(picked: CudaPartsProgram, device: Session) -> None:
    f = feeds(3, 4, 5)
    with pytest.raises(UnsupportedError, match="input 'x' is in device memory"):
        picked.run(f | {"x": DeviceArray.of(device, f["x"])})


@pytest.mark.slow
def test_a_loop_whose_count_data_decide() -> None:
    program = compiled(
        parsed("""
    g (float[N] x, float[N] b) => (float[N] y, int64 k) {
        t = Constant <value = bool {1}> ()
        z = Constant <value = int64 {0}> ()
        big = Exp (b)
        y, k = Loop (, t, x, z) <
            body = body (int64 i, bool go, float[N] v, int64 c) => (bool on, float[N] w, int64 d) {
                w = Add (v, big)
                one = Constant <value = int64 {1}> ()
                d = Add (c, one)
                m = ReduceMax <keepdims = 0> (w)
                least = Constant <value = float {20}> ()
                on = Less (m, least)
            }>
    }""")
    )
    for n in (3, 1, 7):
        x, b = np.zeros(n, np.float32), np.linspace(0, 1, n, dtype=np.float32)
        got, steps = program.run({"x": x, "b": b}), int(np.ceil(20 / np.exp(b.max())))
        np.testing.assert_allclose(got["y"], steps * np.exp(b), 1e-5)
        assert got["k"] == steps
    notes = [n for n in program.manifest["notes"] if "waits for the device" in n]
    assert "iterate of Loop_3 waits for the device after every run of its body" in "\n".join(notes)


def test_what_a_loop_carries_stays_on_the_device() -> None:
    """Rows are carried on the device too, if kernels may write at their start: rows of 12 bytes are waited for."""
    program = compiled(
        parsed("""
    g (float[T, W] x, float[W] s) => (float[W] last, float[T, W] rows) {
        e = Exp (x)
        last, rows = Scan <num_scan_inputs = 1, body = b (float[W] a, float[W] v) => (float[W] c, float[W] r) {
            c = Add (a, v)
            r = Neg (c)
        }> (s, e)
    }""")
    )
    assert [t["name"] for t in program.manifest["tensors"] if t["device"]] == ["e"]
    for steps, width, waits in [(9, 4, 2), (9, 3, 10), (1, 8, 2), (0, 4, 1)]:
        x, s = np.random.default_rng(steps).random((steps, width), np.float32), np.ones(width, np.float32)
        before = program.counters.get("waits", 0)
        got, want = program.run({"x": x, "s": s}), s + np.exp(x).cumsum(0)
        np.testing.assert_allclose(got["last"], want[-1] if steps else s, 1e-5)
        np.testing.assert_allclose(got["rows"], -want, 1e-5)
        assert program.counters["waits"] - before == waits, (steps, width)
    notes = [n for n in program.manifest["notes"] if "waits for the device" in n]
    assert notes == [n for n in notes if "after the last run of its body" in n] and len(notes) == 1


MODELS = CASES | {
    "branches": (IF, [{"x": s * np.ones((2, 3), np.float32), "b": f32(2, 3)} for s in (1, -1)]),
    "backwards": (recurrent("RNN", hidden=4, direction="reverse"), [{"x": f32(t, b, 3)} for t, b in [(4, 2), (1, 1)]]),
}


@pytest.mark.parametrize("case", [*map(slow, ["counts", "bodies of parts", "recurrence", "branches", "backwards"])])
def test_control_flow_gives_what_it_gives_on_the_cpu(case: str) -> None:
    m, calls = MODELS[case]
    program, here = compiled(m), polydyn.compile(m)
    for f in calls:
        for name, want in here.run(f).items():
            np.testing.assert_allclose(program.run(f)[name], want, 1e-4, 1e-5, err_msg=name)

"""Indices that a device checks: without waiting, through views, in every kind of call; on the CPU libcuda."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import polydyn
from polydyn.compiler import plan_program
from polydyn.errors import InputError, PolydynError
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute, Graph, IndexBound, SymbolSource, Tensor
from polydyn.graph.verify import verify_graph
from polydyn.program.host import host_program
from polydyn.program.index_checks import BIAS, MAX_VALUE, NO_OFFENDER, SPAN, with_index_checks
from polydyn.program.plan import DeviceCheck, IndexCheck
from polydyn.program.verify import verify_host_plan
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.schedules.expr import load, op
from polydyn.schedules.index import Index
from tests.support.cuda_programs import add, one_launch, version
from tests.support.marks import slow
from tests.support.programs import B
from tests.support.tiny import model, node, run

T = 5
GLOBAL = 8
"""``PDEMU_GLOBAL``."""


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield open_session()


def gathers() -> Any:
    """Build gathers of table rows by an input, by computed 32-bit integers, by a column of pairs; and of elements by
    tuples.
    """
    nodes = [
        node("Gather", "table i", "direct"),
        node("Cast", "h", "h32", to=6), node("Abs", "h32", "size"), node("Gather", "table size", "computed"),
        node("Slice", "s zero one last", "left"), node("Gather", "table left", "cut"),
        node("GatherND", "table t", "single"),
    ]  # fmt: skip
    inputs = {"table": ("float32", ["T", 4]), "i": ("int64", ["B", "L"]), "h": ("int64", ["N"])}
    inputs |= {"s": ("int64", ["S", 2]), "t": ("int64", ["R", 2])}
    constants = {"zero": np.array([0]), "one": np.array([1]), "last": np.array([1])}
    return model(nodes, inputs, ["direct", "computed", "cut", "single"], constants)


@pytest.fixture(scope="module")
def program() -> CudaProgram:
    made = polydyn.compile(gathers(), target="cuda:emulated")
    assert isinstance(made, CudaProgram)
    return made


def feeds(b: int = 3, n: int = 21, t: int = T) -> dict[str, np.ndarray]:
    r = np.random.default_rng(b)
    return {
        "table": r.standard_normal((t, 4)).astype(np.float32), "i": r.integers(-t, t, (b, 7)),
        "h": r.integers(-t + 1, t, n), "s": np.stack([r.integers(-t, t, n), np.full(n, 99)], 1),
        "t": np.stack([r.integers(-t, t, n), r.integers(-4, 4, n)], 1),
    }  # fmt: skip


def expected(f: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x = f["table"]
    tuples = x[f["t"][:, 0], f["t"][:, 1]]
    return {"direct": x[f["i"]], "computed": x[np.abs(f["h"])], "cut": x[f["s"][:, :1]], "single": tuples}


def upload(session: Session, f: dict[str, np.ndarray]) -> dict[str, Any]:
    return {n: DeviceArray.of(session, a) for n, a in f.items()}


def right(got: dict[str, Any], f: dict[str, np.ndarray]) -> bool:
    host = {n: a.numpy() if isinstance(a, DeviceArray) else a for n, a in got.items()}
    return all(np.array_equal(host[n], a) for n, a in expected(f).items())


WRONG = {
    "above": ("i", (1, 4), T, r"an index in 'i' .* of size T, here 5: element 11 is 5"),
    "below": ("i", (2, 6), -T - 1, r"an index in 'i' .* of size T, here 5: element 20 is -6"),
    "far": ("i", (0, 0), 2**62, r"'i' .*: element 0 is "),
    "computed": ("h", 17, -5, r"an index in 'size' .* of size T, here 5: element 17 is 5"),
    "cut": ("s", (20, 0), -6, r"an index in 'left' .* of size T, here 5: element 20 is -6"),
    "first": ("t", (16, 0), 5, r"an index in 't' .* of size T, here 5: element 32 is 5"),
    "second": ("t", (19, 1), 4, r"an index in 't' .* of size 4, here 4: element 39 is 4"),
}  # fmt: skip


def wrong(case: str) -> tuple[dict[str, np.ndarray], str]:
    name, at, value, said = WRONG[case]
    f = feeds()
    f[name][at] = value
    return f, said


# -- synchronous calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_index_is_refused_wherever_it_comes_from(program: CudaProgram, device: Session, case: str) -> None:
    """The strict emulation sees no access out of bounds, and the context stays usable."""
    before = device.generation
    f, said = wrong(case)
    words = []
    for fed in (f, upload(device, f)):
        with pytest.raises(InputError, match=said) as caught:
            program.run(fed)
        words.append(str(caught.value))
    assert words[0] == words[1] or case == "far", "whoever looks, in the same words"
    good = feeds()
    assert right(program.run(good), good) and right(program.run(upload(device, good)), good)
    assert device.generation == before and not any("not checked" in n for n in program.manifest["notes"])


def test_what_does_not_fit_a_word_is_said_to_be_more(program: CudaProgram, device: Session) -> None:
    for value, said in ((2**62, f"element 0 is {MAX_VALUE} or more"), (-(2**63), f"element 0 is {-BIAS} or less")):
        f = feeds()
        f["i"][0, 0] = value
        with pytest.raises(InputError, match=said):
            program.run(upload(device, f))
        with pytest.raises(InputError, match=f"element 0 is {value}"):
            program.run(f)


@pytest.mark.parametrize("sizes", [(0, 0), (1, 1), (0, 33), (9, 16)])
def test_sizes(program: CudaProgram, device: Session, sizes: tuple[int, int]) -> None:
    f = feeds(*sizes)
    assert right(program.run(f), f) and right(program.run(upload(device, f)), f)


def test_a_table_without_rows(program: CudaProgram, device: Session) -> None:
    """No remainder makes a valid index: sizes alone reject the call, before anything runs."""
    none = feeds(0, 0, 1) | {"table": np.empty((0, 4), np.float32)}
    for f in (none, upload(device, none)):
        assert all(a.shape[0] == 0 for a in program.run(f).values())
    for name in ("i", "h", "s", "t"):
        f = none | {name: feeds(1, 1, 1)[name]}
        for fed in (f, upload(device, f)):
            with pytest.raises(InputError, match="size T, here 0"):
                program.run(fed)
    with pytest.raises(InputError, match="size T, here 0"):
        program.bind(upload(device, f))
    assert right(program.run(feeds()), feeds())


def test_arrays_in_host_memory_cost_no_launch(program: CudaProgram, device: Session) -> None:
    """The accesses of an otherwise equal run show whether the device checks 'i'."""
    accesses = (ctypes.c_uint64 * 12).in_dll(ctypes.CDLL(device.library), "pdemu_counters")
    f, counts = feeds(), []
    for i in (f["i"], DeviceArray.of(device, f["i"])):
        before = accesses[GLOBAL]
        program.run(f | {"i": i})
        counts.append(accesses[GLOBAL] - before)
    assert counts[0] < counts[1]


# -- asynchronous calls ----------------------------------------------------------------------------------------------


def test_on_a_callers_stream_the_error_comes_with_the_wait(program: CudaProgram, device: Session) -> None:
    bad, said = wrong("computed")
    good, other = feeds(), feeds(1, 40)
    got = program.run(upload(device, bad), stream=2)
    for name in got:
        with pytest.raises(InputError, match=said + "$"):
            got[name].numpy()
    assert right(program.run(upload(device, good), stream=2), good)
    program.run(upload(device, bad), stream=2)
    with pytest.raises(InputError, match=said + r" \(in a call before this one; its outputs are void"):
        program.run(upload(device, other), stream=2)  # with other sizes: the message has the wrong call's sizes
    for _ in range(2):
        assert right(program.run(upload(device, other), stream=2), other)
    program.run(upload(device, bad), stream=2)
    with pytest.raises(InputError, match="before this one"):
        program.bind(good)
    fine = program.run(upload(device, good), stream=2)
    program.run(upload(device, bad), stream=2)
    assert right(fine, good), "outputs speak for their own call"
    with pytest.raises(InputError, match="before this one"):
        program.run(good)
    assert right(program.run(good), good)


# -- bound calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["above", slow("computed"), slow("cut"), "second"])
def test_bound_calls(program: CudaProgram, device: Session, case: str) -> None:
    name, _, _, said = WRONG[case]
    bad, good = wrong(case)[0], feeds()
    hosted, x = feeds(), upload(device, feeds())

    def change(to: np.ndarray) -> Callable[[], None]:
        return lambda: (np.copyto(hosted[name], to), device.driver.h2d(x[name].pointer, to))[1]

    for fed, stream in ((hosted, None), (x, None), (x, 2)):
        call = program.bind(fed, stream=stream)
        assert right(call(), good)
        change(bad[name])()
        if stream is None:
            with pytest.raises(InputError, match=said):
                call()
        else:
            for out in call().values():
                with pytest.raises(InputError, match=said):
                    out.numpy()
            call()
            change(good[name])()
            with pytest.raises(InputError, match=said + ".*before this one"):
                call()
        change(good[name])()
        assert right(call(), good)
        del call
        gc.collect()


def test_through_pycuda(program: CudaProgram) -> None:
    pytest.importorskip("pycuda")
    session = open_session(prefer="pycuda")
    again = CudaProgram(program._artifact, session=session)
    bad, said = wrong("computed")
    for run_it in (again.run, lambda f: again.bind(f)()):
        with pytest.raises(InputError, match=said):
            run_it(upload(session, bad))
        assert right(run_it(upload(session, feeds())), feeds())


# -- the reduction -----------------------------------------------------------------------------------------------------


def words_of(bound: IndexBound, data: np.ndarray) -> list[int]:
    """Return the error words for a tensor j with these integers, computed from an input."""
    names = tuple(Index.of(f"N{k}") for k in range(data.ndim))
    sources = tuple(SymbolSource(f"N{k}", "x", k) for k in range(data.ndim))
    here = tuple(Index.of(f"d{k}") for k in range(data.ndim))
    nodes = tuple(Compute(t, op("neg", load(u, here, "int64"))) for t, u in (("j", "x"), ("y", "j")))
    tensors = {n: Tensor(n, "int64", names) for n in ("x", "j", "y")}
    found = with_index_checks(Graph("g", ("x",), ("y",), tensors, {}, nodes, sources, bounds=(bound, bound)))
    assert [n.output for n in found.nodes] == ["j", "j.outside", "y"], "equal bounds share a node"
    assert found.outputs == ("y", "j.outside") and all(b.status == "j.outside" for b in found.bounds)
    verify_graph(found)
    words: list[int] = run(found, {"x": -data})["j.outside"].tolist()
    return words


def word(place: int, value: int) -> int:
    return place * 2 * BIAS + value + BIAS


def test_words_name_the_first_offender_of_every_span() -> None:
    nothing, four = int(NO_OFFENDER.value), Index.of(4)
    data = np.zeros((2, 20), np.int64)
    data[0, 3], data[0, 5], data[1, 19], data[1, 12] = 9, -4, 4, -5
    assert words_of(IndexBound("j", four, "g"), data) == [word(3, 9), nothing, word(0, -5)]
    data[:] = 0
    data[-1, -1], data[0, SPAN - 1] = 3, 2**62
    words = words_of(IndexBound("j", four, "g", offset=Index.of(1)), data)
    assert words == [2**63 - 2, nothing, word(7, 3)] and words[0] == word(SPAN - 1, MAX_VALUE)
    parts = np.zeros((2, 20, 2), np.int64)
    parts[1, 0, 1] = -5
    assert words_of(IndexBound("j", four, "g", part=(1, 2)), parts) == [nothing, word(4, -5), nothing]


def test_arithmetic_that_becomes_a_formula_is_looked_at() -> None:
    """No kernel computes such a tensor: gathers evaluate the formula, and so does the check."""
    nodes = [node("Mul", "i two", "m"), node("Add", "m one", "j"), node("Gather", "x j", "y")]
    ins = {"x": ("float32", ["T"]), "i": ("int64", ["A", "B"])}
    graph = import_model(model(nodes, ins, ["y"], {"two": np.array(2), "one": np.array(1)}))
    found = with_index_checks(graph)
    verify_graph(found)
    i = np.zeros((3, 7), np.int64)
    i[2, 6], i[0, 4] = 3, -4
    got = run(found, {"x": np.arange(7, dtype=np.float32), "i": i})
    assert "j" not in found.tensors and got["j.outside"].tolist() == [int(NO_OFFENDER.value), word(4, 7)]
    assert (got["y"][0, 4], got["y"][2, 6]) == (0, 6), "the clamp decides what is read"


# -- plans -------------------------------------------------------------------------------------------------------------


def test_programs_without_such_indices_are_as_they_were() -> None:
    relu = plan_program(model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"]), target="cuda:emulated")
    assert "device_check" not in host_program(relu, {}, 0).text
    gather = model([node("Gather", "x i", "y")], {"x": ("float32", ["N", 2])}, ["y"], {"i": np.array([0, -1])})
    plan = plan_program(gather, target="cuda:emulated")
    assert not plan.device_checks and len(plan.launches) == 1
    assert not plan_program(gathers()).device_checks


def test_malformed_checks_are_refused() -> None:
    plan = one_launch(version("a", Index.of(1)), kernels=(add("a"),))
    check = IndexCheck("x", B, Index.of(0), 0, "wrong")
    for d in (
        DeviceCheck(check, "y", 0, False), DeviceCheck(check, "gone", 0, False), DeviceCheck(check, "y", 1, False),
    ):  # fmt: skip
        with pytest.raises(PolydynError, match="no launch writes the words"):
            verify_host_plan(replace(plan, device_checks=(d,)))
    words = replace(plan.buffers["y"], name="w", dtype="int64", role="intermediate")
    (first,) = plan.launches[0].candidates
    launch = replace(plan.launches[0], candidates=(first, replace(first, buffers=("x", "w"))))
    whole = replace(plan, buffers=plan.buffers | {"w": words}, launches=(launch,))
    verify_host_plan(replace(whole, device_checks=(DeviceCheck(check, "w", 0, False),)))
    with pytest.raises(PolydynError, match="missing among the host's checks"):
        verify_host_plan(replace(whole, device_checks=(DeviceCheck(check, "w", 0, True),)))
    with pytest.raises(PolydynError, match="the device does not make"):
        integers = plan.buffers | {"x": replace(plan.buffers["x"], dtype="int64")}
        verify_host_plan(replace(plan, buffers=integers, index_checks=(check,)))
    with pytest.raises(PolydynError, match="without a source"):
        bad = replace(check, size=Index.of("Q"))
        verify_host_plan(replace(whole, device_checks=(DeviceCheck(bad, "w", 0, False),)))

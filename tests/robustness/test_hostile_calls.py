"""Invalid calls: rejected by name, and the program works as before."""

from __future__ import annotations

import copy
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.errors import InputError, PolydynError
from polydyn.runtime.program import Program
from polydyn.testing.inputs import feeds, symbols
from tests.support.marks import slow
from tests.support.stored import compiled, load
from tests.support.tiny import model, node

F, OUT = "float32", "y"


def gemm() -> onnx.ModelProto:
    """Build ``y = softmax(x @ w)``, and ``s`` the sums of the rows of x."""
    w = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    nodes = [node("MatMul", "x w", "t"), node("Softmax", "t", "y", axis=-1), node("ReduceSum", "x a", "s", keepdims=0)]
    return model(nodes, {"x": (F, ["B", 6])}, ["y", "s"], {"w": w, "a": np.array([1])})


@pytest.fixture(scope="module")
def program() -> Program:
    return polydyn.compile(gemm(), threads=2)


def x(rows: int = 4) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rows).standard_normal((rows, 6)).astype(np.float32)


class Failing:
    """A tensor that rejects conversion to an array, as torch's do if they require gradients."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("call detach() first")


# -- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (x().astype(">f4"), "input 'x' is >f4"),
        (x().astype(complex), "input 'x' is complex128"),
        (x().astype("U9"), "input 'x' is <U"),
        (x().astype(object), "input 'x' is object"),
        (np.zeros((4, 6), [("a", "f4")]), r"input 'x' is \[\('a'"),
        ([[1.0] * 6, [1.0] * 5], "input 'x' is not an array"),
        (Failing(), "input 'x' is not an array: call detach"),
        (3.0, "input 'x' is float64"),
        (np.float32(3), "has 0 axes"),
        (x()[None], "has 3 axes"),
        (x()[:, :5], "axis 1 is 5, but the model was exported for 6"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(program: Program, inputs: Any, message: str) -> None:
    for call in (program.run, program.bind, program.profile):
        with pytest.raises(InputError, match=message):
            call({"x": inputs})
    assert program.run({"x": x()})[OUT].shape == (4, 5)


def test_strides_of_no_whole_elements_are_read(program: Program) -> None:
    records = np.zeros((4, 6), np.dtype([("value", "f4"), ("flag", "i1")]))
    records["value"] = x()
    assert records["value"].strides == (30, 5)
    for given in (records["value"], records["value"][::-1, ::-1]):
        assert (program.run({"x": given})[OUT] == program.run({"x": given.copy()})[OUT]).all()


def test_subclasses_and_other_orders_of_dims_are_arrays(program: Program) -> None:
    wanted = program.run({"x": x()})
    for given in (np.ma.array(x()), x().view(np.recarray), np.asfortranarray(x())):
        got = program.run({"x": given})
        assert all(type(got[n]) is np.ndarray and (got[n] == wanted[n]).all() for n in got)


# -- outputs ---------------------------------------------------------------------------------------------------------


def test_outputs_that_do_not_fit_are_refused(program: Program) -> None:
    frozen = np.zeros((4, 5), np.float32)
    frozen.flags.writeable = False
    misaligned = np.zeros(4 * 5 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 5)
    wrong = {
        "writeable": frozen,
        "aligned": misaligned,
        "array of float32": np.zeros((4, 5), ">f4"),
        "shape": np.zeros((5, 4), np.float32),
        "C-contiguous": np.zeros((5, 4), np.float32).T,
        "must be an array": [[0.0] * 5] * 4,
        "share memory|C-contiguous": np.broadcast_to(np.zeros(5, np.float32), (4, 5)),
    }
    for message, out in wrong.items():
        for call in (program.run, program.bind):
            with pytest.raises(InputError, match=message):
                call({"x": x()}, {OUT: out})
    assert not frozen.any() and not misaligned.any()
    with pytest.raises(InputError, match="no output 'z'"):
        program.run({"x": x()}, {"z": np.zeros(1)})


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_past_tiny", slow("vit_tiny"), slow("resnet_tiny"), "t5_tiny"])
def test_every_combination_of_empty_dims_is_run_or_refused_by_name(name: str) -> None:
    program, proto = compiled(name, 2), load(name)
    names = symbols(proto)
    for sizes in itertools.product((0, 1, 2), repeat=len(names)):
        given = dict(zip(names, sizes, strict=True))
        try:
            out = program.run(feeds(proto, given))
        except InputError as e:
            assert e.rule or "rule: " in str(e) or "axis" in str(e), e
            continue
        assert all(np.isfinite(a).all() for a in out.values()), given


@pytest.mark.parametrize("rows", [2**45, 2**55, 2**58])  # the minimum exceeds the address space
def test_huge_dims_are_refused(program: Program, rows: int) -> None:
    given = np.broadcast_to(np.zeros(6, np.float32), (rows, 6))
    program.run({"x": x()})
    before = program.counters["contexts"]
    for call in (program.run, program.bind, program.profile):
        with pytest.raises(PolydynError, match=r"64 bits|overflows|needs \d+ bytes|no memory for output"):
            call({"x": given})
    assert program.run({"x": x()})[OUT].shape == (4, 5)
    assert program.counters["contexts"] == before, "a refused call gave its context back"
    assert program.explain(B=rows).launches


def test_an_output_that_no_memory_holds_is_named() -> None:
    """The input is empty, so only the output is large."""
    nodes = [node("ReduceSum", "x a", "y", keepdims=0)]
    program = polydyn.compile(model(nodes, {"x": (F, ["B", "L"])}, ["y"], {"a": np.array([1])}), threads=1)
    with pytest.raises(PolydynError, match=r"output 'y' of shape \(70368744177664,\)"):
        program.run({"x": np.zeros((2**46, 0), np.float32)})
    assert program.run({"x": np.zeros((3, 0), np.float32)})["y"].tolist() == [0, 0, 0]


def test_an_empty_output_that_numpy_cannot_have_is_named() -> None:
    nodes = [node("MatMul", "x z", "y")]
    inputs = {"x": (F, ["A", "N", "K"]), "z": (F, ["A", "K", "M"])}
    program = polydyn.compile(model(nodes, inputs, ["y"]), threads=1)
    big = 2**40
    with pytest.raises(PolydynError, match=r"output 'y'|64 bits"):
        program.run({"x": np.zeros((0, big, 1), np.float32), "z": np.zeros((0, 1, big), np.float32)})


# -- everything else -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, -1, 257, 2.0, "2", True])
def test_numbers_of_threads_that_are_none_are_refused(threads: Any, tmp_path: Any, program: Program) -> None:
    with pytest.raises(InputError, match="threads is"):
        polydyn.compile(gemm(), threads=threads)
    program.save(tmp_path / "p")
    with pytest.raises(InputError, match="threads is"):
        polydyn.load(tmp_path / "p", threads=threads)


def test_profiles_of_no_calls_are_refused(program: Program) -> None:
    for repeats in (0, -3):
        with pytest.raises(InputError, match="repeats"):
            program.profile({"x": x()}, repeats=repeats)


@pytest.mark.parametrize("dims", [{"B": -1}, {"B": 1.5}, {"B": "4"}, {"B": True}, {}, {"Q": 1}])
def test_sizes_to_explain_that_are_none_are_refused(program: Program, dims: Any) -> None:
    with pytest.raises(InputError, match=r"not a size|no size|no dim"):
        program.explain(**dims)


def test_a_copy_of_a_program_or_call_is_the_same_one() -> None:
    """A second object with the same library would use memory that the first has freed."""
    program = polydyn.compile(gemm(), threads=2)
    call = program.bind({"x": x()})
    wanted = program.run({"x": x()})[OUT]
    others = [copy.copy(program), copy.deepcopy({"p": program})["p"]]
    calls = [copy.copy(call), copy.deepcopy(call)]
    assert all(p is program for p in others) and all(c is call for c in calls)
    del program, call
    gc.collect()
    assert (others[0].run({"x": x()})[OUT] == wanted).all() and (calls[0]()[OUT] == wanted).all()


def test_an_input_whose_array_calls_the_program_is_read(program: Program) -> None:
    class Nested:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.concatenate([program.run({"x": x(7)})["y"], np.ones((7, 1), np.float32)], 1)

    given = np.asarray(Nested())
    assert (program.run({"x": Nested()})[OUT] == program.run({"x": given})[OUT]).all()


def test_threads_with_right_and_wrong_calls_do_not_meet(program: Program) -> None:
    wanted = {n: program.run({"x": x(n)})[OUT] for n in range(9)}

    def call(k: int) -> bool:
        if k % 3 == 2:
            with pytest.raises(PolydynError):
                program.run({"x": np.broadcast_to(np.zeros(6, np.float32), (2**58, 6))})
            return True
        return bool((program.run({"x": x(k % 9)})[OUT] == wanted[k % 9]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(90)))

"""Calls on a real compiled model: memory orders, empty arrays, the caller's outputs, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.errors import InputError
from polydyn.runtime.program import Program
from tests.support.stored import compiled
from tests.support.tiny import model as tiny_model
from tests.support.tiny import node

OUT = "last_hidden_state"


@pytest.fixture(scope="module")
def bert() -> Program:
    return compiled("bert_tiny", 2)


def ids(b: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = (rng.random((b, length)) < 0.7).astype(np.int64)
    mask[:, :1] = 1
    return {"input_ids": rng.integers(0, 120, (b, length)), "attention_mask": mask}


def test_any_memory_order_gives_the_same_bits(bert: Program) -> None:
    feeds = ids(3, 7)
    wanted = bert.run(feeds)[OUT]
    orders = {
        "fortran": np.asfortranarray,
        "reversed": lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
        "strided": lambda a: np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3],
        "misaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(np.int64).reshape(a.shape),
    }
    for name, order in orders.items():
        given = {k: order(v) for k, v in feeds.items()}
        before = {k: v.copy() for k, v in given.items()}
        assert (bert.run(given)[OUT] == wanted).all(), name
        assert all((given[k] == before[k]).all() for k in given), "inputs are never written"
    row = ids(1, 7)
    broadcast = {k: np.broadcast_to(v, (4, 7)) for k, v in row.items()}
    assert (bert.run(broadcast)[OUT] == bert.run({k: v.copy() for k, v in broadcast.items()})[OUT]).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_arrays_give_empty_outputs(bert: Program, shape: tuple[int, int]) -> None:
    got = bert.run(ids(*shape))[OUT]
    assert got.shape == (*shape, 32) and got.dtype == np.float32


def test_outputs_go_into_the_callers_arrays(bert: Program) -> None:
    feeds = ids(2, 9)
    wanted = bert.run(feeds)[OUT]
    memory = np.full((4, 9, 32), 7, np.float32)
    got = bert.run(feeds, out={OUT: memory[1:3]})[OUT]
    assert np.shares_memory(got, memory) and (memory[1:3] == wanted).all()
    assert (memory[0] == 7).all() and (memory[3] == 7).all()
    for bad in (np.empty((2, 8, 32), np.float32), np.empty((2, 9, 32)), np.empty((2, 9, 64), np.float32)[:, :, ::2]):
        with pytest.raises(InputError, match=OUT):
            bert.run(feeds, out={OUT: bad})


def test_several_threads_call_one_program(bert: Program) -> None:
    shapes = [(b, n) for b in (1, 2, 5) for n in (1, 7, 31)] * 4
    wanted = [bert.run(ids(b, n, seed=k))[OUT] for k, (b, n) in enumerate(shapes)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda job: bert.run(ids(*job[1], seed=job[0]))[OUT], enumerate(shapes)))
    assert all((a == b).all() for a, b in zip(got, wanted, strict=True))


def test_a_refused_call_on_one_thread_does_not_disturb_the_others(bert: Program) -> None:
    good, bad = ids(2, 31), ids(2, 31)
    bad["input_ids"] = bad["input_ids"] + 120
    wanted = bert.run(good)[OUT]

    def call(k: int) -> bool:
        if k % 2:
            with pytest.raises(InputError, match="outside its axis"):
                bert.run(bad)
            return True
        return bool((bert.run(good)[OUT] == wanted).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))


def test_outputs_that_are_constants_or_copies() -> None:
    c = np.arange(6, dtype=np.float32).reshape(2, 3)
    nodes = [node("Identity", "x", "same"), node("Identity", "c", "constant"), node("Shape", "x", "shape")]
    program = polydyn.compile(
        tiny_model(nodes, {"x": ("float32", ["N", 2])}, ["same", "constant", "shape"], {"c": c}), threads=1
    )
    for n in (0, 1, 5):
        x = np.random.default_rng(n).standard_normal((n, 2)).astype(np.float32)
        got = program.run({"x": x})
        assert (got["same"] == x).all() and not np.shares_memory(got["same"], x)
        assert (got["constant"] == c).all() and got["shape"].tolist() == [n, 2]
        got["constant"][:] = 0  # the caller's own memory, not the program's
    assert (program.run({"x": x})["constant"] == c).all()


def test_an_initializer_as_an_output_and_a_model_without_nodes() -> None:
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N"])
    constant = numpy_helper.from_array(np.array([1.5, 2.5], np.float32), "c")

    def model_of(outputs: list[str]) -> onnx.ModelProto:
        values = [onnx.ValueInfoProto(name=o) for o in outputs]
        return helper.make_model(helper.make_graph([], "g", [info], values, [constant]))

    assert polydyn.compile(model_of(["c"]), threads=1).run({"x": np.zeros(3, np.float32)})["c"].tolist() == [1.5, 2.5]
    assert polydyn.compile(model_of(["x"]), threads=1).run({"x": np.ones(3, np.float32)})["x"].tolist() == [1, 1, 1]

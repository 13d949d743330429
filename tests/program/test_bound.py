"""Bound calls: one call on fixed arrays, repeated; their checks, lifetimes and rejections."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from polydyn.errors import InputError
from polydyn.runtime.program import Program
from tests.support.stored import compiled

OUT = "last_hidden_state"


@pytest.fixture(scope="module")
def bert() -> Program:
    return compiled("bert_tiny", 2)


def ids(b: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 120, (b, length))
    return {"input_ids": tokens, "attention_mask": np.ones((b, length), np.int64)}


def test_a_bound_call_reads_its_inputs_again(bert: Program) -> None:
    feeds = ids(2, 9)
    call = bert.bind(feeds)
    first = call()[OUT]
    assert first is call.outputs[OUT] and (first == bert.run(feeds)[OUT]).all()
    feeds["input_ids"][:] = feeds["input_ids"][:, ::-1].copy()
    feeds["attention_mask"][1, 4:] = 0
    assert (call()[OUT] == bert.run(feeds)[OUT]).all()


def test_bound_calls_of_several_shapes_and_memory_orders_live_side_by_side(bert: Program) -> None:
    shapes = [(1, 5), (3, 7), (0, 4), (1, 5)]
    feeds = [ids(*s) for s in shapes]
    feeds[1]["input_ids"] = np.asfortranarray(feeds[1]["input_ids"])
    calls = [bert.bind(f) for f in feeds]
    for _ in range(2):
        for call, f in zip(calls, feeds, strict=True):
            assert (call()[OUT] == bert.run(f)[OUT]).all()


def test_a_bound_call_writes_where_it_is_told(bert: Program) -> None:
    feeds = ids(2, 9)
    mine = np.empty((2, 9, 32), np.float32)
    assert bert.bind(feeds, {OUT: mine})()[OUT] is mine
    assert (mine == bert.run(feeds)[OUT]).all()


def test_a_bound_call_keeps_its_program_and_gives_its_context_back() -> None:
    program = compiled("bert_tiny", 1)
    feeds = ids(1, 6)
    wanted = program.run(feeds)[OUT]
    call = program.bind(feeds)
    assert program.counters["contexts"] == 1
    program.run(feeds)
    assert program.counters["contexts"] == 2, "a bound call has its context to itself"
    del call
    gc.collect()
    first, second = program.bind(feeds), program.bind(feeds)
    assert program.counters["contexts"] == 2, "the first one's was free again"
    del program
    gc.collect()
    assert (first()[OUT] == wanted).all() and (second()[OUT] == wanted).all()


def test_one_bound_call_from_several_threads(bert: Program) -> None:
    feeds = ids(2, 9)
    call, wanted = bert.bind(feeds), bert.run(feeds)[OUT]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(call) for _ in range(64)]:
            assert (done.result()[OUT] == wanted).all()


def test_what_cannot_be_bound_is_refused(bert: Program) -> None:
    feeds = ids(2, 9)
    misaligned = np.frombuffer(b"x" + feeds["input_ids"].tobytes(), np.uint8)[1:].view(np.int64).reshape(2, 9)
    before = bert.counters["contexts"]
    for wrong in (misaligned, feeds["input_ids"].tolist()):
        with pytest.raises(InputError, match="'input_ids' cannot be bound"):
            bert.bind(feeds | {"input_ids": wrong})
    with pytest.raises(InputError, match="shape"):
        bert.bind(feeds, {OUT: np.empty((2, 8, 32), np.float32)})
    with pytest.raises(InputError, match="'attention_mask' is missing"):
        bert.bind({"input_ids": feeds["input_ids"]})
    assert bert.counters["contexts"] <= before + 1, "a refused call leaves its context to others"


def test_an_index_that_leaves_its_axis_is_found_in_a_bound_call(bert: Program) -> None:
    feeds = ids(1, 4)
    call = bert.bind(feeds)
    call()
    feeds["input_ids"][0, 2] = 10**6
    with pytest.raises(InputError, match="1000000"):
        call()
    feeds["input_ids"][0, 2] = 0
    call()

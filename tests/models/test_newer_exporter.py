"""A decoder of torch's newer exporter: rotary positions, four query heads on two key heads, caches in and out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import polydyn
from polydyn.errors import InputError
from polydyn.runtime.program import Program
from polydyn.testing.accuracy import TOLERANCE, error, reference
from polydyn.testing.inputs import feeds, symbols
from tests.support.stored import compiled, load, path_of

NAME, HEADS, SIZE, ROOM = "llama_tiny", 2, 16, 40
TOKEN_BYTES = 4 * HEADS * SIZE * 4  # keys and values of two layers, float32
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(NAME, 2)


def sizes(batch: int, length: int, past: int) -> dict[str, int]:
    return {"B": batch, "L": length, "P": past, "T": past + length}


def test_the_stored_file_says_nothing_of_the_machine_that_wrote_it() -> None:
    data = Path(path_of(NAME)).read_bytes()
    assert len(data) <= 300_000 and load(NAME).producer_name == "pytorch"
    assert not re.search(rb"site-packages|\.py\b|/(?:home|root|tmp|usr)/", data)
    assert symbols(load(NAME)) == ["B", "L", "T", "P"]


def test_compiled_once_and_right_at_many_sizes(program: Program) -> None:
    triples = ((1, 1, 0), (1, 1, 1), (2, 1, 7), (1, 13, 0), (5, 3, 11), (3, 2, 0), (7, 1, 1), (1, 2, 97))
    wanted = [sizes(*s) for s in triples]
    for shape, expected in zip(wanted, reference(path_of(NAME), wanted), strict=True):
        assert error(program.run(feeds(load(NAME), shape)), expected) <= TOLERANCE, shape


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 5), (0, 0, 0), (2, 0, 0), (0, 1, 0), (1, 0, 1)])
def test_nothing_in_gives_nothing_out(program: Program, shape: tuple[int, int, int]) -> None:
    batch, length, past = shape
    inputs = feeds(load(NAME), sizes(*shape))
    out = program.run(inputs)
    assert out["logits"].shape == (batch, length, 120)
    for present, name in program.appendable.items():
        assert out[present].shape == (batch, HEADS, past + length, SIZE)
        np.testing.assert_array_equal(out[present][:, :, :past], inputs[name])


def test_a_mask_that_does_not_cover_past_and_present_is_refused(program: Program) -> None:
    inputs = feeds(load(NAME), sizes(2, 3, 4))
    with pytest.raises(InputError, match=r"positions 0 to \(L \+ P - 1\) are read from an axis of T"):
        program.run(inputs | {"attention_mask": inputs["attention_mask"][:, :6]})
    program.run(inputs)


def test_the_caches_are_found(program: Program) -> None:
    assert program.appendable == {f"present_{i}_{k}": f"past_{i}_{k}" for i in (0, 1) for k in ("key", "value")}


@pytest.mark.parametrize(("batch", "prompt"), [(1, 0), (1, 5), (3, 7)])
def test_eight_steps_in_place_are_one_run_over_everything(program: Program, batch: int, prompt: int) -> None:
    """Also compare with ONNX Runtime over the whole text; one token in the middle is masked for the first text."""
    total = prompt + 8
    ids = np.random.default_rng(prompt).integers(0, 120, (batch, total))
    mask = np.ones((batch, total), np.int64)
    mask[0, 2] = 0
    empty = {past: np.zeros((batch, HEADS, 0, SIZE), np.float32) for past in program.appendable.values()}
    inputs = {"input_ids": ids, "attention_mask": mask, **empty}
    whole = program.run(inputs)
    session = ort.InferenceSession(path_of(NAME), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    assert error(whole, dict(zip(names, session.run(None, inputs), strict=True))) <= TOLERANCE
    cache: Arrays = {n: np.full((batch, HEADS, ROOM, SIZE), np.nan, np.float32) for n in program.appendable}
    moved, before = [program.counters["bytes_copied"]], 0
    for length in [prompt] * (prompt > 0) + [1] * 8:
        after = before + length
        out = program.run(
            {"input_ids": ids[:, before:after].copy(), "attention_mask": mask[:, :after].copy()}
            | {past: cache[present][:, :, :before] for present, past in program.appendable.items()},
            {present: c[:, :, :after] for present, c in cache.items()},
        )
        assert error({"logits": out["logits"]}, {"logits": whole["logits"][:, before:after]}) <= TOLERANCE
        assert all(out[n].base is cache[n] for n in cache)
        assert all(np.isnan(c[:, :, after:]).all() for c in cache.values()), "wrote behind the present"
        moved.append(program.counters["bytes_copied"])
        before = after
    assert error({n: c[:, :, :total] for n, c in cache.items()}, {n: whole[n] for n in cache}) <= TOLERANCE
    steps = set(np.diff(moved)[-8:].tolist())
    assert len(steps) == 1 and max(steps) <= 2 * batch * TOKEN_BYTES, "what a step moves does not grow with the past"


def test_saved_and_loaded_it_gives_the_same_bits(program: Program, tmp_path: Path) -> None:
    program.save(tmp_path / "llama.polydyn")
    loaded, inputs = polydyn.load(tmp_path / "llama.polydyn", threads=1), feeds(load(NAME), sizes(2, 3, 5))
    a, b = program.run(inputs), loaded.run(inputs)
    assert all((a[n] == b[n]).all() for n in a)

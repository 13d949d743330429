"""``polydyn.generate``: its ids are those of a plain loop over ONNX Runtime, for any batch, chunk, cache and prefix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import polydyn
from polydyn.errors import InputError, UnsupportedError
from polydyn.generation import MIN_ROOM, Decoder, Sampling, State, padding_is_invisible
from polydyn.runtime.program import Program
from polydyn.testing.models import model
from tests.support.stored import compiled, path_of

RNG = np.random.default_rng(0)
PROMPTS = [[5, 17, 3], [44, 2, 9, 61, 7, 7, 30, 12], [101], [8, 9, 10, 11, 12]]


@cache
def llama() -> Program:
    return compiled("llama_tiny", 1)


@cache
def gpt2() -> Program:
    return compiled("gpt2_past_tiny", 1)


def by_onnxruntime(name: str, prompt: list[int], count: int) -> list[int]:
    """Return greedy ids, from the whole text in every step."""
    session = ort.InferenceSession(path_of(name), providers=["CPUExecutionProvider"])
    past = {i.name: np.zeros([1, i.shape[1], 0, i.shape[3]], np.float32) for i in session.get_inputs()[2:]}
    text = list(prompt)
    for _ in range(count):
        ids = np.array([text])
        logits = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids), **past})[0]
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(("name", "make"), [("llama_tiny", llama), ("gpt2_past_tiny", gpt2)])
def test_greedy_ids_are_those_of_a_plain_loop(name: str, make: Callable[[], Program]) -> None:
    for prompt in PROMPTS[:2]:
        expected = by_onnxruntime(name, prompt, 12)
        for chunk in (1, 2, 512):
            assert list(polydyn.generate(make(), prompt, max_tokens=12, chunk=chunk)) == expected


def test_texts_of_unequal_lengths_get_what_each_gets_alone() -> None:
    assert padding_is_invisible(llama()), "positions are relative"
    assert not padding_is_invisible(gpt2()), "positions are counted from the beginning"
    for program in (llama(), gpt2()):
        for settings in ({}, {"temperature": 0.9, "top_k": 20, "seed": 3}):
            alone = []
            for k, prompt in enumerate(PROMPTS):
                seed = {"seed": settings["seed"] + k} if "seed" in settings else {}
                alone.append(list(polydyn.generate(program, prompt, max_tokens=9, **{**settings, **seed})))
            rows = list(polydyn.generate(program, PROMPTS, max_tokens=9, chunk=3, **settings))
            assert [list(x) for x in zip(*rows, strict=True)] == alone
        equal = list(polydyn.generate(program, [PROMPTS[0], PROMPTS[0]], max_tokens=4))
        assert all(a == b for a, b in equal)


def test_texts_that_end_leave_the_batch() -> None:
    program = llama()
    alone = [list(polydyn.generate(program, p, max_tokens=9)) for p in PROMPTS]
    stop = [alone[0][2], alone[1][4:6]]
    ended = [list(polydyn.generate(program, p, max_tokens=9, stop=stop)) for p in PROMPTS]
    assert len(ended[0]) <= 3 and len(ended[1]) <= 6
    rows = list(polydyn.generate(program, PROMPTS, max_tokens=9, stop=stop))
    assert len(rows) == max(map(len, ended))
    for k, ids in enumerate(ended):
        assert [r[k] for r in rows] == ids + [None] * (len(rows) - len(ids))
    assert list(polydyn.generate(program, PROMPTS[0], max_tokens=0)) == []


def test_caches_double_and_a_state_reuses_the_beginning_of_a_text() -> None:
    program = llama()
    state = State(program)
    long = [int(x) for x in RNG.integers(1, 120, MIN_ROOM - 10)]
    first = list(polydyn.generate(program, long, max_tokens=20, state=state))
    assert first == by_onnxruntime("llama_tiny", long, 20)
    assert next(iter(state._arrays.values())).shape[2] == 2 * MIN_ROOM
    assert state.tokens == [long + first[:-1]] and state.length == len(long) + 19
    calls = []
    run = State.run

    def counted(self: State, ids: Any, pads: Any = None) -> Any:
        calls.append(ids.shape[1])
        return run(self, ids, pads)

    other = [*long[:40], 3, 4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(State, "run", counted)
        again = list(polydyn.generate(program, other, max_tokens=3, state=state.copy()))
        assert calls == [2, 1, 1], "two ids are new, then one in each step"
        calls.clear()
        assert list(polydyn.generate(program, long, max_tokens=20, state=state)) == first
        assert calls[0] == 1, "the last id of the prompt is read again"
    assert again == by_onnxruntime("llama_tiny", other, 3)
    state.truncate(5)
    assert state.tokens == [long[:5]]
    logits = state.copy().run(np.array([long[5:9]]), every=True)
    assert logits.shape == (1, 4, 120)
    for k in range(4):  # as a large model judges proposed ids
        np.testing.assert_allclose(logits[:, k], state.run(np.array([long[5 + k : 6 + k]])), rtol=1e-3, atol=1e-4)
    state.truncate(5)
    with pytest.raises(InputError, match="cannot be cut at 9"):
        state.truncate(9)


def test_an_iterator_that_is_left_keeps_its_state_right() -> None:
    program, state = llama(), State(llama())
    first = list(islice(polydyn.generate(program, PROMPTS[1], state=state), 3))
    assert state.tokens == [PROMPTS[1] + first[:2]]
    more = list(polydyn.generate(program, PROMPTS[1] + first, max_tokens=2, state=state))
    assert first + more == by_onnxruntime("llama_tiny", PROMPTS[1], 5)


def table(inputs: dict[str, list[Any]], nodes: list[Any], output: str = "logits") -> onnx.ModelProto:
    """Build a decoder whose next token depends on the last one only."""
    integers = {n: helper.make_tensor_value_info(n, TensorProto.INT64, s) for n, s in inputs.items()}
    scores = RNG.standard_normal((7, 7)).astype(np.float32)
    last = nodes[-1].output[0] if nodes else "input_ids"
    m = model("table", [*nodes, helper.make_node("Gather", ["scores", last], [output])], integers, {"scores": scores})
    m.graph.output[0].name = output
    return m


def test_decoders_without_caches_compute_the_whole_text() -> None:
    m = table({"input_ids": ["B", "L"]}, [])
    scores = onnx.numpy_helper.to_array(m.graph.initializer[0])
    program = polydyn.compile(m, threads=1)
    expected, token = [], 4
    for _ in range(6):
        token = int(scores[token].argmax())
        expected.append(token)
    assert list(polydyn.generate(program, [1, 4], max_tokens=6)) == expected
    rows = list(polydyn.generate(program, [[1, 4], [4]], max_tokens=6))
    assert [r[0] for r in rows] == [r[1] for r in rows] == expected


def test_positions_are_passed_with_and_without_a_batch() -> None:
    for shape in (["B", "L"], ["L"]):
        nodes = [helper.make_node("Add", ["input_ids", "position_ids"], ["sum"]),
                 helper.make_node("Mod", ["sum", "seven"], ["place"])]  # fmt: skip
        m = table({"input_ids": ["B", "L"], "position_ids": shape}, nodes)
        m.graph.initializer.append(onnx.numpy_helper.from_array(np.array(7), "seven"))
        scores, expected, text = onnx.numpy_helper.to_array(m.graph.initializer[0]), [], [1, 4]
        for _ in range(6):
            text.append(int(scores[(text[-1] + len(text) - 1) % 7].argmax()))
            expected.append(text[-1])
        program = polydyn.compile(m, threads=1)
        assert list(polydyn.generate(program, [1, 4], max_tokens=6)) == expected


def test_samples_follow_their_distribution_and_seed() -> None:
    logits = np.log(np.array([0.5, 0.05, 0.25, 0.2]))
    rng = np.random.default_rng(0)

    def share(**settings: Any) -> list[float]:
        drawn = [Sampling(**settings).draw(logits, rng) for _ in range(4000)]
        return [drawn.count(k) / 4000 for k in range(4)]

    np.testing.assert_allclose(share(temperature=1.0), [0.5, 0.05, 0.25, 0.2], atol=0.03)
    np.testing.assert_allclose(share(temperature=1.0, top_k=2), [2 / 3, 0, 1 / 3, 0], atol=0.03)
    np.testing.assert_allclose(share(temperature=1.0, top_p=0.8), [0.5 / 0.95, 0, 0.25 / 0.95, 0.2 / 0.95], atol=0.03)
    np.testing.assert_allclose(share(temperature=1.0, top_p=0.5), [1, 0, 0, 0])
    sharp = np.array([0.25, 0.0025, 0.0625, 0.04])
    np.testing.assert_allclose(share(temperature=0.5), sharp / sharp.sum(), atol=0.03)
    assert share() == [1, 0, 0, 0]
    program = llama()
    ids = [list(polydyn.generate(program, [5], max_tokens=9, temperature=1, seed=s)) for s in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_wrong_arguments_and_other_programs_are_named() -> None:
    program = llama()
    wrong: dict[str, Any] = {
        "prompt is empty": ([],), "max_tokens is -1": ([1], {"max_tokens": -1}), "chunk is 0": ([1], {"chunk": 0}),
        "temperature is -1": ([1], {"temperature": -1}), "top_p is 0": ([1], {"top_p": 0}),
        "stop sequence is empty": ([1], {"stop": [[]]}), "belongs to one text": ([[1]], {"state": State(program)}),
    }  # fmt: skip
    for message, (prompt, *settings) in wrong.items():
        with pytest.raises(InputError, match=message):
            polydyn.generate(program, prompt, **(settings[0] if settings else {}))
    with pytest.raises(UnsupportedError, match="what to pass for 'x'"):
        Decoder.of(polydyn.compile(model("m", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["B", 3]}), threads=1))
    assert [c["axis"] for c in program.caches] == [2] * 4 and program.caches[0]["shape"] == ["B", "2", "P", "16"]

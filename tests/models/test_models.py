"""Every stored model, compiled once, compared with ONNX Runtime at all its shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import polydyn
from polydyn.testing.accuracy import TOLERANCE, Starts, error, reference
from polydyn.testing.inputs import feeds, shapes
from tests.support.marks import slow
from tests.support.stored import MODELS, compiled, load, one_head_scaled, path_of


@pytest.fixture(scope="module")
def starts() -> Starts:
    return Starts()


SLOW_MODELS = ("albert_tiny", "alexnet_tiny", "densenet121_tiny", "googlenet_tiny", "squeezenet_tiny", "vit_hw_tiny")


@pytest.mark.parametrize("name", [slow(n) if n in SLOW_MODELS else n for n in MODELS])
def test_compiled_once_and_right_at_every_shape(name: str, starts: Starts) -> None:
    expected = reference(path_of(name), shapes(name))
    program = polydyn.compile(path_of(name), threads=2)
    before, model = starts.count, load(name)
    got = [program.run(feeds(model, shape)) for shape in shapes(name)]
    errors = [error(g, e) for g, e in zip(got, expected, strict=True)]
    wrong = {str(dict(s)): e for s, e in zip(shapes(name), errors, strict=True) if not e <= TOLERANCE}
    assert not wrong
    assert starts.count == before, "something was compiled or started while running"


def test_the_same_bits_for_any_number_of_threads() -> None:
    inputs = feeds(load("bert_tiny"), {"B": 3, "L": 31})
    one, two = (compiled("bert_tiny", n).run(inputs) for n in (1, 2))
    assert all((one[name] == two[name]).all() for name in one)


def test_one_heads_scale_off_by_one_percent_is_seen(tmp_path: Path) -> None:
    wanted = [s for s in shapes("bert_tiny") if s["L"] > 1]  # over one position softmax is 1 whatever the scale
    onnx.save_model(one_head_scaled(1.01), str(tmp_path / "altered.onnx"))
    program = polydyn.compile(str(tmp_path / "altered.onnx"), threads=1)
    expected = reference(path_of("bert_tiny"), wanted)
    model = load("bert_tiny")
    assert all(error(program.run(feeds(model, s)), e) > TOLERANCE for s, e in zip(wanted, expected, strict=True))


def test_decoding_with_a_cache_follows_decoding_without() -> None:
    """Compare steps of one token, each with the keys and values of the previous step, with one run over the whole text.
    """
    whole = ort.InferenceSession(path_of("gpt2_tiny"), providers=["CPUExecutionProvider"])
    cached = ort.InferenceSession(path_of("gpt2_past_tiny"), providers=["CPUExecutionProvider"])
    program = compiled("gpt2_past_tiny", 1)
    model = load("gpt2_past_tiny")
    ids = np.random.default_rng(0).integers(0, 120, (2, 9))
    (expected,) = whole.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    names = [o.name for o in cached.get_outputs()]
    past = {k: v for k, v in feeds(model, {"B": 2, "L": 1, "P": 0, "T": 1}).items() if k.startswith("past")}
    for step in range(ids.shape[1]):
        mask = np.ones((2, step + 1), np.int64)
        inputs = {"input_ids": ids[:, step : step + 1], "attention_mask": mask, **past}
        out = program.run(inputs)
        assert error(out, dict(zip(names, cached.run(None, inputs), strict=True))) <= TOLERANCE
        assert np.abs(out["last_hidden_state"][:, 0] - expected[:, step]).max() <= TOLERANCE * np.abs(expected).max()
        past = {name.replace("present", "past"): out[name] for name in names[1:]}

"""The full-size models of the first day: the ONNX graphs and their twins in torch compute the same."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnxruntime
import pytest

from benchmarks.gpu import rivals, sizes, timed, transformers, twins, weights
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate

SMALL_CONFIGS = {"encoder": twins.Config(2, 48, 3, 50, 32, False), "decoder": twins.Config(2, 48, 3, 50, 32, True)}


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_twins_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(transformers, "CONFIGS", SMALL_CONFIGS)
    c = SMALL_CONFIGS[name]
    built, given = transformers.build(name, "float32"), twins.inputs(c, 2, 11)
    (want,) = onnxruntime.InferenceSession(built.SerializeToString()).run(None, given)
    tensors = {n: torch.from_numpy(a) for n, a in twins.parameters(c, "float32").items()}
    got = twins.function(torch, c, tensors)(*(torch.from_numpy(a) for a in given.values()))
    assert np.abs(got.numpy() - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("kind", ["layers", "attention", "stitch", "bytes"])
def test_rivals_compute_what_cases_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    monkeypatch.setattr(timed, "LAYERS", {(after, 768, 3072): (1,) for after in timed.EPILOGUES})
    found = [c for c in timed.timed(True) if c.kind == kind]
    assert found
    kinds = defaultdict(lambda: "float32", bytes="int8", float8="float16")  # dtypes of torch's inputs
    for case in found:
        rng, shape, whole = np.random.default_rng(0), case.shapes[0], case.rival == "bytes"
        given: dict[str, Any] = {}
        for v in case.model.graph.input:
            size = [d.dim_value or shape[d.dim_param] for d in v.type.tensor_type.shape.dim]
            given[v.name] = (rng.integers(-9, 9, size) if whole else rng.standard_normal(size)).astype(
                kinds[case.rival]
            )
        function, constants = rivals.rival(torch, {"name": case.name, "rival": case.rival})
        tensors = [torch.from_numpy(a) for a in given.values()]
        got = function(*tensors, *(t.float() if t.dtype == torch.float16 else t for t in constants)).float().numpy()
        graph = import_model(case.model)
        halves = {n: a if whole else a.astype("float16") for n, a in given.items()}
        if case.dtype == "float32":
            halves = given
        (want,) = evaluate(graph, halves).values()
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max(), case.name


def test_weights_are_the_same_everywhere_and_small_when_packed() -> None:
    a, b = weights.scaled("q", 768, 3072), weights.scaled("q", 768, 3072)
    assert np.array_equal(a, b) and not np.array_equal(a, weights.scaled("k", 768, 3072))
    assert len(np.unique(a.view(np.uint16))) > 5000 and abs(float(a.astype("float32").std()) * 768**0.5 - 1) < 0.02
    assert np.array_equal(a[:128, :128], a[128:256, 256:384])


def test_sizes_are_those_of_the_papers() -> None:
    assert len(sizes.LENGTHS) == 62 and len(sizes.batches(25)) == 25
    for name, m, n, k in sizes.vortex(5):
        for value, (low, high) in zip((m, n, k), sizes.VORTEX[name], strict=True):
            assert low <= value <= high
        assert 2.0 * m * n * k <= sizes.FLOPS

"""Digests of compilation texts: equal for equal code, and every difference is found and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks import replay
from tests.support.tiny import model, node


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[replay.Case]:
    """Return a product and a softmax, without records and with them."""
    path = tmp_path_factory.mktemp("replay") / "small.onnx"
    weights = {"w": np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)}
    nodes = [node("MatMul", "x w", "t"), node("Softmax", "t", "y", axis=-1)]
    onnx.save(model(nodes, {"x": ("float32", ["M", 64])}, ["y"], weights), path)
    return replay.cases([str(path)], ["cpu:avx2"], [False, True])


@pytest.fixture(scope="module")
def written(cases: list[replay.Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("replay") / "digests.gz"
    replay.write(cases, file, jobs=1)
    return replay.load(str(file))


def changed(written: dict[str, Any], name: str, old: str, new: str) -> dict[str, Any]:
    """Return the digests with one text edited."""
    (case, *_) = written["cases"]
    digests = dict(written["cases"][case])
    text = written["texts"][digests[name]]
    assert old in text
    digests[name] = "edited"
    texts = written["texts"] | {"edited": text.replace(old, new)}
    return {"cases": written["cases"] | {case: digests}, "texts": texts}


def kernel(written: dict[str, Any]) -> str:
    (case, *_) = written["cases"]
    return next(n for n in written["cases"][case] if n.startswith("kernel contract_"))


def test_planning_again_writes_equal_texts(cases: list[replay.Case], written: dict[str, Any], tmp_path: Path) -> None:
    replay.write(cases, tmp_path / "again.gz", jobs=1)
    result = replay.compare(written, replay.load(str(tmp_path / "again.gz")))
    assert not (result.kernels or result.host_texts or result.missing or result.renamed) and result.equal > 6


def test_records_change_kernels(written: dict[str, Any]) -> None:
    """A small search may choose one kernel, for all sizes."""
    plain, tuned = written["cases"].values()
    assert tuned.keys() - plain.keys()


def test_a_kernel_that_differs_is_named_with_its_lines(written: dict[str, Any]) -> None:
    name = kernel(written)
    result = replay.compare(written, changed(written, name, "int64_t", "int32_t"))
    (difference,) = result.kernels
    assert difference.name == name and any("int32_t" in x for x in difference.lines)
    assert replay.report(result, 5) == 1


def test_a_host_program_that_differs_is_listed_and_allowed(written: dict[str, Any]) -> None:
    result = replay.compare(written, changed(written, "host", "static", "extern"))
    assert not result.kernels and [d.name for d in result.host_texts] == ["host"] and replay.report(result, 5) == 0


def test_a_hash_in_a_name_is_no_difference(written: dict[str, Any]) -> None:
    name = kernel(written)
    hashed = name.rpartition("_")[2]
    result = replay.compare(written, changed(written, name, hashed, "0123456789ab"))
    assert result.renamed == 1 and not result.kernels


def test_a_missing_case_fails(written: dict[str, Any]) -> None:
    fewer = {**written, "cases": dict(list(written["cases"].items())[:1])}
    assert replay.report(replay.compare(written, fewer), 5) == 1

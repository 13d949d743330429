"""The notebooks run from top to bottom, show their pictures and texts, and are stored with them.

``python -m polydyn.testing.notebooks NOTEBOOK`` stores the outputs again.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from polydyn.testing.notebooks import run
from tests.support.marks import slow
from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {
    "1_from_onnx_to_kernel": 4, "2_symbolic_shapes_and_guards": 1, "3_changing_a_schedule": 6,
    "4_tuning_and_strategies": 7, "5_a_cuda_kernel_emulated": 1, "6_an_operator_and_a_pattern": 3,
}  # fmt: skip
MAX_BYTES = 400_000
"""Maximum size of a stored notebook."""
SAYS = {
    "1_from_onnx_to_kernel": ["(0, 8) -> (0, 8, 32) finite: True", "bert_tiny at B=4, L=61"],
    "2_symbolic_shapes_and_guards": ["InputError", "ceiling(H/2)", "M must be a multiple of 8|multiple of 8"],
    "3_changing_a_schedule": ["for example ACC", "right: [True, True, True, True]", "ms with the schedule"],
    "4_tuning_and_strategies": ["tuned by polydyn", "candidates, ", "ms tuned by polydyn"],
    "5_a_cuda_kernel_emulated": ["mma_64x64", "taken: ", "65 rows, largest error"],
    "6_an_operator_and_a_pattern": ["(0, 3) True", "(3, 33) True", "5 groups before, 4 after"],
}


@pytest.mark.parametrize("path", [slow(p) if p.stem[0] in "245" else p for p in NOTEBOOKS], ids=lambda p: p.stem)
def test_every_cell_runs_and_shows_its_picture(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    shown = list(run(path))
    pictures = [x.value for x in shown if hasattr(x.value, "_repr_html_")]
    for x in pictures:
        ElementTree.fromstring(f"<div>{x._repr_html_()}</div>")
    assert len(pictures) == PICTURES[path.stem]
    printed = "\n".join(x.printed for x in shown)
    missing = [s for s in SAYS[path.stem] if not any(part in printed for part in s.split("|"))]
    assert not missing, printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stored_with_their_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert notebook["nbformat"] == 4 and len({c["id"] for c in notebook["cells"]}) == len(notebook["cells"])
    assert not any(c["execution_count"] for c in code)
    stored = json.dumps([c["outputs"] for c in code], ensure_ascii=False)
    pictures = sum("text/html" in x.get("data", {}) for c in code for x in c["outputs"])
    assert pictures == PICTURES[path.stem], "run python -m polydyn.testing.notebooks"
    assert all(any(part in stored for part in s.split("|")) for s in SAYS[path.stem])
    assert path.stat().st_size < MAX_BYTES


def test_there_are_six_notebooks() -> None:
    assert [p.stem for p in NOTEBOOKS] == list(PICTURES) == list(SAYS)

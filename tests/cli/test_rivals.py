"""Comparison with torch: ``polydyn bench --against torch --module FILE`` runs the output of torch.export.save."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from polydyn.cli import main
from polydyn.cli.machine import DIFFERENT
from tests.support.tiny import model, node

torch = pytest.importorskip("torch", reason="the extra [torch] is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own plans


class Product(torch.nn.Module):  # type: ignore[name-defined, misc]
    """``p = x @ w - y`` and ``relu(p)``, the second input by its name."""

    def __init__(self, w: np.ndarray) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.from_numpy(w))

    def forward(self, x, *, y):  # type: ignore[no-untyped-def]
        p = x @ self.w - y
        return {"positive": torch.relu(p), "p": p}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model for both, and modules of other weights and of one size."""
    made = tmp_path_factory.mktemp("rivals")
    w = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    nodes = [node("MatMul", "x w", "m"), node("Sub", "m y", "p"), node("Relu", "p", "positive")]
    inputs = {"y": ("float32", ["N", 5]), "x": ("float32", ["N", 6])}
    onnx.save(model(nodes, inputs, ["positive", "p"], {"w": w}), made / "both.onnx")
    rows = torch.export.Dim("rows", min=0)
    for name, weights, dynamic in (("both", w, True), ("other", w + 1, True), ("fixed", w, False)):
        shapes = {"x": {0: rows}, "y": {0: rows}} if dynamic else None
        given = (torch.ones(3, 6),), {"y": torch.ones(3, 5)}
        torch.export.save(torch.export.export(Product(weights), *given, dynamic_shapes=shapes), made / f"{name}.pt2")
    (made / "none.pt2").write_text("no module")
    return made


def bench(folder: Path, module: str, shape: str) -> tuple[int, str]:
    arguments = ["--against", "torch", "--module", str(folder / module), "--shape", shape, "--rounds", "2", "--json"]
    done = CliRunner().invoke(main, ["bench", str(folder / "both.onnx"), *arguments])
    return done.exit_code, done.output


def test_torch_runs_the_module_beside_polydyn(folder: Path) -> None:
    code, output = bench(folder, "both.pt2", "N=7")
    (row,) = json.loads(output)["shapes"]
    assert code == 0 and row["ms"]["torch"] > 0 and row["error"]["torch"] < 1e-5
    code, output = bench(folder, "other.pt2", "N=7")
    assert code == DIFFERENT and json.loads(output)["shapes"][0]["error"]["torch"] > 0.1


@pytest.mark.parametrize(
    ("module", "message"),
    [("none.pt2", "cannot read"), ("absent.pt2", "cannot read"), ("fixed.pt2", "fixed.pt2 does not run: ")],
)
def test_a_module_that_torch_cannot_run_is_refused(folder: Path, module: str, message: str) -> None:
    code, output = bench(folder, module, "N=7")
    assert code == 1 and message in output and "rule: --module" in output and "remedy: " in output

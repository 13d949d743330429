"""The Python on the first page and on the usage pages runs unchanged, with a small model for ``bert.onnx``.

docs/schedules.md, docs/exploring.md, docs/writing-schedules.md, docs/extending.md, docs/decoding.md and
docs/onnxruntime.md have separate tests.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.graph.operators.registry import OPERATORS
from tests.support.paths import ROOT
from tests.support.tiny import model, node

STANDALONE = ("quickstart", "quantized", "new-gpu", "wrong-results")
"""Pages of docs/ whose blocks form one script without prerequisites."""
USAGE = ("index", "python", "switching", "torch", "serving")
TESTED = {"README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in (*USAGE, *STANDALONE))}
OTHERS = ("schedules", "exploring", "writing-schedules", "extending", "decoding", "onnxruntime")
ELSEWHERE = {f"docs/{name}.md" for name in OTHERS}


def blocks(page: str) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [dedent(text) for text in found]


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Set up the folder and the names that a reader has."""
    monkeypatch.chdir(tmp_path)
    nodes = [
        node("Gather", "table input_ids", "words"), node("Cast", "attention_mask", "m", to=1),
        node("Unsqueeze", "m last", "u"), node("Mul", "words u", "masked"), node("MatMul", "masked w", "p"),
        node("Softmax", "p", "last_hidden_state"),
    ]  # fmt: skip
    constants = {"table": np.eye(8, dtype=np.float32), "last": np.array([-1]), "w": np.ones((8, 32), np.float32)}
    inputs = {n: ("int64", ["B", "L"]) for n in ("input_ids", "attention_mask")}
    onnx.save(model(nodes, inputs, ["last_hidden_state"], constants), tmp_path / "bert.onnx")
    fixed = {n: ("int64", [2, 61]) for n in inputs}
    onnx.save(model(nodes, fixed, ["last_hidden_state"], constants), tmp_path / "static.onnx")
    ids = np.ones((2, 61), np.int64)
    return {"ids": ids, "mask": ids, "feeds": {"input_ids": ids, "attention_mask": ids}}


def test_every_block_has_a_test() -> None:
    pages = {str(p.relative_to(ROOT)) for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"))
             if blocks(str(p.relative_to(ROOT)))}  # fmt: skip
    assert pages == TESTED | ELSEWHERE


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_page(page: str, scope: dict[str, Any], tmp_path: Path) -> None:
    (text,) = blocks(page)
    exec(compile(text, page, "exec"), scope)
    assert scope["out"]["last_hidden_state"].shape == (2, 61, 32) and (tmp_path / "bert.polydyn").exists()


def test_the_page_of_the_python_interface(scope: dict[str, Any], tmp_path: Path) -> None:
    (text,) = blocks("docs/python.md")
    quick = text.replace('tune("bert.onnx", "bert.db", threads=2)', 'tune("bert.onnx", "bert.db", threads=2, trials=1)')
    assert quick != text, "tuning as it stands takes minutes"
    exec(compile(quick, "python.md", "exec"), scope)
    assert scope["out"]["last_hidden_state"].shape == (2, 61, 32) and "cuda" in scope["model"].manifest
    assert {p.name for p in tmp_path.iterdir()} >= {"bert.polydyn", "bert.db", "shapes.json"}


def test_an_operator_of_the_guide() -> None:
    (text,) = blocks("CONTRIBUTING.md")
    before = dict(OPERATORS)
    names = ("operator", "same_as_input", "operands", "emit", "op", "like", "OnnxNode", "ExpandContext")
    try:
        exec(compile(text, "CONTRIBUTING.md", "exec"), {n: _name(n) for n in names})
        assert OPERATORS["Softsign"].expand is not before["Softsign"].expand
    finally:
        OPERATORS.update(before)


def _name(name: str) -> Any:
    from polydyn import extend
    from polydyn.graph.operators import registry

    return registry.operator if name == "operator" else getattr(extend, name)


@pytest.mark.parametrize("page", STANDALONE)
def test_pages_that_are_one_script(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks(f"docs/{page}.md")), page, "exec"), {})


def test_the_server_answers_together_what_waits_together(
    scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of different lengths in one call; a text that the program rejects does not fail the others."""
    fastapi = pytest.importorskip("fastapi")
    polydyn.compile("bert.onnx", dims={"L": (1, 6)}).save("bert.polydyn")
    monkeypatch.setenv("MODEL", "bert.polydyn")
    (text,) = blocks("docs/serving.md")
    exec(compile(text, "docs/serving.md", "exec"), scope)
    embed, embedded, app = scope["embed"], scope["embedded"], scope["app"]

    async def ask(*texts: list[int]) -> list[Any]:
        async with app.router.lifespan_context(app):
            return await asyncio.gather(*(embedded(t) for t in texts), return_exceptions=True)

    alone = {n: embed([[1] * n])[0] for n in (1, 2, 5)}
    one, *rest, refused = asyncio.run(ask([1], [1, 1], [1] * 5, [1] * 7))
    for n, answer in zip((1, 2, 5), (one, *rest), strict=True):
        np.testing.assert_allclose(answer["vector"], alone[n], rtol=1e-5)
    assert max(a["texts"] for a in rest) > 1
    assert isinstance(refused, fastapi.HTTPException) and refused.status_code == 422 and "dim L" in refused.detail


def test_switching(scope: dict[str, Any]) -> None:
    (text,) = blocks("docs/switching.md")
    exec(compile(text, "docs/switching.md", "exec"), scope)
    (want,) = polydyn.compile("bert.onnx").run(scope["feeds"]).values()
    assert (scope["outputs"][0] == want).all()


@pytest.mark.filterwarnings("default")  # torch warns about its own plans
def test_torch(scope: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    text, _ = blocks("docs/torch.md")

    class Model(torch.nn.Module):  # type: ignore[name-defined,misc]
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return torch.softmax(input_ids * attention_mask, -1)

    scope |= {"model": Model(), "ids": torch.ones(2, 7), "mask": torch.ones(2, 7)}
    exec(compile(text, "docs/torch.md", "exec"), scope)
    with torch.inference_mode():
        assert torch.allclose(scope["model"](scope["ids"], scope["mask"]), torch.full((2, 7), 1 / 7))


@pytest.mark.slow
def test_torch_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block: a module, an exported program and a folder."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    _, text = blocks("docs/torch.md")

    class Masked(torch.nn.Module):  # type: ignore[name-defined,misc]
        def forward(self, x: Any, mask: Any) -> Any:
            return x * mask[:, :, None]

    monkeypatch.chdir(tmp_path)
    scope = {"polydyn": polydyn, "torch": torch, "module": Masked(), "x": torch.ones(2, 5, 3), "mask": torch.ones(2, 5)}
    torch.export.save(torch.export.export(scope["module"], (scope["x"], scope["mask"])), "model.pt2")
    (tmp_path / "bert-folder").mkdir()
    relu = model([node("Relu", "x", "y")], {"x": ("float32", ["batch"])}, ["y"])
    onnx.save(relu, str(tmp_path / "bert-folder" / "model.onnx"))
    exec(compile(text, "docs/torch.md", "exec"), scope)
    assert scope["program"].inputs == {"x": "float32[batch]"}

"""Run a notebook's code cells like IPython: the value of a last expression is shown.

usage: python -m polydyn.testing.notebooks NOTEBOOK ...

Writes the outputs of the cells into the files: printed text, and pictures as HTML.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shown:
    """The output of a code cell: its printed text, and the value of its last expression."""

    cell: str
    printed: str
    value: Any

    def outputs(self) -> list[dict[str, Any]]:
        """Return the outputs as a notebook stores them."""
        out: list[dict[str, Any]] = []
        if self.printed.strip():
            lines = self.printed.splitlines(keepends=True)
            out.append({"name": "stdout", "output_type": "stream", "text": lines})
        if hasattr(self.value, "_repr_html_"):
            html = self.value._repr_html_().splitlines(keepends=True)
            data = {"text/html": html, "text/plain": [type(self.value).__name__]}
            out.append({"data": data, "metadata": {}, "output_type": "display_data"})
        return out


def run(path: Path) -> Iterator[Shown]:
    """Run the cells one after the other, in the current folder."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield run_cell(cell, scope, path.name)


def run_cell(cell: dict[str, Any], scope: dict[str, Any], name: str) -> Shown:
    """Run a cell in a scope. ``name``: the notebook's, for tracebacks."""
    tree = ast.parse("".join(cell["source"]))
    place, value, out = f"{name}/{cell['id']}", None, io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, place, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), place, "eval"), scope)
    return Shown(cell["id"], out.getvalue(), value)


def store(path: Path) -> None:
    """Run a notebook in its folder and write its outputs into its file."""
    notebook = json.loads(path.read_text())
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        shown = {x.cell: x for x in run(path)}
    finally:
        os.chdir(before)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = shown[cell["id"]].outputs()
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for notebook in sys.argv[1:]:
        store(Path(notebook).resolve())

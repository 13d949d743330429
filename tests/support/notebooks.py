"""Runs a notebook's code cells like IPython: the value of a last expression is shown."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shown:
    """The output of a cell: its printed text, and the value of its last expression."""

    cell: str
    printed: str
    value: Any


def run(path: Path) -> Iterator[Shown]:
    """Run the cells one after the other."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        name, value, out = f"{path.name}/{cell['id']}", None, io.StringIO()
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(out):
            exec(compile(tree, name, "exec"), scope)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
        yield Shown(cell["id"], out.getvalue(), value)

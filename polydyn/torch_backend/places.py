"""Attach the location in the user's code to an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import fx

from polydyn.errors import PolydynError

E = TypeVar("E", bound=PolydynError)
BACKEND_FOLDER = str(Path(__file__).parent)
"""The folder whose frames are not the user's."""


def user_line(stack_trace: str | None) -> str:
    """Return ``FILE:LINE in FUNCTION: TEXT`` of the innermost frame of a torch trace that is not polydyn's own, or ""
    if there is none."""
    lines = [line.strip() for line in (stack_trace or "").splitlines() if line.strip()]
    frames = [k for k, line in enumerate(lines) if line.startswith("File ") and BACKEND_FOLDER not in line]
    if not frames:
        return ""
    file, _, rest = lines[frames[-1]].removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(", in ")
    text = lines[frames[-1] + 1] if frames[-1] + 1 < len(lines) else ""
    return f"{file}:{number} in {function}" + (f": {text}" if text else "")


def with_line(error: E, operator: str, line: str) -> E:
    """Return the same error with the operator and the user's line as its location."""
    where = " at ".join(x for x in (operator, line) if x)
    return type(error)(
        error.message, node=where or error.node, tensor=error.tensor, dim=error.dim, rule=error.rule,
        remedy=error.remedy,
    )  # fmt: skip


def at_node(error: E, node: Any) -> E:
    """Return the same error located at the operator and line of a torch node; unchanged if it is not an operator's
    node.
    """
    if not isinstance(node, fx.Node) or not node.op.startswith("call_"):
        return error
    return with_line(error, str(getattr(node.target, "__name__", node.target)), user_line(node.stack_trace))


def placed(error: E, model: Any) -> E:
    """Return an error about a node of an exported model with torch's operator and the user's line, if known."""
    name = (error.node or "").partition(" (")[0]
    for node in model.graph.node:
        if node.name == name:
            facts = {p.key: p.value for p in node.metadata_props}
            line = user_line(facts.get("pkg.torch.onnx.stack_trace"))
            return with_line(error, f"{error.node}", line) if line else error
    return error

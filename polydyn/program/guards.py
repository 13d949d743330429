"""Guards as plain data."""

from __future__ import annotations

from typing import Any

from polydyn.graph.ir import Guard
from polydyn.runtime.expressions import to_json
from polydyn.shapes.sentences import sentence


def guard_to_json(g: Guard) -> dict[str, Any]:
    """Return a guard as its manifest entry."""
    rule = f"{g.left} {g.relation} {g.right}"
    return {
        "rule": f"{g.words or sentence(g.left, g.relation, g.right)} ({rule})" if g.relation == "%==" else rule,
        "message": g.message,
        "left": to_json(g.left),
        "relation": g.relation,
        "right": to_json(g.right),
    }

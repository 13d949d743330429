"""Compile expressions into straight-line Python code that evaluates each distinct part once.

``Index.evaluate`` walks an expression as a tree. The closed form of a kernel's time contains the same quotients and
minima hundreds of times, so a straight line of assignments is that much faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polydyn.schedules.index import Atom, Index

Evaluator = Callable[[Mapping[str, int]], int]


def evaluator(x: Index) -> Evaluator:
    """Return a function that computes what ``x.evaluate`` computes from the values of symbols.

    The function raises KeyError if a value is missing. ValueError: the expression reads a tensor.
    """
    line = _Line()
    result = line.of(x)
    text = "\n    ".join(["def run(env):", *line.statements, f"return {result}"])
    scope: dict[str, Any] = {}
    exec(compile(text, "<evaluator>", "exec"), scope)
    run: Evaluator = scope["run"]
    return run


class _Line:
    """Assignments, in the order in which the parts are first needed."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self._known: dict[Index | Atom | str, str] = {}

    def of(self, x: Index | Atom | str) -> str:
        """Return the name of the variable that holds a part's value."""
        if x not in self._known:
            text = self._text(x)
            self._known[x] = f"t{len(self._known)}"
            self.statements.append(f"{self._known[x]} = {text}")
        return self._known[x]

    def _text(self, x: Index | Atom | str) -> str:
        if isinstance(x, str):
            return f"env[{x!r}]"
        if isinstance(x, Index):
            products = ["*".join([str(c), *map(self.of, m)]) for m, c in x.terms.items()]
            return " + ".join(products) or "0"
        if x.kind == "fetch":
            raise ValueError(f"{x} is read from a tensor")
        args = [self.of(a) for a in x.args]
        return f"{args[0]} // {args[1]} if {args[1]} else 0" if x.kind == "floordiv" else f"{x.kind}({', '.join(args)})"

"""Symbol arithmetic of the host program: Index expressions become C statements over one array of values.

``v[0..n)`` are the model's symbols, ``v[n]`` is ``nth``, then come the strides that callers choose; every further value
is one operation on earlier ones, computed once however often it is used.
"""

from __future__ import annotations

from collections.abc import Iterable

from polydyn.errors import UnsupportedError
from polydyn.schedules.index import Atom, Index

THREADS = "nth"
"""The special symbol: number of threads of the context."""

CHUNK = 400
"""Statements per C function: compilers are slow on very long ones."""


class Evaluation:
    """Collects statements; ``of`` gives an expression's position in ``v``."""

    def __init__(self, symbols: Iterable[str], strides: Iterable[str] = ()) -> None:
        names = [*symbols, THREADS, *strides]
        self.count = len(names)
        self.lines: list[str] = []
        self._known: dict[Index, int] = {Index.of(s): i for i, s in enumerate(names)}

    def of(self, x: Index) -> int:
        """The position of ``x``, with the statements that compute it added. UnsupportedError: it reads a tensor."""
        if x not in self._known:
            self._known[x] = self._compute(x)
        return self._known[x]

    def _new(self, statement: str) -> int:
        position = self.count
        self.count += 1
        self.lines.append(statement.replace("@", f"v[{position}]"))
        return position

    def _compute(self, x: Index) -> int:
        if x.constant is not None:
            return self._new(f"@ = {_literal(x.constant)};")
        terms = sorted(x.terms.items(), key=lambda t: (-len(t[0]), str(t[0])))
        if len(terms) > 1:
            total = self.of(Index({terms[0][0]: terms[0][1]}))
            for m, c in terms[1:]:
                total = self._new(f"PD_ADD(v[{total}], v[{self.of(Index({m: c}))}], &@);")
            return total
        ((monomial, coefficient),) = terms
        if coefficient != 1:
            part = self.of(Index({monomial: 1}))
            return self._new(f"PD_MUL(v[{part}], {_literal(coefficient)}, &@);")
        if len(monomial) > 1:
            left, right = self.of(Index({monomial[:-1]: 1})), self.of(Index({monomial[-1:]: 1}))
            return self._new(f"PD_MUL(v[{left}], v[{right}], &@);")
        atom = monomial[0]
        if isinstance(atom, str):
            raise KeyError(atom)  # verify_host_plan has refused it before
        return self._atom(atom)

    def _atom(self, atom: Atom) -> int:
        if atom.kind == "fetch":
            raise UnsupportedError(
                f"a size depends on the contents of tensor '{atom.name}': {atom}",
                tensor=atom.name,
                remedy="shapes must follow from the shapes of the inputs",
            )
        values = [self.of(a) for a in atom.args]
        name = {"floordiv": "pd_floordiv", "min": "pd_min", "max": "pd_max"}[atom.kind]
        result = values[0]
        for value in values[1:]:
            result = self._new(f"@ = {name}(v[{result}], v[{value}]);")
        return result


def _literal(c: int) -> str:
    if not -(2**63) < c < 2**63:
        raise UnsupportedError(f"the constant {c} in a size does not fit 64 bits")
    return f"INT64_C({c})"


def evaluation_function(name: str, lines: list[str]) -> str:
    """C text of ``static int name(int64_t *v)``, which runs the statements and returns 1 when one overflowed."""
    parts = [lines[i : i + CHUNK] for i in range(0, len(lines), CHUNK)]
    text = ""
    for k, part in enumerate(parts):
        body = "\n    ".join(part)
        text += f"static int {name}_{k}(int64_t *v) {{\n    int o = 0;\n    {body}\n    return o;\n}}\n"
    calls = "".join(f" | {name}_{k}(v)" for k in range(len(parts)))
    return f"{text}static int {name}(int64_t *v) {{\n    (void)v;\n    return 0{calls};\n}}\n"

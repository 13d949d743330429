"""Symbol arithmetic of the host program: Index expressions become C statements over one array of values.

``v[0..n)`` are the model's symbols and ``v[n]`` is ``nth``. The limits of the device follow (``symbols.py``), then the
strides that callers choose. Every further value is one operation on earlier values, computed once. The choice of a
candidate for a launch is such a value too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polydyn.errors import UnsupportedError
from polydyn.runtime.symbols import ARCH, LACKING, SHARED, THREADS, Condition
from polydyn.schedules.decision import ArgMin, Decision, Leaf
from polydyn.schedules.index import Atom, Index

CHUNK = 400
"""Statements per C function: compilers are slow on very long ones."""


class Evaluation:
    """Collects statements; ``of`` returns an expression's position in ``v``."""

    def __init__(self, symbols: Iterable[str], strides: Iterable[str] = ()) -> None:
        names = [*symbols, THREADS, SHARED, ARCH, LACKING, *strides]
        self.count = len(names)
        self.lines: list[str] = []
        self._positions: dict[Index, int] = {Index.of(s): i for i, s in enumerate(names)}
        self._choices: dict[object, int] = {}
        self._selections: dict[object, list[list[int]]] = {}

    def of(self, x: Index) -> int:
        """Return the position of ``x`` and add the statements that compute it. UnsupportedError: it reads a tensor."""
        if x not in self._positions:
            self._positions[x] = self._compute(x)
        return self._positions[x]

    def choose(
        self, decision: Decision, conditions: Sequence[Sequence[Condition]] = (), rows: Sequence[int] = ()
    ) -> int:
        """Return the position of the row number of the candidate that a decision selects; -1 if none may be launched.

        ``conditions``: the conditions of each candidate, or () for none; ``rows``: the row of each candidate, by
        default its number. Values that only one branch needs are computed only there. Launches of equal shapes have
        equal decisions, so the choice is made once for all of them.
        """
        key = decision, tuple(map(tuple, conditions)), tuple(rows)
        if key not in self._choices:
            position = self._choices[key] = self._reserve()
            self.lines.append(f"v[{position}] = -1;")
            self._decide(decision, position, conditions, rows)
        return self._choices[key]

    def select(self, choice: int, rows: Sequence[int], options: Sequence[Sequence[Index]]) -> list[list[int]]:
        """Return the positions of the values of every option; only the values of the chosen row are computed."""
        key = choice, tuple(rows), tuple(map(tuple, options))
        if key not in self._selections:
            positions, cases = [], []
            for row, option in zip(rows, options, strict=True):
                part = self._part()
                positions.append([part.of(x) for x in option])
                cases.append(f"case {row}: {self._close(part)} break;")
            self.lines.append(f"switch (v[{choice}]) {{ {' '.join(cases)} }}")
            self._selections[key] = positions
        return self._selections[key]

    def _decide(
        self, d: Decision, position: int, conditions: Sequence[Sequence[Condition]], rows: Sequence[int]
    ) -> None:
        """Add the statements that set a choice; it is -1 before them."""
        if isinstance(d, Leaf):
            self.lines.append(f"{self._test(d.kernel, conditions)} v[{position}] = {_row(d.kernel, rows)};")
        elif isinstance(d, ArgMin):
            least = self._reserve()
            for e in d.entries:
                better = f"(v[{position}] < 0 || v[{self.of(e.cost)}] < v[{least}])"
                take = f"v[{least}] = v[{self.of(e.cost)}]; v[{position}] = {_row(e.kernel, rows)};"
                self.lines.append(f"{self._test(e.kernel, conditions)} if {better} {{ {take} }}")
        else:
            test, sides = f"v[{self.of(d.index)}] <= {_literal(d.threshold)}", []
            for side in (d.low, d.high):
                part = self._part()
                part._decide(side, position, conditions, rows)
                sides.append(self._close(part))
            self.lines.append(f"if ({test}) {{ {sides[0]} }} else {{ {sides[1]} }}")

    def _test(self, kernel: int, conditions: Sequence[Sequence[Condition]]) -> str:
        """Return the C test that a candidate may be launched; empty if it always may."""
        required = conditions[kernel] if conditions else ()
        tests = [_holds(self.of(a), relation, self.of(b)) for a, relation, b in required]
        return f"if ({' && '.join(tests)})" if tests else ""

    def _part(self) -> Evaluation:
        """Return an evaluation for a branch. It can use all values so far; values computed in it are local to it."""
        part = Evaluation(())
        part.count, part._positions = self.count, dict(self._positions)
        return part

    def _close(self, part: Evaluation) -> str:
        """Return the statements of a branch so far, and reserve their positions."""
        self.count, text = part.count, " ".join(part.lines)
        part.lines = []
        return text

    def _reserve(self) -> int:
        self.count += 1
        return self.count - 1

    def _new(self, statement: str) -> int:
        position = self._reserve()
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
            raise KeyError(atom)  # verify_host_plan has rejected it
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


def _row(kernel: int, rows: Sequence[int]) -> int:
    return rows[kernel] if rows else kernel


def _holds(a: int, relation: str, b: int) -> str:
    """Return the C test of a guard's relation between the values at two positions."""
    if relation == "%==":
        return f"(v[{b}] ? v[{a}] % v[{b}] == 0 : v[{a}] == 0)"
    return f"v[{a}] {relation} v[{b}]"


def _literal(c: int) -> str:
    if not -(2**63) < c < 2**63:
        raise UnsupportedError(f"the constant {c} in a size does not fit 64 bits")
    return f"INT64_C({c})"


def evaluation_function(name: str, lines: list[str]) -> str:
    """Return the C text of ``static int name(int64_t *v)``, which runs the statements and returns 1 on overflow."""
    parts = [lines[i : i + CHUNK] for i in range(0, len(lines), CHUNK)]
    text = ""
    for k, part in enumerate(parts):
        body = "\n    ".join(part)
        text += f"static int {name}_{k}(int64_t *v) {{\n    int o = 0;\n    {body}\n    return o;\n}}\n"
    calls = "".join(f" | {name}_{k}(v)" for k in range(len(parts)))
    return f"{text}static int {name}(int64_t *v) {{\n    (void)v;\n    return 0{calls};\n}}\n"

"""Symbol arithmetic of the host program: Index expressions become C statements over one array of values.

``v[0..n)`` are the model's symbols, ``v[n]`` is ``nth``, then come the strides that callers choose; every further value
is one operation on earlier ones, computed once however often it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polydyn.errors import UnsupportedError
from polydyn.schedules.decision import ArgMin, Decision, Leaf
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
        self._choices: dict[Decision, int] = {}
        self._selections: dict[tuple[int, tuple[tuple[Index, ...], ...]], list[int]] = {}

    def of(self, x: Index) -> int:
        """The position of ``x``, with the statements that compute it added. UnsupportedError: it reads a tensor."""
        if x not in self._known:
            self._known[x] = self._compute(x)
        return self._known[x]

    def choose(self, decision: Decision) -> int:
        """The position of the choice that a decision makes. What only some branches need, only they compute.

        Launches of equal shapes have equal decisions: the choice is made once for all of them.
        """
        if decision not in self._choices:
            position = self._choices[decision] = self._reserve()
            self.lines.append(self._decision(decision, position))
        return self._choices[decision]

    def select(self, choice: int, options: Sequence[Sequence[Index]]) -> list[int]:
        """Positions that take the values of ``options[v[choice]]``; the others are not computed."""
        asked = choice, tuple(map(tuple, options))
        if asked in self._selections:
            return self._selections[asked]
        positions = self._selections[asked] = [self._reserve() for _ in options[0]]
        cases = []
        for k, option in enumerate(options):
            part = self._part()
            moves = [f"v[{p}] = v[{part.of(x)}];" for p, x in zip(positions, option, strict=True)]
            cases.append(f"case {k}: {self._close(part)} {' '.join(moves)} break;")
        self.lines.append(f"switch (v[{choice}]) {{ {' '.join(cases)} }}")
        return positions

    def _decision(self, d: Decision, position: int) -> str:
        if isinstance(d, Leaf):
            return f"v[{position}] = {d.kernel};"
        part = self._part()
        if isinstance(d, ArgMin):
            at = part._reserve()  # the least cost so far
            text = f"v[{position}] = -1;"
            for e in d.entries:
                entry = part._part()
                guard = "" if e.guard is None else f"if (v[{entry.of(e.guard)}] <= 0)"
                guarded = part._close(entry)
                cost = entry.of(e.cost)
                better = f"if (v[{position}] < 0 || v[{cost}] < v[{at}])"
                take = f"v[{at}] = v[{cost}]; v[{position}] = {e.kernel};"
                text += f" {guarded} {guard} {{ {part._close(entry)} {better} {{ {take} }} }}"
        else:
            test = f"v[{part.of(d.index)}] <= {_literal(d.threshold)}"
            low, high = part._decision(d.low, position), part._decision(d.high, position)
            text = f"{self._close(part)} if ({test}) {{ {low} }} else {{ {high} }}"
        return f"{self._close(part)} {text}"

    def _part(self) -> Evaluation:
        """An evaluation for a branch: knows what is known here; what it computes is not known outside."""
        part = Evaluation(())
        part.count, part._known = self.count, dict(self._known)
        return part

    def _close(self, part: Evaluation) -> str:
        """The statements of a branch so far; their positions are taken."""
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

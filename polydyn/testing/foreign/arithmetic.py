"""Recheck claims about sizes: by sympy if both sides are polynomials, else by many exact examples.

A claim that follows from facts must hold for all sizes that satisfy the guards, since only guards are checked at run
time: so a fact without its guard is found too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sympy

from polydyn.schedules.index import Atom, Index
from polydyn.shapes.context import Assumed
from polydyn.testing.foreign.claims import Claim, Claims, Context, Extents, recording
from polydyn.testing.foreign.expressions import Env, ForeignError, Undefined, names, to_sympy, value

EXAMPLES = 40
"""Number of assignments at which a claim must hold."""
TRIES = 6000
"""Number of random assignments that are searched for ones that satisfy all guards."""
VALUES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 24, 31, 32, 33, 48, 64, 100, 128, 1000)
HOLDS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<=": lambda a, b: a <= b,
    "%==": lambda a, b: a == 0 if b == 0 else a % b == 0,
}


@contextmanager
def checked() -> Iterator[Claims]:
    """Check the decisions made inside the block, if it ends without an error. ForeignError: a claim does not hold."""
    with recording() as claims:
        yield claims
    check(claims)


def check(claims: Claims) -> int:
    """Recheck all claims and return their number. ForeignError: one does not hold, with the example."""
    numbers = random.Random(0)
    done = 0
    for c in claims.arithmetic:
        done += 1
        _decide(c, [], numbers)
    for context in claims.contexts.values():
        found = solutions(context, numbers)
        for c in context.claims if found else ():
            if names(c.left) | names(c.right) | _all_names(c.extents) <= found[0].keys() | {n for n, _ in c.extents}:
                done += 1
                _decide(c, found, numbers)
    return done


def _all_names(extents: Extents) -> frozenset[str]:
    return frozenset().union(*(names(e) for _, e in extents))


def _decide(c: Claim, sizes: Sequence[Env], numbers: random.Random) -> None:
    """Check a claim. ``sizes``: assignments that satisfy all guards; if empty, every assignment does."""
    if c.relation == "==" and c.left == c.right:
        return
    if c.relation == "==" and not sizes and not c.extents and _same_polynomial(c):
        return
    free = sorted(names(c.left) | names(c.right) | _all_names(c.extents))
    for k in range(EXAMPLES):
        env = dict(sizes[k % len(sizes)]) if sizes else _some(free, numbers, k)
        seen: dict[Atom, int] = {}
        try:
            if not _place_iterators(c.extents, env, numbers, k):
                continue
            left, right = value(c.left, env, seen), value(c.right, env, seen)
        except Undefined:
            continue
        if not HOLDS[c.relation](left, right):
            at = ", ".join(f"{n} = {v}" for n, v in sorted(env.items()))
            raise ForeignError(
                f"{c.kind} decided {c.left} {c.relation} {c.right}, which is {left} {c.relation} {right} at {at}",
                rule="decisions about sizes are taken again (POLYDYN_VERIFY=2)",
            )


def _same_polynomial(c: Claim) -> bool:
    """Return whether sympy finds both sides equal."""
    return bool(sympy.expand(to_sympy(c.left) - to_sympy(c.right), deep=False) == 0)  # atoms are equal or not


def _some(free: Sequence[str], numbers: random.Random, k: int) -> dict[str, int]:
    return {n: k if k < 2 else numbers.choice(VALUES) for n in free}


def _place_iterators(extents: Extents, env: dict[str, int], numbers: random.Random, k: int) -> bool:
    """Place iterators at their ends or between; return False if one of them does not run.

    Extents may name other iterators.
    """
    waiting = dict(extents)
    for n in waiting:
        env.pop(n, None)
    while waiting:
        ready = [n for n, e in waiting.items() if names(e) <= env.keys()]
        if not ready:
            return False
        for n in ready:
            most = value(waiting.pop(n), env)
            if most < 1:
                return False
            env[n] = (0, most - 1)[k % 2] if k < 4 else numbers.randrange(most)
    return True


# -- sizes of callers --------------------------------------------------------------------------------------------------


def solutions(context: Context, numbers: random.Random) -> list[dict[str, int]]:
    """Return sizes of the inputs that satisfy all guards; none if a guard has a data-dependent size."""
    facts = context.facts
    declared = sorted(facts.declared())
    guards = facts.guards()
    if not all(names(g.left) | names(g.right) <= set(declared) for g in guards):
        return []
    found: list[dict[str, int]] = []
    steps = _steps(guards)
    for k in range(TRIES):
        env = {n: k if k < 2 else numbers.choice(VALUES) * numbers.choice(steps.get(n, [1])) for n in declared}
        try:
            for g in guards:  # an equality with a single size determines it
                for one, other in ((g.left, g.right), (g.right, g.left)):
                    name = _single(one)
                    if g.relation == "==" and name and name not in names(other) and numbers.random() < 0.9:
                        env[name] = max(0, value(other, env))
            meets = all(HOLDS[g.relation](value(g.left, env), value(g.right, env)) for g in guards)
        except Undefined:
            continue
        if meets:
            found.append(env)
            if len(found) == EXAMPLES:
                break
    return found


def _single(e: Index) -> str:
    """Return the symbol that an expression is, or an empty string."""
    terms = list(e.terms.items())
    if len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1 and isinstance(terms[0][0][0], str):
        return terms[0][0][0]
    return ""


def _steps(guards: Sequence[Assumed]) -> dict[str, list[int]]:
    """Return the divisors of sizes from guards with a single size."""
    out: dict[str, list[int]] = {}
    for g in guards:
        free = names(g.left)
        if g.relation == "%==" and len(free) == 1 and not names(g.right):
            out.setdefault(min(free), [1]).append(value(g.right, {}))
    return out

"""Guards that no sizes satisfy. A program with them would reject every call, so compilation rejects it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from polydyn.errors import ShapeError
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index, floordiv
from polydyn.schedules.isl_util import Condition, at_least, equals, frame, limits

TRIAL_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 224, 640)
"""Sizes that are tried for all dims at once. If one of them satisfies the guards, no proof is needed."""
MAX_ISL_OPERATIONS = 50_000
"""Maximum isl operations for the guards over the same dims."""


class GuardLike(Protocol):
    """A guard (``polydyn/graph/ir.py``)."""

    @property
    def left(self) -> Index:
        """Left side of the comparison."""

    @property
    def relation(self) -> str:
        """One of ``==``, ``<=``, ``%==``."""

    @property
    def right(self) -> Index:
        """Right side of the comparison."""

    @property
    def message(self) -> str:
        """The node that needs it, and the reason."""


def check_possible(guards: Sequence[GuardLike]) -> None:
    """Check that some sizes satisfy all guards together, as far as these are affine, with minima, maxima and quotients.

    Raises ShapeError, which names the first guard that leaves no sizes.
    """
    for part in _partition(guards):
        symbols = sorted({s for g in part for s in (*g.left.symbols(), *g.right.symbols())})
        if any(_is_satisfied(part, n) for n in TRIAL_SIZES):
            continue
        violated = _first_without_sizes(part, tuple(symbols))
        if violated is not None:
            others = "".join(f"\n  because: {g.message}" for g in part if g is not violated)
            raise ShapeError(
                f"no size of {', '.join(symbols)} meets what the model needs: {violated.message}{others}",
                dim=", ".join(symbols), rule=f"{violated.left} {violated.relation} {violated.right}",
                remedy="check the sizes of the model's inputs: every call would be refused",
            )  # fmt: skip


def _partition(guards: Sequence[GuardLike]) -> Iterator[list[GuardLike]]:
    """Partition the guards into lists that share no symbol."""
    parts: list[tuple[frozenset[str], list[GuardLike]]] = []
    for g in guards:
        part, symbols = [g], g.left.symbols() | g.right.symbols()
        touched = [p for p in parts if p[0] & symbols]
        parts = [p for p in parts if not p[0] & symbols]
        for more, others in touched:
            symbols, part = symbols | more, [*others, *part]
        parts.append((frozenset(symbols), part))
    yield from (part for _, part in parts)


def _is_satisfied(guards: Sequence[GuardLike], size: int) -> bool:
    """Check whether a call with this size for all dims satisfies the guards. Equalities override the size of their
    symbol.
    """
    env = {s: size for g in guards for s in (*g.left.symbols(), *g.right.symbols())}
    for g in guards:
        if g.relation == "==":
            for this, other in ((g.left, g.right), (g.right, g.left)):
                if this.is_symbol and str(this) not in other.symbols():
                    env[str(this)] = other.evaluate(env)
                    break
    return min(env.values(), default=0) >= 0 and all(_holds(g, env) for g in guards)


def _holds(g: GuardLike, env: Mapping[str, int]) -> bool:
    left, right = g.left.evaluate(env), g.right.evaluate(env)
    if g.relation == "%==":
        return left % right == 0 if right else left == 0
    return left == right if g.relation == "==" else left <= right


def _first_without_sizes(guards: Sequence[GuardLike], symbols: tuple[str, ...]) -> GuardLike | None:
    """Return the first guard that leaves no sizes together with the guards before it.

    Returns None if sizes are left or the question is undecided.
    """
    try:
        with limits(MAX_ISL_OPERATIONS):
            space = frame("", symbols, ())
            left = space.where(at_least(s, 0) for s in symbols)
            for g in guards:
                try:
                    left = left.intersect(space.holds(_condition(g)))
                except ScheduleError:  # not affine
                    continue
                if left.is_empty():
                    return g
    except ScheduleError:  # too much work
        pass
    return None


def _condition(g: GuardLike) -> Condition:
    if g.relation == "%==":
        return equals(floordiv(g.left, g.right) * g.right, g.left)
    return equals(g.left, g.right) if g.relation == "==" else at_least(g.right, g.left)

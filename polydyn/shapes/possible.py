"""Guards that no sizes meet: a program of them would refuse every call, so it is refused when compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from polydyn.errors import ShapeError
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index, floordiv
from polydyn.schedules.isl_util import Condition, at_least, equals, frame, limits

TRIED = (1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 224, 640)
"""Sizes that all dims may have at once; guards that such a call meets are not asked about further."""
WORK = 50_000
"""Operations of isl for the guards over the same dims."""


class Asked(Protocol):
    """A guard (``polydyn/graph/ir.py``)."""

    @property
    def left(self) -> Index:
        """What is compared."""

    @property
    def relation(self) -> str:
        """One of ``==``, ``<=``, ``%==``."""

    @property
    def right(self) -> Index:
        """What it is compared with."""

    @property
    def message(self) -> str:
        """Who needs it, and why."""


def check_possible(guards: Sequence[Asked]) -> None:
    """Refuses guards that no sizes meet together, as far as they are affine, with minima, maxima and quotients.

    ShapeError: it names the first guard that nothing is left for.
    """
    for part in _apart(guards):
        symbols = sorted({s for g in part for s in (*g.left.symbols(), *g.right.symbols())})
        if any(_met(part, n) for n in TRIED):
            continue
        refused = _first_without_sizes(part, tuple(symbols))
        if refused is not None:
            others = "".join(f"\n  because: {g.message}" for g in part if g is not refused)
            raise ShapeError(
                f"no size of {', '.join(symbols)} meets what the model needs: {refused.message}{others}",
                dim=", ".join(symbols), rule=f"{refused.left} {refused.relation} {refused.right}",
                remedy="check the sizes of the model's inputs: every call would be refused",
            )  # fmt: skip


def _apart(guards: Sequence[Asked]) -> Iterator[list[Asked]]:
    """The guards in lists that share no symbol."""
    parts: list[tuple[frozenset[str], list[Asked]]] = []
    for g in guards:
        own, symbols = [g], g.left.symbols() | g.right.symbols()
        touched = [p for p in parts if p[0] & symbols]
        parts = [p for p in parts if not p[0] & symbols]
        for more, others in touched:
            symbols, own = symbols | more, [*others, *own]
        parts.append((frozenset(symbols), own))
    yield from (own for _, own in parts)


def _met(guards: Sequence[Asked], size: int) -> bool:
    """Whether a call meets them whose dims all have this size, but for those that an equality gives another one."""
    env = {s: size for g in guards for s in (*g.left.symbols(), *g.right.symbols())}
    for g in guards:
        if g.relation == "==":
            for this, other in ((g.left, g.right), (g.right, g.left)):
                if this.is_symbol and str(this) not in other.symbols():
                    env[str(this)] = other.evaluate(env)
                    break
    return min(env.values(), default=0) >= 0 and all(_holds(g, env) for g in guards)


def _holds(g: Asked, env: Mapping[str, int]) -> bool:
    left, right = g.left.evaluate(env), g.right.evaluate(env)
    if g.relation == "%==":
        return left % right == 0 if right else left == 0
    return left == right if g.relation == "==" else left <= right


def _first_without_sizes(guards: Sequence[Asked], symbols: tuple[str, ...]) -> Asked | None:
    """The first guard that leaves no sizes, those before it being met; None: there are sizes, or it is not decided."""
    try:
        with limits(WORK):
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


def _condition(g: Asked) -> Condition:
    if g.relation == "%==":
        return equals(floordiv(g.left, g.right) * g.right, g.left)
    return equals(g.left, g.right) if g.relation == "==" else at_least(g.right, g.left)

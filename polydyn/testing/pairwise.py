"""Pairwise covering arrays: rows in which every possible pair of values of two dimensions occurs.

The greedy algorithm of AETG (Cohen, Dalal, Fredman, Patton, 1997), without its random candidates: a row begins with the
first pair that no row has, and each further dimension takes the value with the most such pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Row = Mapping[str, str]
"""The value of every dimension; the value of some dimensions in a row that is not complete."""
Pair = frozenset[tuple[str, str]]
"""Two dimensions, each with one of its values."""
Rule = Callable[[Row], bool]
"""Returns whether the values of a row, which may lack dimensions, are possible together."""


@dataclass(frozen=True)
class CoveringArray:
    """``rows``: each is possible; ``impossible``: the pairs that no possible row has."""

    rows: tuple[dict[str, str], ...]
    impossible: frozenset[Pair]


def pairs(dimensions: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    """Yield the pairs of all values, in the order of the dimensions."""
    for (a, values), (b, others) in combinations(dimensions.items(), 2):
        for pair in product(values, others):
            yield frozenset(zip((a, b), pair, strict=True))


def pairs_in(row: Row) -> set[Pair]:
    """Return the pairs of one row."""
    return {frozenset(two) for two in combinations(row.items(), 2)}


def covering_array(dimensions: Mapping[str, Sequence[str]], rule: Rule = lambda _: True) -> CoveringArray:
    """Return rows that cover every pair of values of two dimensions, except pairs that ``rule`` makes impossible."""
    missing = dict.fromkeys(pairs(dimensions))
    rows: list[dict[str, str]] = []
    impossible: set[Pair] = set()
    while missing:
        pair = next(iter(missing))
        row = _completed(dict(pair), dimensions, rule, missing)
        if row is None:
            impossible.add(pair)
            del missing[pair]
            continue
        rows.append({name: row[name] for name in dimensions})
        for covered in pairs_in(row):
            missing.pop(covered, None)
    return CoveringArray(tuple(rows), frozenset(impossible))


def _completed(
    row: dict[str, str], dimensions: Mapping[str, Sequence[str]], rule: Rule, missing: Mapping[Pair, None]
) -> dict[str, str] | None:
    """Return the row with values for all dimensions, or None if there are no possible ones."""
    if not rule(row):
        return None
    name = next((n for n in dimensions if n not in row), None)
    if name is None:
        return row

    def gain(value: str) -> int:
        return sum(frozenset({(name, value), other}) in missing for other in row.items())

    for value in sorted(dimensions[name], key=gain, reverse=True):
        done = _completed({**row, name: value}, dimensions, rule, missing)
        if done is not None:
            return done
    return None

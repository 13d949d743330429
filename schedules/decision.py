"""Decisions: which of a group's kernels a shape launches, as data that is printed into the host program.

A decision is a tree of ``Split`` (``index <= threshold``) over symbols, whose leaves name a kernel (``Leaf``) or
compare closed-form costs (``ArgMin``). ``choose`` defines its meaning; the generated C does the same in 64-bit
integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import ZERO, Index, maximum, minimum, product


@dataclass(frozen=True)
class Leaf:
    """Kernel ``kernel``, a position in the group's list of kernels."""

    kernel: int


ONLY = Leaf(0)
"""The first kernel, for every shape."""


@dataclass(frozen=True)
class Entry:
    """A candidate of an ArgMin. ``cost`` is in picoseconds, or a score."""

    kernel: int
    cost: Index


@dataclass(frozen=True)
class ArgMin:
    """The entry of lowest cost, the first among equals. There is at least one entry (a decision is total)."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Split:
    """``low`` if ``index <= threshold``, else ``high``."""

    index: Index
    threshold: int
    low: Decision
    high: Decision


Decision: TypeAlias = Leaf | ArgMin | Split


def verify_decision(decision: Decision, kernels: int, symbols: frozenset[str]) -> None:
    """Check that the kernels exist, that expressions use only the given symbols, and that every ArgMin has an entry."""
    for node in walk(decision):
        if isinstance(node, Split):
            used, named = node.index.symbols(), []
        elif isinstance(node, Leaf):
            used, named = frozenset(), [node.kernel]
        else:
            if not node.entries:
                raise ScheduleError("a comparison has no entries", rule="a decision is total")
            named = [e.kernel for e in node.entries]
            used = frozenset(s for e in node.entries for s in e.cost.symbols())
        if used - symbols:
            raise ScheduleError(f"a decision uses unknown symbols {sorted(used - symbols)}")
        if any(not 0 <= k < kernels for k in named):
            raise ScheduleError(f"a decision names kernel {max(named)} of {kernels}")


def walk(decision: Decision) -> Iterator[Decision]:
    """Yield all nodes, depth first, ``low`` before ``high``."""
    yield decision
    if isinstance(decision, Split):
        yield from walk(decision.low)
        yield from walk(decision.high)


def map_indices(decision: Decision, f: Callable[[Index], Index]) -> Decision:
    """Return the decision with ``f`` applied to every expression."""
    if isinstance(decision, Split):
        low, high = map_indices(decision.low, f), map_indices(decision.high, f)
        return Split(f(decision.index), decision.threshold, low, high)
    if isinstance(decision, Leaf):
        return decision
    return ArgMin(tuple(Entry(e.kernel, f(e.cost)) for e in decision.entries))


def cheapest(kernels: int) -> ArgMin:
    """Return the comparison of n kernels. Their costs are not known yet."""
    return ArgMin(tuple(Entry(k, ZERO) for k in range(kernels)))


def members(decision: Decision, members_of: Callable[[frozenset[int]], Collection[int]]) -> Decision:
    """Turn a decision over sets of kernels into one over their members, whose costs are not known yet.

    Before: ``Split(i, t, Leaf(0), ArgMin(1, 2))``. After: each leaf compares the kernels that ``members_of`` returns
    for the sets that it names, at least one.
    """
    if isinstance(decision, Split):
        return replace(decision, low=members(decision.low, members_of), high=members(decision.high, members_of))
    named = [decision.kernel] if isinstance(decision, Leaf) else [e.kernel for e in decision.entries]
    return ArgMin(tuple(Entry(k, ZERO) for k in sorted(members_of(frozenset(named)))))


def with_costs(decision: Decision, cost: Callable[[int], Index]) -> Decision:
    """Return the decision with the cost of every kernel that it compares."""
    if isinstance(decision, Split):
        return replace(decision, low=with_costs(decision.low, cost), high=with_costs(decision.high, cost))
    if isinstance(decision, Leaf):
        return decision
    return ArgMin(tuple(replace(e, cost=cost(e.kernel)) for e in decision.entries))


def chooses(decision: Decision, kernel: int) -> Index:
    """Return 1 where the decision names a kernel, else 0, as an expression over its symbols.

    It has ``choose``'s meaning if no kernel is barred.
    """
    if isinstance(decision, Leaf):
        return Index.of(int(decision.kernel == kernel))
    if isinstance(decision, Split):
        low = _at_most(decision.index, decision.threshold)
        return chooses(decision.low, kernel) * low + chooses(decision.high, kernel) * (1 - low)
    numbers = [e.kernel for e in decision.entries]
    if kernel not in numbers:
        return ZERO
    at = numbers.index(kernel)
    own = decision.entries[at].cost
    others = enumerate(decision.entries)
    return product(_at_most(own, e.cost - int(k < at)) for k, e in others if k != at)


def _at_most(x: Index, y: Index | int) -> Index:
    """Return 1 where ``x <= y``, else 0."""
    return minimum(1, maximum(0, 1 + y - x))


def choose(decision: Decision, env: Mapping[str, int], barred: Collection[int] = ()) -> int:
    """Return the kernel that a shape launches. Kernels in ``barred`` may not run there.

    ScheduleError: all are barred.
    """
    ranked = _costs(_leaf(decision, env), env, barred)
    if not ranked:
        raise ScheduleError("no kernel may be launched at this shape", rule="a decision is total")
    return min(ranked)[2]


def cost(decision: Decision, kernel: int, env: Mapping[str, int]) -> int:
    """Return the cost of a kernel in the comparison that has it, or 0 if none has."""
    entries = [e for n in walk(decision) if isinstance(n, ArgMin) for e in n.entries if e.kernel == kernel]
    return entries[0].cost.evaluate(env) if entries else 0


def _leaf(decision: Decision, env: Mapping[str, int]) -> Leaf | ArgMin:
    """Return the leaf that the tests of a decision lead to."""
    while isinstance(decision, Split):
        decision = decision.low if decision.index.evaluate(env) <= decision.threshold else decision.high
    return decision


def _costs(node: Leaf | ArgMin, env: Mapping[str, int], barred: Collection[int]) -> list[tuple[int, int, int]]:
    """Return (cost, position, kernel) of the entries that are not barred."""
    if isinstance(node, Leaf):
        return [] if node.kernel in barred else [(0, 0, node.kernel)]
    return [(e.cost.evaluate(env), p, e.kernel) for p, e in enumerate(node.entries) if e.kernel not in barred]


def explain(
    decision: Decision,
    env: Mapping[str, int],
    names: Sequence[str],
    unit: str = "",
    barred: Mapping[int, str] | None = None,
) -> tuple[str, ...]:
    """Explain a choice: why kernels are barred, the path to the leaf, the kernel taken, then the other candidates.

    There is one line per test, and candidates are listed best first. ``names`` has the names of the kernels, ``unit``
    the unit of costs. A candidate that the leaf does not compare has an estimate if another leaf has its closed form.
    """
    barred = barred or {}
    lines = [f"not {names[k]}: {why}" for k, why in sorted(barred.items())]
    named = {n.kernel for n in walk(decision) if isinstance(n, Leaf)}
    entries = [e for n in walk(decision) if isinstance(n, ArgMin) for e in n.entries]
    forms = {e.kernel: e.cost for e in entries if e.cost != ZERO}

    def estimate(k: int) -> str:
        return f"{forms[k].evaluate(env)}{unit}" if k in forms else "no estimate"

    while isinstance(decision, Split):
        value = decision.index.evaluate(env)
        low = value <= decision.threshold
        lines.append(f"{decision.index} = {value} {'<=' if low else '>'} {decision.threshold}")
        decision = decision.low if low else decision.high
    ranked = sorted(_costs(decision, env, barred))
    compared = {decision.kernel} if isinstance(decision, Leaf) else {e.kernel for e in decision.entries}
    lines += _ranked_lines(ranked, names, estimate) if ranked else ["none of the others may run"]
    rest = named.union(e.kernel for e in entries) - compared - {*barred}
    return (*lines, *(f"{names[k]}: {estimate(k)}, not compared here" for k in sorted(rest)))


def _ranked_lines(
    ranked: Sequence[tuple[int, int, int]], names: Sequence[str], estimate: Callable[[int], str]
) -> Iterator[str]:
    """Yield the line of the kernel that is taken, with the reason, then lines of the other candidates."""
    (least, _, taken), *others = ranked
    equal = sum(cost == least for cost, _, _ in others)
    reason = f"the least of the {len(ranked)} that may run" if others else "the only candidate here"
    ties = f", the first of {equal + 1} equal ones" if equal else ""
    yield f"taken: {names[taken]}, {estimate(taken)}, {reason}{ties}"
    yield from (f"{names[k]}: {estimate(k)}" for _, _, k in others)

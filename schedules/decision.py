"""Decisions: which of a group's kept kernels a shape launches, as data that is printed into the host program.

A decision is a tree of ``Split`` (``index <= threshold``) over symbols, whose leaves name a kernel (``Leaf``) or
compare closed-form costs (``ArgMin``). ``choose`` is its meaning; the generated C does the same in 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index


@dataclass(frozen=True)
class Leaf:
    """Kernel ``kernel`` (a position in the group's list of kept kernels)."""

    kernel: int


@dataclass(frozen=True)
class Entry:
    """A candidate of an ArgMin. Allowed where ``guard <= 0`` (None: always). ``cost``: picoseconds, or a score."""

    kernel: int
    cost: Index
    guard: Index | None = None


@dataclass(frozen=True)
class ArgMin:
    """The allowed entry of least cost, the first among equals. At least one entry has no guard (total)."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Split:
    """``low`` where ``index <= threshold``, else ``high``."""

    index: Index
    threshold: int
    low: Decision
    high: Decision


Decision: TypeAlias = Leaf | ArgMin | Split


def verify_decision(decision: Decision, kernels: int, symbols: frozenset[str]) -> None:
    """Invariants: kernels exist, expressions use the given symbols only, every ArgMin has an unguarded entry."""
    for node in walk(decision):
        if isinstance(node, Split):
            used, named = node.index.symbols(), []
        elif isinstance(node, Leaf):
            used, named = frozenset(), [node.kernel]
        else:
            if all(e.guard is not None for e in node.entries):
                raise ScheduleError("every entry of a dispatch table has a guard", rule="the last entry is total")
            named = [e.kernel for e in node.entries]
            used = frozenset(s for e in node.entries for s in (e.cost.symbols() | _symbols(e.guard)))
        if used - symbols:
            raise ScheduleError(f"a decision uses unknown symbols {sorted(used - symbols)}")
        if any(not 0 <= k < kernels for k in named):
            raise ScheduleError(f"a decision names kernel {max(named)} of {kernels}")


def _symbols(guard: Index | None) -> frozenset[str]:
    return frozenset() if guard is None else guard.symbols()


def walk(decision: Decision) -> Iterator[Decision]:
    """All nodes, depth first, ``low`` before ``high``."""
    yield decision
    if isinstance(decision, Split):
        yield from walk(decision.low)
        yield from walk(decision.high)


def map_indices(decision: Decision, f: Callable[[Index], Index]) -> Decision:
    """The decision with ``f`` applied to every expression."""
    if isinstance(decision, Split):
        low, high = map_indices(decision.low, f), map_indices(decision.high, f)
        return Split(f(decision.index), decision.threshold, low, high)
    if isinstance(decision, Leaf):
        return decision
    return ArgMin(
        tuple(Entry(e.kernel, f(e.cost), None if e.guard is None else f(e.guard)) for e in decision.entries)
    )


def choose(decision: Decision, env: Mapping[str, int]) -> int:
    """The kernel that a shape launches."""
    node = _leaf(decision, env)
    return node.kernel if isinstance(node, Leaf) else min(_costs(node, env))[2]


def _leaf(decision: Decision, env: Mapping[str, int]) -> Leaf | ArgMin:
    while isinstance(decision, Split):
        decision = decision.low if decision.index.evaluate(env) <= decision.threshold else decision.high
    return decision


def _costs(node: ArgMin, env: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """(cost, position, kernel) of the allowed entries."""
    allowed = [(p, e) for p, e in enumerate(node.entries) if e.guard is None or e.guard.evaluate(env) <= 0]
    return [(e.cost.evaluate(env), p, e.kernel) for p, e in allowed]


def explain(decision: Decision, env: Mapping[str, int]) -> tuple[str, ...]:
    """The path to the choice: one line per test, what is taken and why, then the other candidates, best first.

    A candidate that the leaf does not compare has an estimate when another leaf has its closed form.
    """
    lines, every = [], list(walk(decision))
    while isinstance(decision, Split):
        value = decision.index.evaluate(env)
        low = value <= decision.threshold
        lines.append(f"{decision.index} = {value} {'<=' if low else '>'} {decision.threshold}")
        decision = decision.low if low else decision.high
    forms = {e.kernel: e.cost for node in every if isinstance(node, ArgMin) for e in node.entries}
    if isinstance(decision, Leaf):
        estimate = f", estimate {forms[decision.kernel].evaluate(env)}" if decision.kernel in forms else ""
        lines.append(f"taken: kernel {decision.kernel}{estimate}, the only candidate here")
        named = {decision.kernel}
    else:
        ranked, named = sorted(_costs(decision, env)), {e.kernel for e in decision.entries}
        (least, _, taken), *others = ranked
        lines.append(f"taken: kernel {taken}, estimate {least}, the least of {len(ranked)}")
        lines += [f"kernel {k}: {c}" for c, _, k in others]
        lines += [f"kernel {k}: guard does not hold" for k in sorted(named - {k for _, _, k in ranked})]
    rest = ({n.kernel for n in every if isinstance(n, Leaf)} | forms.keys()) - named
    for k in sorted(rest):
        lines.append(f"kernel {k}: {forms[k].evaluate(env) if k in forms else 'no estimate'}, not compared here")
    return tuple(lines)

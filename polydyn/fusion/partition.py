"""A partition of primitives into groups that passes merge. Groups stay convex, and merging must not raise traffic.

BladeDISC 4.1: small fusions first, larger ones by merging them. A pass walks the groups in topological order and calls
a ``Rule`` for each group and each of its producer groups. Two groups join if the rule agrees, if they stay convex (no
third group runs between the two: the graph of groups has no cycle), and if off-chip traffic does not rise. Every answer
is recorded, including the reasons against a join.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusedGroup, FusionPlan, Rows
from polydyn.fusion.traffic import may_rise
from polydyn.graph.rewriting import composed_size


@dataclass(frozen=True)
class Join:
    """The result of a rule that accepts a pair: the rows of the joined group, its kind, and a one-line reason."""

    rows: Rows
    reason: str
    kind: str = "nest"


MAX_NODES = 48
"""Maximum nodes of a group. The cost of schedules and proofs grows with the square of this number."""

MAX_VALUES = 1024
"""Maximum operations and loads of one expression of a product's results. Maps that read others twice double it."""

Rule = Callable[[FusionPlan, FusedGroup, FusedGroup], "Join | str | None"]
"""``rule(plan, producer, reader)`` returns a Join, a reason against it, or None if the rule does not cover the pair."""


def join_groups(plan: FusionPlan, rule: Rule) -> FusionPlan:
    """Run one pass: join every group to its producer groups as far as ``rule`` allows.

    Backbones are tried first, then the latest producers. A joined group is tried again as a whole.
    """
    p = Partition(plan)
    for start in p.order():
        b: int | None = start
        while b is not None:
            b = next((a for a in p.producers(b) if p.try_join(a, b, rule)), None)
    return p.plan()


class Partition:
    """Groups under construction, each numbered by the position of its first node.

    ``before`` maps each group to the bit set of the groups that must run first. Bits of joined groups stay in the sets
    and have no meaning; the group that absorbed them has its own bit there.
    """

    def __init__(self, plan: FusionPlan) -> None:
        """``plan``: groups in launch order."""
        self._plan = plan
        self._position = {n.output: k for k, n in enumerate(plan.graph.nodes)}
        self._inputs = plan.inputs
        self.groups: dict[int, FusedGroup] = {}
        self.home: dict[str, int] = {}
        self.refused = dict(plan.refused)
        for g in plan.groups:
            self._place(self._position[g.nodes[0].output], g)
        self._concats: dict[int, set[str]] = {}
        for t, w in plan.windows.items():
            k = self.home.setdefault(w.target, len(self._position) + len(self._concats))
            self._concats.setdefault(k, set()).add(t)
        self.before = self._closure()
        self._current = sum(1 << g for g in self.before)

    def _place(self, k: int, g: FusedGroup) -> None:
        self.groups[k] = g
        self.home |= {n.output: k for n in g.nodes}

    def order(self) -> list[int]:
        """Return the groups, producers first."""
        return sorted(self.groups, key=lambda g: ((self.before[g] & self._current).bit_count(), g))

    def reads(self, g: int) -> set[int]:
        """Return the groups (and concatenations) whose results a group reads."""
        if g in self._concats:
            return {self.home[t] for t in self._concats[g]}
        return {self.home[t] for n in self.groups[g].nodes for t in self._inputs[n.output] if t in self.home} - {g}

    def producers(self, g: int) -> list[int]:
        """Return the producer groups of a group, in the order in which it should try to join them."""
        producers = [a for a in self.reads(g) if a in self.groups]
        return sorted(producers, key=lambda a: (self.groups[a].kind != "contract", -a))

    def try_join(self, a: int, b: int, rule: Rule) -> bool:
        """Join reader ``b`` to producer ``a`` (the number of the result) if all conditions hold; else record the
        reason.
        """
        verdict = rule(self._plan, self.groups[a], self.groups[b])
        if isinstance(verdict, Join):
            verdict = self._too_many(a, b, verdict) or self.cycle(a, b) or self._rise(a, b) or verdict
        if verdict is None or isinstance(verdict, str):
            if verdict:
                self._record_reason(a, b, verdict)
            return False
        self.join(a, b, verdict)
        return True

    def cycle(self, a: int, b: int) -> str | None:
        """Return the reason if joining would break convexity: a path between the two through a third group."""
        for x, y in ((a, b), (b, a)):
            for p in sorted(self.reads(y) - {x}):
                if self.before[p] >> x & 1:
                    through = self.groups[p].nodes[0].output if p in self.groups else "a concatenation"
                    return f"a cycle: {through} must run between the two (convexity)"
        return None

    def _too_many(self, a: int, b: int, join: Join) -> str | None:
        x, y = self.groups[a], self.groups[b]
        if len(x.nodes) + len(y.nodes) > MAX_NODES:
            return f"together they have more than {MAX_NODES} nodes, and a kernel is proven as a whole"
        if join.kind == "contract":  # its results are one expression each over the product's accumulator
            nodes = self._joined(a, b, join).nodes
            maps = [n for n in nodes if n.is_map]
            if any(composed_size(n, maps) > MAX_VALUES for n in y.nodes):
                return f"together they compute an expression of more than {MAX_VALUES} values"
        return None

    def _rise(self, a: int, b: int) -> str | None:
        apart = [self.groups[a], self.groups[b]]
        joined = self._joined(a, b, Join({}, ""))
        return may_rise(self._plan, apart, [joined])

    def _joined(self, a: int, b: int, join: Join) -> FusedGroup:
        x, y = self.groups[a], self.groups[b]
        nodes = tuple(sorted((*x.nodes, *y.nodes), key=lambda n: self._position[n.output]))
        reasons = (*x.reasons, f"{y.nodes[0].output}: {join.reason}", *y.reasons[1:])  # how the group began
        return FusedGroup(join.kind, nodes, self._plan.outputs_of(nodes), join.rows, reasons)

    def join(self, a: int, b: int, join: Join) -> None:
        """Merge two groups into one, numbered ``a``. The caller has checked ``cycle``."""
        self._place(a, self._joined(a, b, join))
        del self.groups[b]
        mine, both = 1 << a, 1 << a | 1 << b
        above, beside = self.before[a], self.before.pop(b)
        self._current &= ~(1 << b)
        if beside & mine and not beside & self._current & ~(above | mine):
            return  # every group that must run after ``a`` or ``b`` has all of their bits already
        below = (above | beside) & ~both
        self.before[a] = below
        for g, mask in self.before.items():
            if g != a and mask & both:
                self.before[g] = mask | below | mine

    def _record_reason(self, a: int, b: int, reason: str) -> None:
        outputs = {n.output for n in self.groups[a].nodes}
        for n in self.groups[b].nodes:
            for t in self._inputs[n.output]:
                if t in outputs and not self.refused.get((t, n.output), "").startswith(reason):  # may have detail
                    self.refused[t, n.output] = reason

    def plan(self) -> FusionPlan:
        """Return the plan of the current groups, in launch order."""
        return replace(self._plan, groups=tuple(self.groups[g] for g in self.order()), refused=self.refused)

    def _closure(self) -> dict[int, int]:
        before: dict[int, int] = {}

        def visit(g: int) -> int:
            stack = [g]
            while stack:
                top = stack[-1]
                missing = [p for p in self.reads(top) if p not in before]
                if missing:
                    stack += missing
                    continue
                stack.pop()
                mask = 0
                for p in self.reads(top):
                    mask |= before[p] | 1 << p
                before[top] = mask
            return before[g]

        for g in (*self.groups, *self._concats):
            if g not in before:
                visit(g)
        return before

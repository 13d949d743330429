"""Recheck memory that several tensors share: parts of concatenations, omitted copies, the arena.

Offsets of parts are computed from the concatenation itself. Addresses are compared element by element at small sizes
that satisfy all guards. Live ranges are derived from the loads and stores of statements (``order``), without
``Array.address`` and ``live_ranges``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import sympy

from polydyn.fusion.plan import FusionPlan
from polydyn.graph.ir import Compute, Concat, Graph
from polydyn.lowering.place import PlacedGroup
from polydyn.program.memory import Slot
from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import Load
from polydyn.schedules.index import Index
from polydyn.testing.foreign.arithmetic import HOLDS
from polydyn.testing.foreign.expressions import Env, ForeignError, Undefined, names, to_sympy, value
from polydyn.testing.foreign.order import touches, waves_of

SIZES = (1, 2, 3, 4, 5, 8, 0, 16, 32)
"""Sizes of the dims of a call at which addresses are compared."""
CALLS = 4
TRIES = 400
MAX_ELEMENTS = 20_000
"""Maximum number of compared elements."""


def _wrong(message: str, tensor: str) -> ForeignError:
    return ForeignError(message, tensor=tensor, rule="shared memory is decided again (POLYDYN_VERIFY=2)")


def check_windows(graph: Graph, plan: FusionPlan) -> None:
    """Check that each part of a concatenation starts at the end of the previous parts; ForeignError names a tensor.

    ``graph``: before grouping, with its concatenations. ``plan``: the groups, with windows.
    """
    wholes = {n.output: n for n in graph.nodes if isinstance(n, Concat)}
    made = {n.output: n for n in plan.graph.nodes}
    lying: dict[str, list[tuple[str, Index, int]]] = {}
    for t, w in plan.windows.items():
        own = wholes[w.target].parts if w.target in wholes else ()
        held = t if t in own or t not in made else _copied(made[t], own)
        lying.setdefault(w.target, []).append((held, w.offset, w.axis))
    for target, parts in lying.items():
        whole = wholes.get(target)
        if whole is None:
            raise _wrong("parts are written into it, and it is no concatenation", target)
        left = list(parts)
        offset = Index.of(0)
        for p in whole.parts:
            found = [x for x in left if x[0] == p and x[2] == whole.axis and _same(x[1], offset)]
            if not found:
                raise _wrong(f"its part {p} does not lie at {offset} of axis {whole.axis}", target)
            left.remove(found[0])
            offset = offset + graph.tensors[p].shape[whole.axis]
        if left:
            raise _wrong(f"{left[0][0]} lies in it, and is no part of it", target)


def _copied(copy: Compute | Concat, parts: Sequence[str]) -> str:
    """Return the part that a node copies. The name of a copy that recomputes its part has the part's number."""
    number = copy.output.rpartition("/")[2]
    again = copy.inputs[:1] not in [(p,) for p in parts] and number.isdigit() and int(number) < len(parts)
    return parts[int(number)] if again else copy.inputs[0]


def _same(a: Index, b: Index) -> bool:
    return bool(sympy.expand(to_sympy(a) - to_sympy(b), deep=False) == 0)


# -- omitted copies ----------------------------------------------------------------------------------------------------


def check_copies(plan: FusionPlan, placed: Sequence[PlacedGroup], host: HostPlan) -> None:
    """Check that a group without a launch is a copy of another group's output, address by address.

    ForeignError names its output.
    """
    there = {p.fused.outputs[0] for p in placed}
    for group in plan.groups:
        if group.outputs[0] in there:
            continue
        (node,) = group.nodes if len(group.nodes) == 1 else (None,)
        output = group.outputs[0]
        if node is None or node.reduce is not None or not isinstance(node.body, Load):
            raise _wrong("no launch writes it, and it is no copy", output)
        source = node.body.buffer
        writers = [p for p in placed if source in p.fused.outputs]
        if not any(output in p.lowered.buffers.values() for p in writers):
            raise _wrong(f"no launch writes it, and none that computes {source} does", output)
        shapes = {t: plan.graph.tensors[t].shape for t in (source, output)}
        for env in small_sizes(host, [shapes[source], shapes[output]]):
            _compare(node, output, source, shapes, env)


def _compare(node: Compute, output: str, source: str, shapes: Mapping[str, Sequence[Index]], env: Env) -> None:
    """Compare the addresses of every element of an output and of its source."""
    body = node.body
    assert isinstance(body, Load)
    to, given = ([value(d, env) for d in shapes[t]] for t in (output, source))
    at = ", ".join(f"{n} = {v}" for n, v in sorted(env.items()))
    if math.prod(to) != math.prod(given):
        raise _wrong(f"it shares memory with {source}, which has {math.prod(given)} elements, not {math.prod(to)}, "
                     f"at {at}", output)  # fmt: skip
    for place, subscripts in enumerate(itertools.product(*map(range, to))):
        here = {**env, **{f"d{a}": s for a, s in enumerate(subscripts)}}
        address = 0
        for size, i in zip(given, body.index, strict=True):
            address = address * size + value(i, here)
        if address != place:
            raise _wrong(f"it shares memory with {source}, and its element {subscripts} is not at the same place, "
                         f"at {at}", output)  # fmt: skip


def small_sizes(host: HostPlan, shapes: Sequence[Sequence[Index]]) -> Iterator[dict[str, int]]:
    """Yield sizes that satisfy all guards, with few elements in tensors of these shapes.

    There are none if the plan has other symbols.
    """
    symbols = sorted({s.symbol for s in host.sources})
    read = frozenset().union(*(names(d) for shape in shapes for d in shape))
    if not read <= set(symbols):
        return
    numbers, found = random.Random(0), 0
    for _ in range(TRIES):
        env = {s: numbers.choice(SIZES) for s in symbols}
        try:
            meets = all(HOLDS[g.relation](value(g.left, env), value(g.right, env)) for g in host.guards)
            if not meets or any(math.prod(value(d, env) for d in shape) > MAX_ELEMENTS for shape in shapes):
                continue
        except (KeyError, Undefined):
            continue
        yield env
        found += 1
        if found == CALLS or not symbols:
            return


# -- the arena ---------------------------------------------------------------------------------------------------------


def check_slots(host: HostPlan, placed: Sequence[PlacedGroup], slots: Sequence[Slot]) -> None:
    """Check that every access to one tenant of a slot precedes every access to the next tenant.

    ForeignError names a tensor.
    """
    touched, wave_of = dict(map(touches, placed)), waves_of(host)
    lives: dict[str, list[int]] = {}
    for k, launch in enumerate(host.launches):
        for b in set().union(*touched.get(launch.label, ())):
            lives.setdefault(b, []).append(wave_of[k])
    for slot in slots:
        living = sorted((min(lives[t]), max(lives[t]), t) for t in slot.tenants if t in lives)
        for (_, last, before), (first, _, after) in itertools.pairwise(living):
            if first <= last:
                raise _wrong(f"it lies where {before} lies, which is still used in wave {last}", after)

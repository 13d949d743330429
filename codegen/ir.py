"""The loop IR, between isl's AST and C text.

Nodes are frozen. Passes are functions from a body (a tuple of nodes) to a body, directed by marks that they consume.
Index expressions are ``Index``. Scalar code is ``Value`` plus the forms that exist only here: flat addresses,
registers, vectors, and arguments of the GPU's calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from polydyn.schedules.expr import Op, Value, children
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.tree.names import MarkName

# -- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatLoad(Value):
    """``lanes`` elements of ``buffer`` from ``address``, ``stride`` elements apart; only ``mask`` lanes if given.

    ``guard``: a boolean per lane; if it is false, nothing is read and the lane is 0. A ``dtype`` wider than the
    buffer's means that several of its elements, from ``address`` on, are read as one.
    """

    buffer: str
    address: Index
    lanes: int = 1
    stride: Index = ONE
    mask: Index | None = None
    guard: Value | None = None


@dataclass(frozen=True)
class Reg(Value):
    """A named register value of ``lanes`` elements."""

    name: str
    lanes: int = 1


@dataclass(frozen=True)
class Undefined(Value):
    """The value of a register before its first assignment; a checked build detects it when it is stored."""


@dataclass(frozen=True)
class Broadcast(Value):
    """A scalar in every lane, or the common value of the lanes of a wider register."""

    value: Value
    lanes: int


@dataclass(frozen=True)
class Horizontal(Value):
    """All lanes of a vector combined by a reduction (``sum``, ``max``, ``min``, ``prod``) into a scalar."""

    reduction: str
    value: Value


@dataclass(frozen=True)
class Blend(Value):
    """The first ``count`` lanes of ``new``, the others of ``old``: a predicated accumulate."""

    new: Value
    old: Value
    count: Index


@dataclass(frozen=True)
class Ramp(Value):
    """``start + step * lane`` in every lane."""

    start: Index
    step: Index
    lanes: int


@dataclass(frozen=True)
class Between(Value):
    """A boolean in every lane: true for ``low <= lane < high``."""

    low: Index
    high: Index
    lanes: int


@dataclass(frozen=True)
class Apply(Value):
    """The value of a device function (``pd_shfl_xor``, ...) of ``args``."""

    function: str
    args: tuple[Value, ...]


@dataclass(frozen=True)
class Tile(Value):
    """The element (``row``, ``column``) of a tile in shared memory, or of memory in that layout.

    As an argument of ``Call`` it is the element's address. The tile starts at element ``start`` of ``buffer``. Rows are
    ``pitch`` elements apart. Inside a row, the chunks of ``chunk`` elements are permuted by XOR with the row, so that a
    column of chunks is in different banks.
    """

    buffer: str
    start: Index
    row: Index
    column: Index
    pitch: int
    chunk: int


@dataclass(frozen=True)
class Pointer(Value):
    """The address of element ``address`` of a buffer in global memory or in registers, an argument of ``Call``.

    A ``dtype`` other than the buffer's means that several elements move as one.
    """

    buffer: str
    address: Index


@dataclass(frozen=True)
class Parameter(Value):
    """The address of a kernel parameter that is passed by value (a tensor map), an argument of ``Call``."""

    name: str


@dataclass(frozen=True)
class Compare:
    """``left relation right`` on Index expressions; relation is one of ``== != < <= > >=``."""

    relation: str
    left: Index
    right: Index

    def decided(self) -> bool | None:
        """Return True or False if the difference is constant, else None."""
        d = (self.left - self.right).constant
        return None if d is None else self._relates(d)

    def holds(self, env: Mapping[str, int]) -> bool:
        """Whether it holds for these values of its symbols."""
        return self._relates((self.left - self.right).evaluate(env))

    def _relates(self, d: int) -> bool:
        return {"==": d == 0, "!=": d != 0, "<": d < 0, "<=": d <= 0, ">": d > 0, ">=": d >= 0}[self.relation]


@dataclass(frozen=True)
class For:
    """``for var in [lo, hi)``.

    ``kind``: ``serial``, ``parallel`` (of the coincident band), ``vector`` (var counts vectors) or ``unroll<n>``; on
    the GPU ``unroll`` (completely), ``warp`` or ``block`` (mapped to the lanes of a warp, the threads of a block).
    """

    var: str
    lo: Index
    hi: Index
    body: Body
    kind: str = "serial"


@dataclass(frozen=True)
class If:
    """``then`` if all comparisons of ``cond`` hold, else ``orelse``."""

    cond: tuple[Compare, ...]
    then: Body
    orelse: Body = ()


@dataclass(frozen=True)
class Let:
    """An integer name for ``value`` within ``body``."""

    var: str
    value: Index
    body: Body


@dataclass(frozen=True)
class Mark:
    """A contract from the schedule tree; exactly one pass consumes it."""

    name: str
    body: Body


@dataclass(frozen=True)
class Inst:
    """An instance of a statement that is not yet lowered: its coordinate ``coords[n]`` has the value ``args[n]``."""

    statement: str
    args: tuple[Index, ...]
    coords: tuple[str, ...] = ()

    @property
    def at(self) -> dict[str, Index]:
        """Coordinate -> its value."""
        return dict(zip(self.coords, self.args, strict=True))


@dataclass(frozen=True)
class Switch:
    """Chooses the body with the smallest key >= ``on``; ``on`` is at most the last key."""

    on: Index
    cases: tuple[tuple[int, Body], ...]


@dataclass(frozen=True)
class Alloc:
    """``size`` elements of ``dtype`` for ``body``; scope ``stack`` (constant size) or ``scratch`` (per thread).

    On the GPU ``shared`` (per block) or ``register`` (per thread).
    """

    buffer: str
    dtype: str
    size: Index
    scope: str
    body: Body


@dataclass(frozen=True)
class Store:
    """``buffer[address ...] = value``, or combined with the old value; ``stream`` > 0: may bypass the caches.

    ``again``: its task may have written the element before and replaces it.
    """

    buffer: str
    address: Index
    value: Value
    reduce: str | None = None
    lanes: int = 1
    stride: Index = ONE
    mask: Index | None = None
    stream: Index | None = None
    again: bool = False


@dataclass(frozen=True)
class Def:
    """Declares a register with its first value."""

    reg: str
    value: Value
    lanes: int = 1


@dataclass(frozen=True)
class Set:
    """Assigns a register, or combines if ``reduce`` names a reduction."""

    reg: str
    value: Value
    lanes: int = 1
    reduce: str | None = None


@dataclass(frozen=True)
class Call:
    """A device function that returns nothing (barrier, cp.async, ldmatrix, mma)."""

    function: str
    args: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Outline:
    """The body becomes a separate function of its free variables."""

    name: str
    body: Body


Node: TypeAlias = "For | If | Let | Mark | Inst | Switch | Alloc | Store | Def | Set | Call | Outline"
Body: TypeAlias = "tuple[Node, ...]"


def bodies(n: Node) -> tuple[Body, ...]:
    """Return the child bodies of a node."""
    if isinstance(n, (Store, Def, Set)):  # most nodes
        return ()
    if isinstance(n, If):
        return (n.then, n.orelse)
    if isinstance(n, Switch):
        return tuple(b for _, b in n.cases)
    return (n.body,) if isinstance(n, (For, Let, Mark, Alloc, Outline)) else ()


def with_bodies(n: Node, new: tuple[Body, ...]) -> Node:
    """Return the node with its child bodies replaced, in the order of ``bodies``."""
    if isinstance(n, If):
        return replace(n, then=new[0], orelse=new[1])
    if isinstance(n, Switch):
        return replace(n, cases=tuple((k, b) for (k, _), b in zip(n.cases, new, strict=True)))
    return replace(n, body=new[0]) if isinstance(n, (For, Let, Mark, Alloc, Outline)) else n


def walk(body: Body) -> Iterator[Node]:
    """Yield all nodes, outermost first."""
    stack = list(reversed(body))
    while stack:
        n = stack.pop()
        yield n
        for b in reversed(bodies(n)):
            stack.extend(reversed(b))


def rewrite(body: Body, f: Callable[[Node], Node | Body]) -> Body:
    """Rewrite bottom-up: every node is replaced by ``f(node)``, a node or a body that is spliced in.

    Nodes that ``f`` does not change stay the same objects.
    """
    out: list[Node] = []
    for n in body:
        old = bodies(n)
        if old:
            new = tuple([rewrite(b, f) for b in old])
            if any(a is not b for a, b in zip(old, new, strict=True)):
                n = with_bodies(n, new)
        r = f(n)
        out.extend(r) if isinstance(r, tuple) else out.append(r)
    return body if len(out) == len(body) and all(map(operator.is_, out, body)) else tuple(out)


def consume(body: Body, mark: MarkName, f: Callable[[Body], Body] | None = None) -> Body:
    """Apply ``f``, if given, to the body of every mark of that name, and remove the mark."""
    g = f or (lambda b: b)
    return rewrite(body, lambda n: g(n.body) if isinstance(n, Mark) and n.name == mark else n)


def subvalues(v: Value) -> tuple[Value, ...]:
    """Return the direct sub-expressions, including those of codegen forms."""
    if isinstance(v, (Broadcast, Horizontal)):
        return (v.value,)
    if isinstance(v, Apply):
        return v.args
    if isinstance(v, FlatLoad):
        return () if v.guard is None else (v.guard,)
    return (v.new, v.old) if isinstance(v, Blend) else children(v)


def walk_value(v: Value) -> Iterator[Value]:
    """Yield the expression and all its parts, outermost first."""
    stack = [v]
    while stack:
        x = stack.pop()
        yield x
        if not isinstance(x, Reg) and (not isinstance(x, FlatLoad) or x.guard is not None):  # most parts
            stack.extend(reversed(subvalues(x)))


def map_value(v: Value, f: Callable[[Value], Value]) -> Value:
    """Rebuild bottom-up with ``f`` applied to every part; unchanged parts stay the same objects."""
    if isinstance(v, (Op, Apply)):
        args = tuple([map_value(a, f) for a in v.args])
        if not all(map(operator.is_, args, v.args)):
            v = replace(v, args=args)
    elif isinstance(v, (Broadcast, Horizontal)):
        inner = map_value(v.value, f)
        v = v if inner is v.value else replace(v, value=inner)
    elif isinstance(v, Blend):
        v = replace(v, new=map_value(v.new, f), old=map_value(v.old, f))
    elif isinstance(v, FlatLoad) and v.guard is not None:
        v = replace(v, guard=map_value(v.guard, f))
    return f(v)


def map_values(body: Body, f: Callable[[Value], Value]) -> Body:
    """Apply ``f`` bottom-up inside every value of the body."""

    def g(n: Node) -> Node:
        if isinstance(n, Call):
            args = tuple(map_value(a, f) for a in n.args)
            return n if all(map(operator.is_, args, n.args)) else replace(n, args=args)
        if not isinstance(n, (Store, Def, Set)):
            return n
        value = map_value(n.value, f)
        return n if value is n.value else replace(n, value=value)

    return rewrite(body, g)


def lanes_of(v: Value) -> int:
    """Return the number of lanes of the result."""
    if isinstance(v, (FlatLoad, Reg, Broadcast, Ramp, Between)):
        return v.lanes
    if isinstance(v, Horizontal):
        return 1
    lanes: int | None = v.__dict__.get("_lanes")  # cached in the value, which never changes
    if lanes is None:
        lanes = v.__dict__["_lanes"] = max([lanes_of(x) for x in subvalues(v)], default=1)
    return lanes

"""A thin safe layer over islpy: the only module that touches dimension positions.

Rules that keep isl safe in process: one context (``DEFAULT_CONTEXT``); no callbacks anywhere (an exception inside one
corrupts the heap), so unions are walked through their lists; objects are built through the API, not from text, so that
any name is a legal name (it is also 5 to 10 times faster); children of schedule nodes are bounds-checked, which isl
does not do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import islpy as isl

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Atom, Index, IndexLike, Monomial

_DIM = isl.dim_type


@dataclass(frozen=True)
class Condition:
    """``expr >= 0``, or ``expr == 0`` when ``equality``; affine over coordinates and parameters."""

    expr: Index
    equality: bool = False

    def __str__(self) -> str:
        return f"{self.expr} {'=' if self.equality else '>='} 0"


def val(n: int) -> isl.Val:
    """Return an integer of any size as isl's; islpy converts only those of 64 bits."""
    return isl.Val(n if -(1 << 63) <= n < 1 << 63 else str(n))


def at_least(a: IndexLike, b: IndexLike) -> Condition:
    """``a >= b``."""
    return Condition(Index.of(a) - b)


def below(a: IndexLike, b: IndexLike) -> Condition:
    """``a < b``."""
    return Condition(Index.of(b) - a - 1)


def equals(a: IndexLike, b: IndexLike) -> Condition:
    """``a == b``."""
    return Condition(Index.of(a) - b, equality=True)


def between(low: IndexLike, a: IndexLike, high: IndexLike) -> tuple[Condition, Condition]:
    """``low <= a < high``."""
    return at_least(a, low), below(a, high)


@dataclass(frozen=True)
class Frame:
    """The space of a named tuple, ``name[dims]`` under ``params``, and the affine objects over it.

    An empty ``name`` is an anonymous tuple. ScheduleError when a dim repeats or is also a parameter.
    """

    name: str
    dims: tuple[str, ...]
    params: tuple[str, ...]

    def __post_init__(self) -> None:
        names = (*self.dims, *self.params)
        if len(set(names)) != len(names):
            repeated = sorted({n for n in names if names.count(n) > 1})
            raise ScheduleError(f"{self.name}: names {repeated} stand for two dimensions", rule="unique names")

    @cached_property
    def space(self) -> isl.Space:
        """The set space."""
        s = isl.Space.create_from_names(isl.DEFAULT_CONTEXT, set=list(self.dims), params=list(self.params))
        return s.set_tuple_name(_DIM.set, self.name) if self.name else s

    @cached_property
    def _local(self) -> isl.LocalSpace:
        return isl.LocalSpace.from_space(self.space)

    @cached_property
    def _zero(self) -> isl.Aff:
        return isl.Aff.zero_on_domain(self._local)

    @cached_property
    def _position(self) -> dict[str, tuple[isl.dim_type, int]]:
        at = {n: (_DIM.param, i) for i, n in enumerate(self.params)}
        return at | {n: (_DIM.in_, i) for i, n in enumerate(self.dims)}

    def aff(self, expr: IndexLike) -> isl.Aff:
        """An affine function; floor divisions by constants are allowed (so ``x % 8`` is too).

        ScheduleError: not affine, or a symbol that is neither a dim nor a parameter.
        """
        e = Index.of(expr)
        out = self._zero
        for m, c in e.terms.items():
            if not m:
                out = out.add_constant_val(val(c))  # a floor may have brought a constant along
            elif len(m) == 1 and isinstance(m[0], str) and m[0] in self._position:
                out = out.add_coefficient_val(*self._position[m[0]], val(c))
            elif len(m) == 1 and isinstance(m[0], Atom):
                out = out.add(self._floor(m[0], e).scale_val(val(c)))
            else:
                raise ScheduleError(
                    f"{e} is not affine over {self.name}[{', '.join(self.dims)}] and {list(self.params)}",
                    node=self.name,
                    rule="affine expressions",
                    remedy="give the product a parameter of its own, or mark the access opaque",
                )
        return out

    def _floor(self, a: Atom, whole: Index) -> isl.Aff:
        divisor = a.args[1].constant if a.kind == "floordiv" else None
        if not divisor:
            raise ScheduleError(f"{a} in {whole} is not affine", node=self.name, rule="affine expressions")
        return self.aff(a.args[0]).scale_down_val(val(divisor)).floor()

    def piecewise(self, expr: IndexLike) -> isl.PwAff:
        """Return a piecewise affine function: like ``aff``, but the expression may also have minima and maxima."""
        e = Index.of(expr)
        out = isl.PwAff.from_aff(self._zero)
        for m, c in e.terms.items():
            a = m[0] if len(m) == 1 else None
            if isinstance(a, Atom) and a.kind in ("min", "max"):
                first, *others = map(self.piecewise, a.args)
                part = reduce(isl.PwAff.min if a.kind == "min" else isl.PwAff.max, others, first)
            elif isinstance(a, Atom) and a.kind == "floordiv" and (divisor := a.args[1].constant or 0) > 0:
                part = self.piecewise(a.args[0]).scale_down_val(val(divisor)).floor()
            else:
                part, c = isl.PwAff.from_aff(self.aff(Index({m: c}))), 1
            out = out.add(part.scale_val(val(c)))
        return out

    def holds(self, c: Condition) -> isl.Set:
        """The tuples that satisfy a condition, which may have minima and maxima."""
        e = self.piecewise(c.expr)
        return e.zero_set() if c.equality else e.nonneg_set()

    def universe(self) -> isl.Set:
        """All tuples."""
        return isl.Set.universe(self.space)

    def where(self, conditions: Iterable[Condition]) -> isl.Set:
        """The tuples that satisfy every condition."""
        s = isl.BasicSet.universe(self.space)
        for c in conditions:
            make = isl.Constraint.equality_from_aff if c.equality else isl.Constraint.inequality_from_aff
            s = s.add_constraint(make(self.aff(c.expr)))
        return isl.Set.from_basic_set(s)

    def multi_aff(self, name: str, exprs: Sequence[IndexLike]) -> isl.MultiAff:
        """The function ``self -> name[exprs]``."""
        # names of the range do not matter; they only must differ from each other
        to = Frame(name, tuple(f"%{i}" for i in range(len(exprs))), self.params).space
        out = isl.MultiAff.zero(self.space.map_from_domain_and_range(to))
        for i, e in enumerate(exprs):
            out = out.set_aff(i, self.aff(e))
        return out

    def map_to(self, name: str, exprs: Sequence[IndexLike]) -> isl.Map:
        """The relation ``self -> name[exprs]``."""
        return isl.Map.from_multi_aff(self.multi_aff(name, exprs))


@lru_cache(maxsize=4096)
def frame(name: str, dims: tuple[str, ...], params: tuple[str, ...]) -> Frame:
    """A shared Frame (spaces are immutable)."""
    return Frame(name, dims, params)


def param_set(params: tuple[str, ...], conditions: Iterable[Condition] = (), positive: bool = True) -> isl.Set:
    """Return a context: the parameters that satisfy the conditions, and are all >= 1 if ``positive``."""
    conditions = [*conditions, *(at_least(p, 1) for p in params if positive)]
    return frame("", (), params).where(conditions).params()


def with_parameters(exprs: Sequence[Index], dims: Collection[str]) -> tuple[list[Index], tuple[str, ...]]:
    """Return the expressions over ``dims`` and parameters, with one parameter for every size that is not affine.

    Such sizes are minima, maxima, products, and quotients by sizes, of symbols outside ``dims``. A proof for all values
    of the parameter holds for these sizes. Also return the parameters, sorted.
    """
    names: dict[Monomial, str] = {}

    def name(m: Monomial) -> Index:
        if not Index({m: 1}).symbols().isdisjoint(dims):
            return Index({m: 1})  # not a size: ``aff`` rejects it
        return Index.of(names.setdefault(m, f"size of {len(names)}"))

    def atom(a: Atom) -> Index:
        a = Atom(a.kind, tuple(map(terms, a.args)), a.name)
        whole = a.kind == "floordiv" and (a.args[1].constant or 0) > 0
        return Index({(a,): 1}) if whole else name((a,))

    def terms(e: Index) -> Index:
        out = Index({})
        for m, c in e.rebuild(atom).terms.items():
            out = out + (name(m) if len(m) > 1 else Index({m: 1})) * c
        return out

    found = [terms(e) for e in exprs]
    return found, tuple(sorted({s for e in found for s in e.symbols()} - set(dims)))


# -- piecewise affine functions of the parameters --------------------------------------------------------------------


def constant_on_params(value: int, params: tuple[str, ...]) -> isl.PwAff:
    """A constant function of the parameters."""
    return isl.PwAff.from_aff(isl.Aff.val_on_domain_space(frame("", (), params).space.params(), val(value)))


def lift(f: isl.PwAff, to: Frame) -> isl.PwAff:
    """A function of the parameters as a function on a tuple space."""
    return f.insert_domain(to.space)


def dim_maximum(s: isl.Set) -> isl.PwAff | None:
    """Return the parametric maximum of a one-dimensional set, or None if it has no upper bound."""
    return s.dim_max(0) if s.dim_has_upper_bound(_DIM.set, 0) else None


def tidy(f: isl.PwAff, ctx: isl.Set) -> isl.PwAff:
    """Simplify a function on the context: fewer pieces, and a single one if one of its pieces fits everywhere."""
    f = f.gist_params(ctx).coalesce()
    pieces = f.get_pieces()
    for _, a in pieces if len(pieces) > 1 else ():
        whole = isl.PwAff.from_aff(a)
        if f.ne_set(whole).intersect(ctx).is_empty():
            return whole
    return f


def pw_aff_to_index(f: isl.PwAff) -> Index:
    """The Index of a function of the parameters in one piece without divisions. ScheduleError otherwise."""
    pieces = f.get_pieces()
    if len(pieces) != 1 or pieces[0][1].dim(_DIM.div):
        raise ScheduleError(f"{f} is not one affine expression")
    a = pieces[0][1]
    terms: dict[Monomial, int] = {(): a.get_constant_val().to_python()}
    for i in range(a.dim(_DIM.param)):
        terms[(a.get_dim_name(_DIM.param, i),)] = a.get_coefficient_val(_DIM.param, i).to_python()
    return Index(terms)


def split_rows(m: isl.Map) -> list[isl.Map]:
    """A schedule map as one map per time dimension."""
    f = isl.PwMultiAff.from_map(m)
    return [isl.Map.from_pw_aff(f.get_pw_aff(d)) for d in range(m.dim(_DIM.out))]


# -- walking ---------------------------------------------------------------------------------------------------------


def maps(u: isl.UnionMap) -> list[isl.Map]:
    """The maps of a union, by tuple names."""
    listed = u.get_map_list()
    return sorted((listed.get_at(i) for i in range(listed.n_map())), key=lambda m: pair(m))


def sets(u: isl.UnionSet) -> list[isl.Set]:
    """The sets of a union, by tuple name."""
    listed = u.get_set_list()
    return sorted((listed.get_at(i) for i in range(listed.n_set())), key=lambda s: str(s.get_tuple_name() or ""))


def pair(m: isl.Map) -> tuple[str, str]:
    """The names of a map's input and output tuple (empty when anonymous)."""
    names = tuple(m.get_tuple_name(d) if m.has_tuple_name(d) else "" for d in (_DIM.in_, _DIM.out))
    return names[0], names[1]


def union_sets(parts: Iterable[isl.Set | isl.UnionSet], params: tuple[str, ...] = ()) -> isl.UnionSet:
    """The union; empty for no parts."""
    out = isl.UnionSet.empty(frame("", (), params).space.params())
    for p in parts:
        out = out.union(p)
    return out


def union_maps(parts: Iterable[isl.Map | isl.UnionMap], params: tuple[str, ...] = ()) -> isl.UnionMap:
    """The union; empty for no parts."""
    out = isl.UnionMap.empty(frame("", (), params).space.params())
    for p in parts:
        out = out.union(p)
    return out


def child(node: isl.ScheduleNode, i: int) -> isl.ScheduleNode:
    """The i-th child. ScheduleError when there is none (isl would return a bogus leaf)."""
    if not 0 <= i < node.n_children():
        raise ScheduleError(f"schedule node has {node.n_children()} children, not {i + 1}")
    return node.child(i)


def sample(s: isl.Set) -> dict[str, int]:
    """One element of a non-empty set: parameter and dimension names to values (unnamed dims are ``d0, d1, ..``)."""
    point = s.sample_point()
    return _coordinates(s, point, _DIM.param, "p") | _coordinates(s, point, _DIM.set, "d")


def sample_pair(m: isl.Map) -> tuple[list[int], list[int], dict[str, int]]:
    """One pair of a non-empty relation: source tuple, sink tuple, parameters."""
    wrapped = m.wrap()
    point = wrapped.sample_point()
    values = [point.get_coordinate_val(_DIM.set, i).to_python() for i in range(wrapped.dim(_DIM.set))]
    n = m.dim(_DIM.in_)
    return values[:n], values[n:], _coordinates(wrapped, point, _DIM.param, "p")


def _coordinates(s: isl.Set, point: isl.Point, kind: isl.dim_type, prefix: str) -> dict[str, int]:
    return {
        s.get_dim_name(kind, i) or f"{prefix}{i}": point.get_coordinate_val(kind, i).to_python()
        for i in range(s.dim(kind))
    }


@contextmanager
def limits(max_operations: int) -> Iterator[None]:
    """Bound the work of isl inside the block. ScheduleError: isl used more operations. isl stays usable."""
    c = isl.DEFAULT_CONTEXT
    before = c.get_max_operations()
    c.reset_operations()
    c.set_max_operations(max_operations)
    try:
        yield
    except isl.Error as e:
        if "maximal number of operations" in str(e) or c.last_error() == isl.error.quota:
            raise ScheduleError(f"isl used more than {max_operations} operations", rule="operation limit") from e
        raise
    finally:
        c.set_max_operations(before)
        c.reset_operations()


def without_last(s: isl.Set, count: int) -> isl.Set:
    """Project a set on its first ``count`` dims."""
    return s.project_out(_DIM.set, count, s.dim(_DIM.set) - count)


def condition(c: isl.Constraint) -> Condition:
    """Return a constraint over named params and dims."""
    out = Index.of(c.get_constant_val().to_python())
    for kind in (_DIM.param, _DIM.set):
        for k in range(c.dim(kind)):
            out = out + Index.of(c.get_dim_name(kind, k)) * c.get_coefficient_val(kind, k).to_python()
    return Condition(out, c.is_equality())

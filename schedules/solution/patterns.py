"""Pattern-based schedule matrices (TSCompiler 5.2): an ordered list; each entry answers or declines with a reason.

``contraction`` (matmul-like, conv-like, pad+conv+element-wise): everything sinks into the backbone's loops, consumers
at an unknown shift of its reduction rows. ``stitch`` (element-wise, reduce, multi-reduce): the common loops outside,
then a phase, so that the shifts cannot skew one reduction against the next. ``isl``: the outermost parallel loops of
isl's own scheduler. ``total`` is the original order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import PRODUCTS, Load, Op, loads, walk
from polydyn.schedules.group.alignment import Alignment, align, same_iterators
from polydyn.schedules.group.dependence import Dependences, is_accumulation
from polydyn.schedules.group.polyhedra import is_exact, read_accesses
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.solution.isl_schedule import iterator_of, shared_loops
from polydyn.schedules.solution.matrix import Row, ScheduleMatrix, Unknown, matrix, row
from polydyn.schedules.solution.solve import SolvedMatrix, solve


@dataclass(frozen=True)
class Pattern:
    """A matrix and its meaning.

    ``dims``: for each row the dominant statement's iterator, or ``""`` for a phase row. ``roles``: statement ->
    ``init``, ``backbone``, ``prologue``, ``epilogue`` or ``map``. ``phases``: statement -> its phase. ``band``: the
    number of leading rows that are loops of all statements.
    """

    name: str
    matrix: ScheduleMatrix
    dims: tuple[str, ...]
    roles: dict[str, str]
    phases: dict[str, int]
    band: int = 0


@dataclass(frozen=True, eq=False)
class Choice:
    """The first pattern whose matrix has a legal solution, and why the earlier ones declined."""

    pattern: Pattern
    solved: SolvedMatrix
    declined: tuple[tuple[str, str], ...]


NAMES = ("contraction", "stitch", "isl", "total")
"""The names of the patterns in order."""


class _DeclinedError(Exception):
    """A pattern does not apply; the message is the reason."""


def choose(group: Group, deps: Dependences, among: Sequence[str] = NAMES) -> Choice:
    """Return the schedule of a group: the first pattern of ``among`` that applies and solves; ``total`` always does."""
    declined: list[tuple[str, str]] = []
    for name, build in (p for p in PATTERNS if p[0] in among):
        try:
            p = build(group, deps)
            return Choice(p, solve(p.matrix, group, deps), tuple(declined))
        except _DeclinedError as e:
            declined.append((name, str(e)))
        except (LegalityError, ScheduleError) as e:
            if name == "total":
                raise
            declined.append((name, str(e).splitlines()[0]))
    reasons = "; ".join(f"{n}: {why}" for n, why in declined)
    raise ScheduleError(f"no pattern applies: {reasons}", rule=f"patterns {', '.join(among)}")


# -- contraction -----------------------------------------------------------------------------------------------------


def contraction(group: Group) -> Pattern:
    """Match one sum of products with its initialiser, prologues (a phase each, before it) and element-wise epilogues.

    {Pad, Conv, Add + Relu}: rows (phase, n, h, w, o, c, r, s); Pad is phase 0, the epilogue ``?`` in (c, r, s).
    """
    _refuse_opaque(group)
    backbone = _backbone(group)
    where = group.statements.index(backbone)
    parallel = tuple(i for i in backbone.iterators if any(x.is_symbol and str(x) == i for x in backbone.index))
    if len(parallel) != sum(x.constant is None for x in backbone.index):
        raise _DeclinedError(f"{backbone.name} does not write at plain iterators")
    reduced = tuple(i for i in backbone.iterators if i not in parallel)
    aligned = align(group, backbone)
    init = [s for s in group.statements[:where] if s.array == backbone.array]
    prologue = [s for s in group.statements[:where] if s not in init]
    epilogue = list(group.statements[where + 1 :])
    lead = [len(prologue)] if prologue else []
    rows: dict[str, list[Row | IndexLike]] = {}
    for i, s in enumerate(prologue):
        rows[s.name] = [i, *s.iterators]
    for s in (*init, *epilogue):
        own = _exact_dims(s, parallel, aligned)
        rows[s.name] = [*lead, *own, *(row(0, Unknown(f"{s.name}.{r}")) for r in reduced)]
    rows[backbone.name] = [*lead, *parallel, *reduced]
    roles = {backbone.name: "backbone"} | {s.name: "init" for s in init}
    roles |= {s.name: "prologue" for s in prologue} | {s.name: "epilogue" for s in epilogue}
    phases = {s.name: len(prologue) for s in group.statements} | {s.name: i for i, s in enumerate(prologue)}
    name = _contraction_name(backbone, bool(prologue))
    band = 0 if lead else len(parallel)
    return Pattern(name, _padded(group, rows), ("",) * len(lead) + parallel + reduced, roles, phases, band)


def _backbone(group: Group) -> Statement:
    accumulations = [s for s in group.statements if s.reduce is not None]
    if len(accumulations) != 1:
        raise _DeclinedError(f"{len(accumulations)} reductions, not one")
    (b,) = accumulations
    products = [v for v in walk(b.value) if isinstance(v, Op) and v.name in PRODUCTS and len(loads(v)) >= 2]
    if b.reduce != "sum" or not is_accumulation(b) or not products:
        raise _DeclinedError(f"{b.name} is not a sum of products")
    return b


def _exact_dims(s: Statement, parallel: tuple[str, ...], aligned: Alignment) -> list[str]:
    """Return the iterators of ``s`` in the order of the backbone's parallel loops, if it has these and no others."""
    own = {dim: i for i, dim in aligned.dims[s.name].items()}
    if set(own) != set(parallel) or len(s.iterators) != len(parallel) or aligned.conflicts & set(parallel):
        raise _DeclinedError(f"{s.name} does not iterate over exactly {', '.join(parallel)} of the backbone")
    return [own[d] for d in parallel]


def _contraction_name(backbone: Statement, prologue: bool) -> str:
    if any(_windowed(backbone, i) for v in walk(backbone.value) if isinstance(v, Load) for i in v.index):
        return "pad+conv+element-wise" if prologue else "conv-like"
    return "matmul-like"


def _windowed(s: Statement, address: Index) -> bool:
    """Whether a parallel and a reduction iterator reach one element in several ways, as in a convolution.
    A flattened matrix has several iterators in one address too, but its rows do not overlap.
    """
    extents, written = dict(s.iters), {x for i in s.index for x in i.symbols()}
    steps = {x: address.split(x)[0] for x in s.iterators if x in address.symbols()}
    return any(
        _meet((steps[p], extents[p]), (steps[r], extents[r]))
        for p in steps.keys() & written
        for r in steps.keys() - written
    )


def _meet(a: tuple[Index, Index], b: tuple[Index, Index]) -> bool:
    """Whether n steps of one iterator may equal m steps of the other. Each pair is (elements per step, extent)."""
    common = a[0].terms.keys() & b[0].terms.keys()
    if not common:
        return False
    m = next(iter(common))
    x, y = a[0].terms[m], b[0].terms[m]
    if a[0] * y != b[0] * x:
        return False
    n = gcd(x, y)
    return all(e.constant is None or e.constant > abs(k) // n for e, k in ((a[1], y), (b[1], x)))


# -- stitch ----------------------------------------------------------------------------------------------------------


def stitch(group: Group) -> Pattern:
    """Match any number of reductions and maps that share outer loops.

    Softmax: rows (r, phase, l): maximum in phase 0, sum in phase 1, quotient in phase 2; initialisers at ``?``.
    """
    _refuse_opaque(group)
    accumulations = [s for s in group.statements if s.reduce is not None]
    dominant = max(accumulations or group.statements, key=lambda s: len(s.iters))
    aligned = align(group, dominant)
    common = aligned.common(group)
    if not common:
        raise _DeclinedError("no loop is common to all statements")
    inner = {s.name: _inner(s, aligned, common) for s in group.statements}
    init = _initialisers(group)
    phases = _phases(group, inner, init)
    if not accumulations and any(phases.values()):
        raise _DeclinedError("statements subscript each other's results differently")
    depth = max(len(i) for i in inner.values())
    with_phase = any(phases.values())
    rows: dict[str, list[Row | IndexLike]] = {}
    for s in group.statements:
        own = {dim: i for i, dim in aligned.dims[s.name].items()}
        rest = [row(0, Unknown(f"{s.name}.{d}")) for d in range(len(inner[s.name]), depth)]
        lead = [phases[s.name]] if with_phase else []
        rows[s.name] = [*(own[d] for d in common), *lead, *inner[s.name], *rest]
    longest = max(group.statements, key=lambda s: (s.name == dominant.name, len(inner[s.name])))
    dims = (*common, *([""] if with_phase else []), *_labels(inner[longest.name], depth))
    roles = {s.name: "init" if s.name in init else "backbone" if s.reduce else "map" for s in group.statements}
    name = ("element-wise", "reduce", "multi-reduce")[min(len(accumulations), 2)]
    return Pattern(name, _padded(group, rows), dims, roles, phases, len(common))


def _labels(names: tuple[str, ...], depth: int) -> tuple[str, ...]:
    return names + tuple(f"inner{d}" for d in range(len(names), depth))


def _inner(s: Statement, aligned: Alignment, common: tuple[str, ...]) -> tuple[str, ...]:
    """Return the iterators below the common loops: those of the written element first, then those of the reduction."""
    rest = [i for i in s.iterators if aligned.dims[s.name].get(i) not in common]
    written = {str(x) for x in s.index if x.is_symbol}
    return tuple(sorted(rest, key=lambda i: (i not in written, s.iterators.index(i))))


def _initialisers(group: Group) -> dict[str, str]:
    """Return each statement that initialises an accumulator, with the reduction that follows."""
    out = {}
    for i, s in enumerate(group.statements):
        if s.reduce is None:
            later = [t for t in group.statements[i + 1 :] if t.array == s.array]
            if later and later[0].reduce is not None:
                out[s.name] = later[0].name
    return out


def _phases(group: Group, inner: dict[str, tuple[str, ...]], init: dict[str, str]) -> dict[str, int]:
    """Return phase(t) = max over s -> t of phase(s) + [s accumulates, or s and t differ in their inner loops]."""
    phases = {s.name: 0 for s in group.statements}
    for k, t in enumerate(group.statements):
        for s in group.statements[:k]:
            if init.get(s.name) == t.name or not _touches(s, t):
                continue
            step = s.reduce is not None or not _nested(s, t, inner)
            phases[t.name] = max(phases[t.name], phases[s.name] + step)
    for i, t_name in init.items():
        phases[i] = phases[t_name]
    return phases


def _touches(s: Statement, t: Statement) -> bool:
    """Whether ``t``, the later one, accesses what ``s`` writes, or writes what ``s`` reads."""
    return any(a.array == s.array for a in (t.write, *read_accesses(t))) or any(
        a.array == t.array for a in read_accesses(s)
    )


def _nested(s: Statement, t: Statement, inner: dict[str, tuple[str, ...]]) -> bool:
    """Whether ``t`` accesses the elements of ``s`` in the same iteration of the inner loops, as far as both have them.
    """
    loops = set(zip(inner[s.name], inner[t.name], strict=False))
    met = [(s.write, b) for b in (t.write, *read_accesses(t)) if b.array == s.array]
    met += [(a, t.write) for a in read_accesses(s) if a.array == t.array]
    return all(loops <= set(same_iterators(s, a, t, b)) for a, b in met)


# -- isl's scheduler -------------------------------------------------------------------------------------------------


def found_by_isl(group: Group, deps: Dependences) -> Pattern:
    """Use the outermost parallel loops of isl's own scheduler; below them the statements keep the original order."""
    _refuse_opaque(group)
    if len(group.statements) == 1:
        raise _DeclinedError("one statement")
    band = shared_loops(group, deps)
    rows: dict[str, list[Row | IndexLike]] = {}
    for i, s in enumerate(group.statements):
        inside = {iterator_of(s, e) for e in band[s.name]}
        rows[s.name] = [*band[s.name], i, *(x for x in s.iterators if x not in inside)]
    depth, size = max(map(len, rows.values())), len(band[group.statements[0].name])
    dominant = max(group.statements, key=lambda s: len(s.iters))
    names = tuple(iterator_of(dominant, e) for e in band[dominant.name])
    roles = {s.name: "backbone" if s.reduce else "map" for s in group.statements}
    roles |= dict.fromkeys(_initialisers(group), "init")
    phases = {s.name: i for i, s in enumerate(group.statements)}
    return Pattern("isl", _padded(group, rows), _labels((*names, ""), depth), roles, phases, size)


# -- total -----------------------------------------------------------------------------------------------------------


def total(group: Group) -> Pattern:
    """Keep the original order: one nest after another. Always legal."""
    rows: dict[str, list[Row | IndexLike]] = {s.name: [i, *s.iterators] for i, s in enumerate(group.statements)}
    depth = max(len(r) for r in rows.values())
    roles = {s.name: "backbone" if s.reduce else "map" for s in group.statements}
    roles |= dict.fromkeys(_initialisers(group), "init")
    phases = {s.name: i for i, s in enumerate(group.statements)}
    return Pattern("total", _padded(group, rows), _labels(("",), depth), roles, phases)


def _padded(group: Group, rows: dict[str, list[Row | IndexLike]]) -> ScheduleMatrix:
    depth = max(len(r) for r in rows.values())
    return matrix({s.name: [*rows[s.name], *([0] * (depth - len(rows[s.name])))] for s in group.statements})


def _refuse_opaque(group: Group) -> None:
    """Decline groups that read their own results at positions known only at run time.

    Such an access orders everything, so fusing gains nothing.
    """
    written = {s.array for s in group.statements}
    for s in group.statements:
        for a in read_accesses(s):
            if a.array in written and not is_exact(a):
                raise _DeclinedError(f"{s.name} reads {a.array} at positions known only at run time")


PATTERNS: Sequence[tuple[str, Callable[[Group, Dependences], Pattern]]] = (
    ("contraction", lambda g, _: contraction(g)),
    ("stitch", lambda g, _: stitch(g)),
    ("isl", found_by_isl),
    ("total", lambda g, _: total(g)),
)
"""The patterns in order; each answers or declines, and the last always answers."""

"""Pattern-based schedule matrices (TSCompiler 5.2): an ordered list; each entry answers or declines with a reason.

``contraction`` (products, convolutions): everything sinks into the backbone's loops, consumers at an unknown shift of
its reduction rows. ``stitch`` (element-wise, reduce, multi-reduce): the common loops outside, then a phase, so that the
shifts cannot skew one reduction against the next. ``total`` is the original order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import PRODUCTS, Op, loads, walk
from polydyn.schedules.group.alignment import Alignment, align, same_iterators
from polydyn.schedules.group.dependence import Dependences, is_accumulation
from polydyn.schedules.group.polyhedra import is_exact, read_accesses
from polydyn.schedules.index import IndexLike
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.solution.matrix import Row, ScheduleMatrix, Unknown, matrix, row
from polydyn.schedules.solution.solve import SolvedMatrix, solve


@dataclass(frozen=True)
class Pattern:
    """A matrix and its meaning.

    ``dims``: for each row the dominant statement's iterator, or ``""`` for a phase row. ``roles``: statement ->
    ``init``, ``backbone``, ``epilogue`` or ``map``. ``phases``: statement -> its phase. ``band``: the
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

    def __repr__(self) -> str:
        return f"<Choice {self.pattern.name}: a band of {self.pattern.band}, {len(self.declined)} declined>"


NAMES = ("contraction", "stitch", "total")
"""The names of the patterns in order."""


class _DeclinedError(Exception):
    """A pattern does not apply; the message is the reason."""


def choose(group: Group, deps: Dependences, among: Sequence[str] = NAMES) -> Choice:
    """Return the schedule of a group: the first pattern of ``among`` that applies and solves; ``total`` always does."""
    declined: list[tuple[str, str]] = []
    for name, build in (p for p in PATTERNS if p[0] in among):
        try:
            p = build(group)
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
    """Match one sum of products with its initialiser and element-wise epilogues.

    {Conv, Add + Relu}: rows (n, h, w, o, c, r, s); the initialiser and the epilogue are ``?`` in (c, r, s).
    """
    _refuse_opaque(group)
    backbone = _backbone(group)
    where = group.statements.index(backbone)
    parallel = tuple(i for i in backbone.iterators if any(x.is_symbol and str(x) == i for x in backbone.index))
    if len(parallel) != sum(x.constant is None for x in backbone.index):
        raise _DeclinedError(f"{backbone.name} does not write at plain iterators")
    reduced = tuple(i for i in backbone.iterators if i not in parallel)
    aligned = align(group, backbone)
    before, epilogue = group.statements[:where], group.statements[where + 1 :]
    for s in before:
        if s.array != backbone.array:
            raise _DeclinedError(f"{s.name} runs before the sum and is not its initialiser")
    rows: dict[str, list[Row | IndexLike]] = {backbone.name: [*parallel, *reduced]}
    for s in (*before, *epilogue):
        rows[s.name] = [
            *_exact_dims(s, parallel, aligned), *(row(0, Unknown(f"{s.name}.{r}")) for r in reduced),
        ]  # fmt: skip
    roles = {s.name: "init" for s in before} | {backbone.name: "backbone"} | {s.name: "epilogue" for s in epilogue}
    phases = dict.fromkeys(roles, 0)
    return Pattern("matmul-like", _padded(group, rows), parallel + reduced, roles, phases, len(parallel))


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


PATTERNS: Sequence[tuple[str, Callable[[Group], Pattern]]] = (
    ("contraction", contraction),
    ("stitch", stitch),
    ("total", total),
)
"""The patterns in order; each answers or declines, and the last always answers."""

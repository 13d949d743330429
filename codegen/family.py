"""The pipeline that builds kernels. Families of kernels have tables; the order of the phases is here.

    loops       of a proven schedule
    first       rules on the bare loops: the steps of a slice of a reduction
    sizes       symbols become numbers; loops of one step and decided guards are removed
    units       hardware loops become coordinates: a block, a warp, a lane
    marks       rules while statements are still instances
    statements  remaining instances become stores, registers, instructions
    stores      rules on stores
    registers   loops over registers are declared to be unrolled
    fold        decided guards and loops of one step are removed
    order       rules on the order of tasks
    band        the coincident band becomes tasks
    around      rules on the whole body: scratch memory, registers
    fold        as above
    last        rules on the kernel with all its forms

A *variant* is the input of one kernel: an object with all sizes decided. Rules are functions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from polydyn.codegen.ir import Body, Compare, If, consume
from polydyn.codegen.lower import Lowering, lower
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.threads import assign, unrolled
from polydyn.codegen.passes.tiles import task_count
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.codegen.sharing import UNSHARED, Sharing
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.model import Array, Group
from polydyn.schedules.proof.proven import Obligation, Proven
from polydyn.schedules.tree.names import MarkName
from polydyn.schedules.tree.scheduled import Scheduled


class Variant:
    """The input of one kernel, with all sizes decided. Subclasses set or compute ``name``, ``group`` and ``schedule``.
    """

    @cached_property
    def name(self) -> str:
        """The kernel's name."""
        raise NotImplementedError

    @cached_property
    def group(self) -> Group:
        """The computation of the kernel."""
        raise NotImplementedError

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        raise NotImplementedError

    @cached_property
    def sharing(self) -> Sharing:
        """How tasks share a reduction."""
        return UNSHARED

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernel's parameters."""
        return self.group.params

    def obligations(self) -> tuple[Obligation, ...]:
        """Return what the kernel requires of its schedule in addition to the group's dependences."""
        return ()

    @cached_property
    def proven(self) -> Proven:
        """The schedule with its proof."""
        return Proven(self.schedule, *self.obligations())


T = TypeVar("T", bound=Variant)
FOLD = Step("fold", "decided guards and single iterations are removed", fold)


def keep(_: Any, body: Body) -> Body:
    """Keep the body of a mark that no rule needs."""
    return body


@dataclass(frozen=True)
class Rule(Generic[T]):
    """A pass over the body of a mark, after which the mark is removed. Without ``mark``: over the whole body.

    ``opens``: as in a ``Step``. ``where``: the variants for which the rule runs.
    """

    name: str
    what: str
    run: Callable[[T, Body], Body]
    mark: MarkName | None = None
    opens: tuple[str, ...] | Callable[[T], tuple[str, ...]] = ()
    where: Callable[[T], bool] = lambda _: True

    def step(self, kernel: T) -> Step:
        """Return the rule for one variant."""
        rule: Callable[[Body], Body] = partial(self.run, kernel)
        opens = self.opens if isinstance(self.opens, tuple) else self.opens(kernel)
        if (mark := self.mark) is None:
            return Step(self.name, self.what, rule, opens)
        return Step(self.name, self.what, lambda body: consume(body, mark, rule), opens)


@dataclass(frozen=True)
class Form(Generic[T]):
    """One body of a kernel that has several. A launch takes the first whose condition ``where`` holds."""

    kernel: T
    where: Compare | None = None
    part: str = ""


@dataclass(frozen=True)
class Family(Generic[T]):
    """The tables of the phases above, each a function of a variant or a tuple of rules.

    ``band``: steps for a variant and its number of tasks. ``names``: the names that every step may use, from arrays and
    symbols. ``opened``: the names that statements introduce.
    ``registers``: loops, with their unroll pragmas. ``forms``: the bodies of a kernel; the next one is requested after
    the previous one is built.
    """

    names: Callable[[Mapping[str, Array], tuple[str, ...]], tuple[str, ...]]
    band: Callable[[T, Index], tuple[Step, ...]]
    statements: Callable[[T], Mapping[str, Lowering]] = lambda _: {}
    start: Callable[[T], Body] = lambda kernel: loops(kernel.name, kernel.proven)
    first: tuple[Rule[T], ...] = ()
    sizes: Callable[[T], Mapping[str, IndexLike]] = lambda _: {}
    units: Callable[[T], Mapping[str, IndexLike]] = lambda _: {}
    marks: tuple[Rule[T], ...] = ()
    opened: Callable[[T], tuple[str, ...]] = lambda _: ()
    stores: tuple[Rule[T], ...] = ()
    registers: Callable[[T], Mapping[str, str]] = lambda _: {}
    order: tuple[Rule[T], ...] = ()
    around: tuple[Rule[T], ...] = ()
    last: tuple[Rule[T], ...] = ()
    forms: Callable[[T], Iterable[Form[T]]] = lambda kernel: (Form(kernel),)


def build(family: Family[T], kernel: T) -> tuple[Body, Index]:
    """Return the body of a variant's kernel, and its number of tasks.

    LegalityError: the schedule does not compute its group. CodegenError: a bug.
    """
    names = (*family.names(kernel.group.arrays, kernel.symbols), *kernel.sharing.buffers)
    body = run(kernel.name, family.start(kernel), _bound(family, kernel), names)
    made: list[tuple[Compare | None, Body]] = []
    count = Index.of(0)
    for form in family.forms(kernel):
        part = f"{kernel.name}/{form.part}" if form.part else kernel.name
        lowered = run(part, body, _lowered(family, form.kernel), names)
        count = task_count(lowered)
        rest = (*family.band(form.kernel, count), *_steps(family.around, form.kernel), FOLD)
        made.append((form.where, run(part, lowered, rest, names)))
    (where, out), *others = reversed(made)
    assert where is None, "the last form serves every launch"
    for where, other in others:
        assert where is not None
        out = (If((where,), other, out),)
    return run(kernel.name, out, _steps(family.last, kernel), names), count


def steps(family: Family[T], kernel: T) -> tuple[Step, ...]:
    """Return the passes of a variant up to the coincident band."""
    return (*_bound(family, kernel), *_lowered(family, kernel))


def _bound(family: Family[T], kernel: T) -> tuple[Step, ...]:
    """Return the passes that all forms share."""
    sizes, units = family.sizes(kernel), family.units(kernel)
    numbers = Step("bind", "sizes become numbers", lambda body: bind(body, sizes), _symbols(sizes))
    places = Step("assign", "hardware loops become coordinates", lambda body: assign(body, units), _symbols(units))
    return (*_steps(family.first, kernel), *((numbers,) if sizes else ()), *((places,) if units else ()))


def _symbols(table: Mapping[str, IndexLike]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x for e in table.values() for x in sorted(Index.of(e).symbols())))


def _lowered(family: Family[T], kernel: T) -> tuple[Step, ...]:
    table, kinds = family.statements(kernel), family.registers(kernel)
    unroll = Step("unroll", "loops over registers are unrolled", lambda body: unrolled(body, kinds))
    lowering = Step("lower", "statements become stores", lambda body: lower(body, table), family.opened(kernel))
    before = (*_steps(family.marks, kernel), *((lowering,) if table else ()), *_steps(family.stores, kernel))
    return (*before, *((unroll,) if kinds else ()), FOLD, *_steps(family.order, kernel))


def _steps(rules: tuple[Rule[T], ...], kernel: T) -> tuple[Step, ...]:
    return tuple(x.step(kernel) for x in rules if x.where(kernel))

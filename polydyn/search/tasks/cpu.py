"""Tuning tasks: the matmul-like groups of a plan, each with its backbone and the arguments of its kernels.

On a CPU the register tile, the reduction block and the tasks of ``codegen.cpu_contract`` are tuned (docs/cpu.md 1 and
2). ``sized.py`` has the tasks of other groups, ``cuda.py`` those for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Generic, TypeVar

from polydyn.build.compiler import GENERATOR, compile_flags, find_compiler
from polydyn.codegen.cpu.matrix import MatrixKernel
from polydyn.codegen.cpu.plan import ContractTuple
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.kernel import Kernel
from polydyn.errors import Declined, ScheduleError
from polydyn.lowering.alternatives import RowChoice, Rows
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.cpu_tables import DECODED_IN_REGISTERS, ON_MATRIX_UNIT
from polydyn.schedules.expr import ITEMSIZE, indices, loads
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.index import Index
from polydyn.schedules.index import product as product_of
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.ranges import interval
from polydyn.schedules.solution.schedule import schedule_contract
from polydyn.schedules.tiling import Roles
from polydyn.search.backbone import Backbone, GroupKey, Loop, Operand, Shape, Tile
from polydyn.search.tasks.sizes import model_sizes

F = TypeVar("F", ContractGroup, Group)
BUFFERS = ("input", "constant", "output")
"""The roles of arrays that a launch reads or writes."""


@dataclass(frozen=True)
class Task(Generic[F]):
    """A group to tune. ``form``: the lowered form. ``extents``: loop -> extent over the group's parameters.

    ``place``: parameter -> extent over a model's symbols, if a parameter is not the extent of a loop.
    """

    form: F
    key: GroupKey
    backbone: Backbone
    place: Mapping[str, Index] = field(default_factory=dict, kw_only=True)

    @property
    def group(self) -> Group:
        """The polyhedral group."""
        return self.form if isinstance(self.form, Group) else self.form.lowered.group

    @property
    def extents(self) -> dict[str, Index]:
        """Maps a loop to its extent."""
        return dict(accumulation(self.group).iters)

    def params(self, shape: Shape) -> dict[str, int]:
        """Return the group's parameters for loop extents, or for the next larger extents that are possible in the
        model."""
        if not self.place:
            return {str(e): shape[n] for n, e in self.extents.items() if e.is_symbol}
        extents = {x.name: self.extents[x.name] for x in self.backbone.loops if x.extent is None}
        sizes = model_sizes({n: e.subs(self.place) for n, e in extents.items()}, shape, self.place.values())
        return {n: e.evaluate(sizes) for n, e in self.place.items()}

    def bytes(self, array: str, params: Mapping[str, int], group: Group | None = None) -> int:
        """Return the bytes that a buffer needs for given parameters. ``group``: the computation of a kernel of another
        row of the table.
        """
        group = group or self.group
        a = group.arrays[array]
        if a.role == "input":
            reads = (_addresses(s, array, params, a.address) for s in group.statements)
            last = max((x for every in reads for x in every), default=0)
        else:
            last = a.address(tuple(e - 1 for e in a.shape)).evaluate(params)
        return (max(last, 0) + 1) * ITEMSIZE[a.dtype]

    def launched(self, shape: Shape) -> dict[str, int]:
        """Return the loop extents of the launch that represents a shape. Two of them may be one size of the model."""
        params = self.params(shape)
        return {n: e.evaluate(params) for n, e in self.extents.items()}

    def moved(self, shape: Shape) -> int:
        """Return the bytes of all arrays that it reads and writes at extents of its loops."""
        params = self.params(shape)
        return sum(self.bytes(n, params) for n, a in self.group.arrays.items() if a.role in BUFFERS)


DEFAULT = Tile(())
"""Represents the kernel and the launch that a group has without tuning."""


@dataclass(frozen=True)
class RowsTask(Task[F]):
    """A group whose table of kernels has several rows. ``rows``: the rows beside the one whose tiles are searched."""

    rows: Rows = field(default_factory=Rows, kw_only=True)

    @cached_property
    def row_tiles(self) -> tuple[Tile, ...]:
        """The tiles of the other rows, those with a row's first sizes first."""
        return tuple(
            Tile.of_row(row, zip(x.choices.built, a, strict=True), zip(x.choices.launched, b, strict=True))
            for row, x in self.rows.choices.items()
            for a in product(*x.choices.built.values())
            for b in product(*x.choices.launched.values())
        )

    def default(self, shape: Shape) -> Tile:
        """Return the tile of the kernel that a shape has without tuning."""
        row = self.rows.default(self.params(shape))
        return DEFAULT if row == self.rows.main else Tile.of_row(row)

    def row_choice(self, tile: Tile) -> RowChoice:
        """Return the row of a tile. ScheduleError: the group's table does not offer it, or not with these sizes."""
        choice = self.rows.choices.get(tile.row)
        if choice is None:
            raise ScheduleError(
                f"group {self.key.structure} has no kernel of the row {tile.row!r}",
                rule=self.rows.declined.get(tile.row, "the table of kernels has no such row"),
                remedy="tune the group again",
            )
        offered = {**choice.choices.built, **choice.choices.launched}
        verify_sizes(self.key.structure, tile.sizes, offered)
        return choice


def verify_sizes(group: str, sizes: Iterable[tuple[str, int]], offered: Mapping[str, Sequence[int]]) -> None:
    """Check the sizes of a tile. ScheduleError: a kernel does not offer one of them."""
    for n, v in sizes:
        if v not in offered.get(n, ()):
            raise ScheduleError(
                f"group {group} does not support {n}={v}",
                rule=f"{n} is one of {', '.join(map(str, offered.get(n, ()))) or 'nothing'}",
                remedy="tune the group again",
            )


@dataclass(frozen=True)
class CpuTask(RowsTask[ContractGroup]):
    """A group to tune on a CPU. ``build``: the name of the compiler target."""

    target: CpuTarget
    build: str

    def kernel(self, tile: Tile, builder: Any) -> Kernel:
        """Return the kernel for a tile's compile-time part; ``launch`` has the values of the launch-time part."""
        kernel: Kernel = builder.build()
        return replace(kernel, launch=self.shares(builder, tile))

    def builder(self, tile: Tile, name: str, kind: type[ContractKernel] = ContractKernel) -> Any:
        """Return the code generator for a tile, of class ``ContractKernel`` or a subclass, or of another row."""
        if tile.row:
            return self.row_choice(tile).builder(name, dict(tile.compile[1:]))
        form, roles, w = self.form, self.form.roles, self.target.width
        chosen = None if tile == DEFAULT else ContractTuple(
            tile.get(f"w.{roles.row}"),
            max(1, tile[f"w.{roles.col}"] // w),
            tile[f"b.{roles.block}"],
            tile.get(f"w.{roles.block}"),
        )  # fmt: skip
        return kind(name, self.group, roles, self.target, form.packed, chosen, form.fill, form.footprint)

    def shares(self, builder: Any, tile: Tile) -> dict[str, Index]:
        """Return the values of the launch-time symbols, over the kernel's other symbols."""
        if tile.row:
            return self.row_choice(tile).launch(builder, dict(tile.launch))
        if tile == DEFAULT:
            return dict(builder.launch)
        shares: dict[str, Index] = builder.shares(
            tile.get(f"b.{self.form.roles.row}"), tile[f"b.{self.form.roles.col}"]
        )
        return shares


def _addresses(
    s: Statement, array: str, params: Mapping[str, int], address: Callable[[tuple[Index, ...]], Index]
) -> Iterator[int]:
    """Yield upper bounds of the addresses that a statement reads. ``address`` maps subscripts to an address."""
    ranges = {n: (v, v) for n, v in params.items()}
    ranges |= {n: (0, max(0, e.evaluate(params) - 1)) for n, e in s.iters}
    for x in loads(s.value):
        if x.buffer == array:
            yield int(interval(address(x.index), ranges)[1])


C = TypeVar("C", bound=Task[Any])


def accumulation(group: Group) -> Statement:
    """Return the backbone statement: the first reduction, or without one, the first statement with the most loops."""
    sums = [s for s in group.statements if s.reduce]
    return sums[0] if sums else max(group.statements, key=lambda s: len(s.iters))


def declined_data(group: Group, reason: str = "") -> Declined | None:
    """Return why a group is not tuned: its kernels cannot run alone on random data, or the given ``reason``."""
    if not reason and any(i.fetches() for s in group.statements for i in indices(s.value)):
        reason = "it reads at data-dependent positions"
    return Declined(reason) if reason else None


def placed_task(task: C, params: Mapping[str, Index]) -> C | Declined:
    """Return a task that can be launched at any extents of its loops. ``params``: parameter -> extent over the symbols
    of the model that contains it.
    """
    dynamic = [task.extents[x.name] for x in task.backbone.loops if x.extent is None]
    if set(task.group.params) <= {str(e) for e in dynamic if e.is_symbol}:
        return task
    known = {n for e in dynamic for n in e.subs(params).symbols()}
    if lost := sorted({n for e in params.values() for n in e.symbols()} - known):
        return Declined(f"no loop extent determines {lost[0]}")
    return replace(task, place=params)


def task_of(
    key: str, form: ContractGroup, target: CpuTarget, build: str, rows: Rows | None = None
) -> CpuTask | Declined:
    """Return the task of a group, or why it is not tuned. ``rows``: other rows of its table that a search compares."""
    group = form.lowered.group
    acc = accumulation(group)
    dot = "it runs vectors along the reduction" if form.dot else ""
    if declined := declined_data(group, dot):
        return declined
    roles, _ = schedule_contract(group, form.roles, analyse(group, positive=False).under(context(group)))
    form = replace(form, roles=roles)
    name = group_key(key, group, target, build)
    backbone = backbone_of_roles(group, form.roles, acc.value.dtype)
    task = CpuTask(form, name, backbone, target, build, rows=rows or Rows())
    x = task.builder(DEFAULT, "probe").product
    if x.in_bytes:
        return Declined(DECODED_IN_REGISTERS)
    if MatrixKernel.refusal(x, form.fill) is None:
        return Declined(ON_MATRIX_UNIT)
    return task


def group_key(key: str, group: Group, target: CpuTarget, build: str) -> GroupKey:
    """Return the key of a group's measurements. ``build``: the name of the compiler target."""
    compiler = find_compiler()
    return GroupKey(
        key, accumulation(group).value.dtype, target.name, compiler=compiler.version,
        flags=compile_flags(compiler, build), generator=GENERATOR,
    )  # fmt: skip


def backbone_of_roles(group: Group, roles: Roles, dtype: str, merged: str = "") -> Backbone:
    """Return the loops of a contraction in the order of their roles. An operand has one dimension per loop it uses.

    ``merged``: the name of one loop that represents all reductions.
    """
    acc = accumulation(group)
    extents = dict(acc.iters)
    written = {s for i in acc.index for s in i.symbols()}
    reductions = (*roles.inner, roles.block)
    names = {n: n for n in acc.iterators}
    if merged:
        names |= dict.fromkeys(reductions, merged)
        extents[merged] = product_of(extents[n] for n in reductions)
    order = dict.fromkeys(names[n] for n in (*roles.batch, roles.row, roles.col, *reductions))
    loops = tuple(Loop(n, extents[n].constant, "parallel" if n in written else "reduction") for n in order)
    operands = []
    for x in loads(acc.value):
        used = {s for i in x.index for s in i.symbols()}
        operands.append(Operand(x.buffer, _dims(acc, names, used), ITEMSIZE[group.arrays[x.buffer].dtype]))
    for s in (s for s in group.statements if s.role == "epilogue"):
        size = ITEMSIZE[group.arrays[s.array].dtype]
        operands.append(Operand(s.array, _dims(acc, names, written), size, written=True))
    return Backbone(loops, tuple(operands), dtype)


def _dims(acc: Statement, names: Mapping[str, str], used: set[str]) -> tuple[tuple[tuple[str, int], ...], ...]:
    return tuple(((n, 1),) for n in dict.fromkeys(names[x] for x in acc.iterators if x in used))

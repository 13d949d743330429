"""CPU kernels of orders: each task has a line, whose elements a leaf sorts (``pd_order.h``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from polydyn.codegen.cpu.emit import bound_names, emit
from polydyn.codegen.ir import Alloc, Body, Call, Pointer, consume
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import lower, scratch_bytes
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.tiles import task_count, tasks
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.codegen.places import Places
from polydyn.codegen.printers.c_values import CTYPE
from polydyn.schedules.expr import FromIndex, Load
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.model import Group
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.tree.names import MarkName
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import serial

SORTED = "sorted"


class OrderKernel:
    """Builds the kernel of one statement, which writes a line's places.

    ``band``: its iterators. ``count``: elements of a line, ``stride`` apart; ``most``: places, ``step`` apart.
    """

    def __init__(
        self, name: str, group: Group, band: tuple[str, ...], count: Index, stride: Index, most: Index, step: Index,
        largest: bool,
    ) -> None:  # fmt: skip
        self.name, self.group, self.band, self.largest = name, group, band, largest
        self.count, self.stride, self.most, self.step = count, stride, most, step

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        return serial(self.group, self.band, False)

    @cached_property
    def proven(self) -> Proven:
        """The schedule with its proof."""
        return Proven(self.schedule)

    def build(self) -> Kernel:
        """The kernel."""
        names = bound_names(self.group.arrays, self.group.params)
        body = run(self.name, loops(self.name, self.proven), (
            Step("lower", "the statement becomes a call", lambda x: lower(x, {"S0": self._call}), (SORTED,)),
            Step("stages", "the marks of the stages go", lambda x: consume(x, MarkName.STAGE)),
        ), names)  # fmt: skip
        count = task_count(body)
        body = run(self.name, body, (
            Step("tasks", "the coincident band becomes a range of tasks", lambda x: tasks(x, runs=True)),
            Step("scratch", "room for keys and places", self._room),
            Step("fold", "decided guards and single trips go", fold),
        ), names)  # fmt: skip
        kernel = Kernel(self.name, self.group.params, count, scratch=scratch_bytes(body))
        return emit(kernel, body, self.group.arrays)

    def _room(self, body: Body) -> Body:
        return (Alloc(SORTED, "uint64", self.count * 4, "scratch", body),)

    def _call(self, a: Mapping[str, Index]) -> Body:
        (s,) = self.group.statements
        assert isinstance(s.value, Load)
        env = Places(self.schedule).env(s.name, a)
        out, x = self.group.arrays[s.array], self.group.arrays[s.value.buffer]
        to = out.address((*(i.subs(env) for i in s.index[:-1]), ZERO))
        element = Pointer(x.dtype, x.name, s.value.index[0].subs(env))

        def number(i: IndexLike) -> FromIndex:
            return FromIndex("int64", Index.of(i))

        return (Call(f"pd_first_{CTYPE[x.dtype]}", (
            element, number(self.stride), number(self.count), number(self.most), number(-1 if self.largest else 0),
            Pointer(out.dtype, out.name, to), number(self.step), Pointer("uint64", SORTED, ZERO),
        )),)  # fmt: skip

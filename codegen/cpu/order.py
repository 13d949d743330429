"""CPU kernels of argsort and top-k: each task has a line, whose elements a leaf sorts (``pd_order.h``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from polydyn.codegen.cpu.emit import bound_names, emit, ranges
from polydyn.codegen.family import Family, Rule, Variant, build, keep
from polydyn.codegen.ir import Alloc, Body, Call, Pointer
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import scratch_bytes
from polydyn.codegen.places import Places
from polydyn.codegen.printers.c_values import CTYPE
from polydyn.schedules.expr import FromIndex, Load
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.model import Group
from polydyn.schedules.tree.names import MarkName
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import serial

SORTED = "sorted"


class OrderKernel(Variant):
    """Builds the kernel of one statement, which writes the sorted positions of a line.

    ``band``: the iterators of the lines. ``count``: elements of a line, ``stride`` apart; ``most``: positions that are
    written, ``step`` apart.
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

    def build(self) -> Kernel:
        """Build the kernel."""
        body, count = build(ORDER, self)
        return emit(Kernel(self.name, self.symbols, count, scratch_bytes(body)), body, self.group.arrays)

    def room(self, body: Body) -> Body:
        """Allocate scratch memory for the keys and positions of a line."""
        return (Alloc(SORTED, "uint64", self.count * 4, "scratch", body),)

    def call(self, a: Mapping[str, Index]) -> Body:
        """Lower an instance of the statement: a leaf sorts a line."""
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


ORDER: Family[OrderKernel] = Family(
    names=bound_names,
    statements=lambda x: {"S0": x.call},
    opened=lambda _: (SORTED,),
    stores=(Rule("stages", "marks of stages are removed", keep, MarkName.STAGE),),
    band=lambda *_: ranges(),
    around=(Rule("scratch", "scratch for keys and positions", OrderKernel.room),),
)

"""Schedules written step by step, in the names of the model; ``polydyn.compile(model, schedules=...)`` uses them.

    group = polydyn.explore.groups("model.onnx")[0]
    s = group.schedule().pack(16).tile(i=6, j=64).reorder("j.0", "i.0").accumulate(at="i.0")
    s = s.unroll("i", "j").vectorize("j").parallel("j", "i")
    s.check(B=1, L=33); s.seconds(B=1, L=128); print(s)
    s.save("schedules.json"); polydyn.compile("model.onnx", schedules="schedules.json")
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from polydyn.build.cache import replacing
from polydyn.errors import InputError, LegalityError, PolydynError, ScheduleError, UnknownNameError, UnwritableError
from polydyn.explore.compiled import Compiled, cpu_of, parameters
from polydyn.explore.search import Found, search
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.lowering.handmade import (
    PACK,
    PlainForm,
    in_names_of_steps,
    lanes_of,
    plain_form,
    shape_of,
    written_kernel,
)
from polydyn.lowering.pack import pack
from polydyn.runtime.tables import counted
from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.handmade.document import Source, Written, file_text, read_schedules
from polydyn.schedules.handmade.draft import Draft
from polydyn.schedules.handmade.steps import STEPS, Sizes, Step, apply
from polydyn.schedules.names import given_back
from polydyn.schedules.tree.loops import rename
from polydyn.schedules.tree.names import Coord
from polydyn.schedules.tree.nodes import show as show_tree
from polydyn.schedules.tree.scheduled import Scheduled, flat

if TYPE_CHECKING:
    from polydyn.explore.pictures.sheet import Picture


class Scheduling(Protocol):
    """A group of a model that schedules are for: ``polydyn.explore.Group``."""

    @property
    def label(self) -> str:
        """Its kind and first output."""

    @property
    def fused(self) -> FusedGroup:
        """Its nodes."""

    @property
    def plan(self) -> FusionPlan:
        """All groups of the model."""

    def compiled(self) -> Compiled:
        """Return the kernel that it gets by default on this processor."""


@dataclass(frozen=True, repr=False)
class Schedule:
    """A schedule of one group of a model. Every step returns a new schedule, proven for all sizes.

    ``print(schedule)`` is the Python that builds it again. Steps name loops after axes (``axes``): a loop is ``i``, and
    after ``tile(i=8)`` the loops are ``i.0`` over tiles and ``i.1`` inside a tile. An axis whose extent is one dim of
    the model may have the dim's name, and a tensor has its name in the model. A step raises ScheduleError if it does
    not fit, and LegalityError with an instance that goes wrong if the result would not compute the group.

    ``descriptions``: one line for each step about what it did.
    """

    group: Scheduling
    form: PlainForm
    draft: Draft
    steps: tuple[Step, ...] = ()
    descriptions: tuple[str, ...] = ()

    # -- steps -------------------------------------------------------------------------------------------------------

    def pack(self, columns: int) -> Schedule:
        """Store the constants of a product in panels of ``columns`` columns, before the first call.

        A tile reads a panel as one stream. Vectors along the columns then need tiles that are multiples of
        ``columns``, which should be the floats of a vector (``target.width``). It must be the first step.
        """
        steps = (Step.of(PACK, columns), *self.steps)
        lanes, _ = lanes_of(steps)
        if self.steps:
            lanes_of((*self.steps, steps[0]))
        form = plain_form(self.group.plan, self.group.fused, lanes)
        packed = ", ".join(self._tensor_of(form, a) for a in form.lowered.buffers if _is_packed(form, a))
        said = f"{steps[0]}: {packed} in panels of {columns} columns"
        return replace(self, form=form, draft=form.start(), steps=steps, descriptions=(said,))

    def tile(self, **sizes: Sizes) -> Schedule:
        """Cut axes into tiles of ``sizes`` elements, whose loops move inside all other loops.

        Two sizes make two levels, the larger first: ``tile(i=(64, 8))`` has the loops ``i.0`` over tiles of 64, ``i.1``
        over tiles of 8 in them, and ``i.2``. The last tile may be shorter. Halide, TVM: tile.
        """
        named: dict[str, Sizes] = {}
        for name, size in sizes.items():
            axis = self._axis(name)
            if axis in named:
                raise ScheduleError(f"{name} is {axis}, which has a size already", dim=name, rule="tile")
            named[axis] = size
        return self._step(Step.of("tile", **named))

    def even(self, *axes: str) -> Schedule:
        """Make the tiles of axes nearly equal in size: 25 rows in tiles of 12 are 8, 8 and 9 rows, not 12, 12 and 1."""
        return self._step(Step.of("even", *map(self._axis, axes)))

    def reorder(self, *loops: str) -> Schedule:
        """Put loops of one band into this order, outermost first. Other loops of the band keep their places.

        Halide, TVM: reorder.
        """
        return self._step(Step.of("reorder", *map(self._loop, loops)))

    def accumulate(self, *, at: str) -> Schedule:
        """Keep the sums of one step of loop ``at`` in a buffer, and run INIT before and the epilogues after its loops.

        If a loop of the reduction is outside of ``at``, sums pass through the output from one of its steps to the next.
        Halide: compute_at; TVM: decompose_reduction and cache_write.
        """
        return self._step(Step.of("accumulate", at=self._loop(at)))

    def cache(self, tensor: str, *, at: str, order: Sequence[str] = ()) -> Schedule:
        """Copy the elements of ``tensor`` that one step of loop ``at`` reads into a buffer.

        ``order``: the axes of the buffer, the contiguous one last. A copy of a padded image holds the padding too.
        Halide: in().compute_at; TVM: cache_read.
        """
        named = {"order": tuple(map(self._axis, order))} if order else {}
        return self._step(Step.of("cache", self._array(tensor), at=self._loop(at), **named))

    def store(self, tensor: str, *, at: str) -> Schedule:
        """Keep a tensor that exists only inside the group (``l0`` and so on) in a buffer, for one step of loop ``at``.

        Without this step the innermost loop around all its uses is taken. Halide: store_at.
        """
        return self._step(Step.of("store", tensor, at=self._loop(at)))

    def vectorize(self, loop: str) -> Schedule:
        """Move a loop inside the others of its bands, and run its steps in vectors. An axis means its inner loop.

        ScheduleError, also from ``compile``: its statements do not become vectors.
        """
        self._check_panels(loop)
        return self._step(Step.of("vectorize", self._loop(loop)))

    def _check_panels(self, loop: str) -> None:
        """Refuse vectors along packed columns whose tiles are not whole panels."""
        lanes, roles = lanes_of(self.steps)[0], self.form.roles
        axis = self._axis(loop.partition(".")[0])
        if not lanes or roles is None or axis != "j":
            return
        digits = self.scheduled.map.axes["j"]
        size = digits[-1].size.constant if len(digits) > 1 else None
        if size is None or size % lanes or "j" in self.scheduled.map.origins:
            raise ScheduleError(
                f"constants lie in panels of {lanes} columns, and tiles of j are not whole panels", dim=loop,
                rule="vectorize", remedy=f"tile(j={2 * lanes}), without even('j')",
            )  # fmt: skip

    def unroll(self, *loops: str, factor: int | None = None) -> Schedule:
        """Unroll loops, an axis meaning its inner loop. Whole tiles, or ``factor`` steps.

        Sums whose loops are all unrolled live in registers. The last tile gets a version for each number of rows.
        """
        if factor == 0:
            remedy = "pass a number from 2 to 16, or none for the whole loop"
            raise ScheduleError("factor=0", rule="unroll", remedy=remedy)
        named = {} if factor is None else {"factor": factor}
        return self._step(Step.of("unroll", *map(self._loop, loops), **named))

    def parallel(self, *loops: str) -> Schedule:
        """Distribute the outermost loops over threads. An axis means its outer loop."""
        return self._step(Step.of("parallel", *map(self._loop, loops)))

    def _step(self, step: Step) -> Schedule:
        try:
            draft = apply(self.draft, step)
        except (ScheduleError, LegalityError) as e:
            raise self._in_names(e) from None
        what = (STEPS[step.name].__doc__ or "").partition(".")[0].lower()
        before, after = (self._order(x) for x in (self.draft, draft))
        loops = f"; loops of {self._main}: {after}" if after != before else ""
        line = f"{self._shown(step)}: {what}{loops}"
        return replace(self, draft=draft, steps=(*self.steps, step), descriptions=(*self.descriptions, line))

    def _in_names(self, error: ScheduleError | LegalityError) -> PolydynError:
        """Return a refusal in the names of steps and tensors, with the instance that goes wrong first."""
        lines = error.message.splitlines()
        example = next((x.strip() for x in lines if x.strip().startswith("in elements:")), "")
        text = lines[0] if not example else f"{lines[0]}\n  for example {example.removeprefix('in elements: ')}"
        names = {**{x: axis for (_, x), axis in self.scheduled.map.iterators.items()}, **self.tensors}
        text = re.sub(r"\b[a-z]\w*\b", lambda m: names.get(m[0], m[0]), in_names_of_steps(self.draft, text))
        places = {n: getattr(error, n) for n in ("node", "tensor", "dim", "rule", "remedy")}
        if isinstance(error, LegalityError):
            places["remedy"] = error.remedy or "storage for more of the tensor (store, accumulate), or another order"
        made = type(error)(text, **places)
        if isinstance(error, LegalityError) and isinstance(made, LegalityError):
            made.violated = error.violated
        return made

    # -- names -------------------------------------------------------------------------------------------------------

    @cached_property
    def _main(self) -> str:
        """The statement whose loops are shown: the first that reduces, else the first."""
        statements = self.form.lowered.group.statements
        return next((s.name for s in statements if s.reduce), statements[0].name)

    def _order(self, draft: Draft) -> str:
        return ", ".join(draft.names.get(x, x) for x in draft.order(self._main))

    @property
    def axes(self) -> dict[str, str]:
        """Axis -> its extent in the dims of the model. After ``tile`` its loops are ``axis.0`` and so on."""
        params = self.form.lowered.params
        return {x: str(e.subs(params)) for x, e in self.draft.scheduled.map.extents.items()}

    @property
    def tensors(self) -> dict[str, str]:
        """Array of the group -> tensor of the model."""
        return {a: self._tensor_of(self.form, a) for a in self.form.lowered.buffers}

    @staticmethod
    def _tensor_of(form: PlainForm, array: str) -> str:
        buffer = form.lowered.buffers[array]
        return form.lowered.packs[buffer].source if buffer in form.lowered.packs else buffer

    @property
    def inside(self) -> dict[str, str]:
        """Tensor that exists only inside the group -> the statements that write it, for ``store``."""
        group = self.form.lowered.group
        local = [n for n, a in group.arrays.items() if a.role == "local"]
        return {n: ", ".join(s.name for s in group.statements if s.array == n) for n in local}

    def _axis(self, name: str) -> str:
        """Return an axis from its name or from the only dim that is its extent."""
        axes, extents = self.draft.axes, Counter(self.axes.values())
        if name in axes or name.partition(".")[0] in axes or extents[name] != 1:
            return name
        return next(x for x, e in self.axes.items() if e == name)

    def _loop(self, name: str) -> str:
        axis, dot, level = name.partition(".")
        return self._axis(name) if name in self.axes.values() else f"{self._axis(axis)}{dot}{level}"

    def _array(self, tensor: str) -> str:
        found = [a for a, n in self.tensors.items() if tensor in (a, n)]
        if not found:
            raise UnknownNameError(
                f"the group has no tensor {tensor}", tensor=tensor, rule="schedules",
                remedy=f"its tensors are {', '.join(self.tensors.values())}",
            )  # fmt: skip
        read = {x.array for s in self.form.lowered.group.statements for x in read_accesses(s)}
        return next((a for a in found if a in read), found[0])

    def _shown(self, step: Step) -> str:
        """Return a step as Python, in the names of the model."""
        if step.name != "cache":
            return str(step)
        array, names = step.arguments[0], Counter(self.tensors.values())
        tensor = self.tensors[array]
        return str(replace(step, arguments=(tensor if names[tensor] == 1 else array,)))

    # -- results -----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Schedule of {self.group.label}: {counted(len(self.steps), 'step')}>"

    def __str__(self) -> str:
        lines = [f"s = group.schedule()  # {self.group.label}", *(f"s = s.{self._shown(x)}" for x in self.steps)]
        return "\n".join(lines)

    @property
    def scheduled(self) -> Scheduled:
        """The tree with its tile map, for pictures and for the transformations of ``polydyn.schedules.tree``."""
        return self.draft.scheduled

    @property
    def tree(self) -> str:
        """The tree as text, in the names of steps."""
        return in_names_of_steps(self.draft, show_tree(flat(self.scheduled.tree)))

    def picture(self, before: Schedule | None = None, title: str = "") -> Picture:
        """Draw the tree, in the names of steps; with ``before`` next to that of an earlier schedule."""
        from polydyn.explore.pictures import trees  # loads the pictures

        if before is None:
            return trees.tree(self._named, title or self.group.label)
        return trees.change(before._named, self._named, title)

    @property
    def _named(self) -> Scheduled:
        names = {k: Coord(n) for k, n in self.draft.names.items()}
        t = rename(self.scheduled, self.scheduled.map.views, {k: n for k, n in names.items() if k != n})
        return replace(t, parallel=tuple((of, tuple(names[k] for k in loops)) for of, loops in t.parallel))

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    @property
    def written(self) -> Written:
        """The schedule as data, for all groups of this structure."""
        plain, fused = plain_form(self.group.plan, self.group.fused), self.group.fused
        steps = tuple((x.name, x.arguments, x.named) for x in self.steps)
        return Written(plain.digest, self.group.label, steps, shape_of(self.group.plan, fused))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for ``polydyn.compile(schedules=...)``. InputError: it cannot be written."""
        save_schedules(path, self)

    def compile(self, target: str = "cpu") -> Compiled:
        """Return the kernel of the schedule on a CPU. ScheduleError: a loop that must become vectors does not."""
        cpu = cpu_of(target)
        kernel = written_kernel("written", self.draft, cpu.processor)
        lowered = self.form.lowered
        return Compiled(lowered.group, kernel, cpu.processor, target, self._packed, lowered.params)

    @cached_property
    def _packed(self) -> Mapping[str, npt.NDArray[Any]]:
        packs, constants = self.form.lowered.packs, self.group.plan.graph.constants
        arrays = {a: pack(packs[b], constants) for a, b in self.form.lowered.buffers.items() if b in packs}
        return {a: np.ascontiguousarray(x).reshape(-1) for a, x in arrays.items()}

    @cached_property
    def _compiled(self) -> Compiled:
        return self.compile()

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of the model that the group depends on."""
        every = self.form.lowered.params.values()
        return tuple(dict.fromkeys(given_back(x) for e in every for x in sorted(e.symbols())))

    def sizes(self, **dims: int) -> dict[str, int]:
        """Return the group's parameters (``n0`` and so on) for sizes of the model's dims.

        UnknownNameError: the group has no such dim. InputError: a dim has no size.
        """
        return parameters(self.form.lowered.params, dims)

    def instances(self, **dims: int) -> int:
        """Return the instances of the statement that sums, or else of the first one. ``dims`` as for ``check``."""
        sizes = self.sizes(**dims)
        statement = self.form.lowered.group.statement(self._main)
        return math.prod(e.evaluate(sizes) for _, e in statement.iters)

    def check(self, seed: int = 0, **dims: int) -> float:
        """Return the maximum difference from the reference on random inputs, relative to the largest element.

        ``dims``: sizes of the model's dims. InputError: the difference is beyond rounding; errors of ``sizes``.
        """
        return self._compiled.check(seed, **self.sizes(**dims))

    def seconds(self, repeat: int = 20, **dims: int) -> float:
        """Return the median time of a launch on one thread, in seconds. ``dims`` as for ``check``."""
        return self._compiled.seconds(repeat, **self.sizes(**dims))

    def with_steps(self, steps: Sequence[Step]) -> Schedule:
        """Return the schedule of the same group with other steps. Errors as for the steps."""
        return with_steps(self.group, steps)

    def search(
        self, sizes: Sequence[Mapping[str, int]], trials: int = 32, seed: int = 0, weights: Sequence[float] = ()
    ) -> Found[Schedule]:
        """Time this schedule with other numbers in its steps: tile sizes, the order of two loops, unroll factors.

        ``sizes``: sizes of the model's dims, as in ``[{"L": 8}, {"L": 128}]``. Details: ``polydyn.explore.search``.
        """
        return search(self, sizes, trials, seed, weights)

    def gain(self, repeat: int = 40, **dims: int) -> float:
        """Return the time of the default kernel over that of the schedule, from calls that alternate."""
        default = self.group.compiled()
        theirs, own = default.sizes(**dims), self.sizes(**dims)
        if repeat < 1:
            raise InputError(f"repeat={repeat}", rule="times of a launch", remedy="at least 1")
        times = ((default.seconds(10, **theirs), self._compiled.seconds(10, **own)) for _ in range(-(-repeat // 10)))
        return float(np.median([before / after for before, after in times]))


def _is_packed(form: PlainForm, array: str) -> bool:
    return form.lowered.buffers[array] in form.lowered.packs


def start(group: Scheduling) -> Schedule:
    """Return the schedule of a group without a step. UnsupportedError: its kernel has a schedule of its own."""
    form = plain_form(group.plan, group.fused)
    return Schedule(group, form, form.start())


def rebuilt(group: Scheduling, source: Source) -> Schedule:
    """Return the schedule of a group from its data, an object or a file. InputError: none is for this group."""
    digest, every = start(group).written.group, read_schedules(source)
    for written in every:
        if written.group == digest:
            return with_steps(group, [Step(*x) for x in written.steps])
    labels = ", ".join(x.label for x in every) or "nothing"
    raise InputError(
        f"no schedule fits {group.label}", rule="schedules", remedy=f"the schedules are for groups like {labels}"
    )


def with_steps(group: Scheduling, steps: Sequence[Step]) -> Schedule:
    """Return the schedule of a group after steps. Errors as for the steps."""
    s = start(group)
    for step in steps:
        s = s.pack(*step.arguments) if step.name == PACK else s._step(step)
    return s


def save_schedules(path: str | os.PathLike[str], *schedules: Source) -> None:
    """Write a file of schedules for ``polydyn.compile(schedules=...)``, whole or not at all.

    InputError: it cannot be written, or there is no schedule. ScheduleError: two different ones are for one group.
    """
    if not schedules:
        raise InputError("no schedule is given", rule="schedules", remedy="save_schedules(path, s)")
    text = file_text(read_schedules(schedules))
    try:
        with replacing(Path(path)) as f:
            f.write(text.encode())
    except OSError as e:
        raise UnwritableError.of(os.fspath(path), e) from e

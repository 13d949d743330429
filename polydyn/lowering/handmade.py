"""Schedules that people write, on the groups of a model: which group one fits, and the kernel that it makes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from polydyn.codegen.cpu.scheduled import ScheduledKernel
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.kernel import Kernel
from polydyn.errors import InputError, LegalityError, ScheduleError, UnsupportedError
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import iterators
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import lower_nest
from polydyn.schedules.handmade.document import DIGITS, Written
from polydyn.schedules.handmade.draft import Draft, start
from polydyn.schedules.handmade.steps import Step, apply, with_storage
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.tiling import Roles

PACK = "pack"
"""The step that chooses the layout of constants. It comes first, because it changes the group."""
LARGEST_PACK = 64
"""Maximum columns of a panel of packed constants."""
OTHER_KERNELS = {"attention", "scan", "scatter", "order"}
"""Kinds of groups whose kernels have schedules of their own."""


@dataclass(frozen=True)
class PlainForm:
    """A fused group as schedules that people write see it. ``roles``: of a product's iterators, else None."""

    lowered: LoweredGroup
    roles: Roles | None

    @property
    def digest(self) -> str:
        """The digest of the group: equal for groups that one schedule fits."""
        text = repr((self.lowered.group, self.roles))
        return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

    def start(self) -> Draft:
        """Return the schedule without a step."""
        group = self.lowered.group
        return start(group, self.roles, None if self.roles else Solver(group).nest())


def plain_form(plan: FusionPlan, group: FusedGroup, lanes: int = 0) -> PlainForm:
    """Return the form of a group with constants in the layout of the model.

    ``lanes``: constants of a product lie in panels of so many columns instead. UnsupportedError: the kernel of the
    group has a schedule of its own. ScheduleError: the group has no constant to pack.
    """
    if group.kind in OTHER_KERNELS:
        raise UnsupportedError(
            f"a group of kind {group.kind} has no schedule to write", node=group.outputs[0], rule="schedules",
            remedy="write one for another group of polydyn.explore.groups(model)",
        )  # fmt: skip
    product = lower_contract(plan, group, lanes) if group.kind == "contract" else None
    if not isinstance(product, ContractGroup):
        if lanes:
            raise ScheduleError(f"{group.outputs[0]} is not a product", node=group.outputs[0], rule=PACK)
        return PlainForm(lower_nest(plan, group), None)
    if lanes and not product.packed:
        raise ScheduleError(f"the columns of {group.outputs[0]} are not constant", node=group.outputs[0], rule=PACK)
    return PlainForm(product.lowered, product.roles)


def shape_of(plan: FusionPlan, group: FusedGroup) -> str:
    """Return a text that is equal for groups of one structure and cheap: the kind and the extents of the first node."""
    extents = [e.constant for _, e in iterators(plan.graph, group.nodes[0])]
    return " ".join([group.kind, *("?" if e is None else str(e) for e in extents)])


def lanes_of(steps: Sequence[Step]) -> tuple[int, Sequence[Step]]:
    """Return the columns of panels that the first step asks for, 0 for none, and the steps after it.

    ScheduleError: the number is out of range, or the step is not the first.
    """
    if any(x.name == PACK for x in steps[1:]):
        raise ScheduleError("pack changes the group", rule=PACK, remedy="make it the first step")
    if not steps or steps[0].name != PACK:
        return 0, steps
    match steps[0].arguments:
        case (int(lanes),) if 1 <= lanes <= LARGEST_PACK and not steps[0].named:
            return lanes, steps[1:]
    raise ScheduleError(f"{steps[0]}", rule=PACK, remedy=f"a number of columns from 1 to {LARGEST_PACK}")


def written_kernel(name: str, draft: Draft, target: CpuTarget) -> Kernel:
    """Build the kernel of a schedule. ScheduleError: a loop that must become vectors does not."""
    done = with_storage(draft)
    kernel = ScheduledKernel(name, done.scheduled, target, None, done.unrolled, done.vectors).build()
    return replace(kernel, notes=tuple(in_names_of_steps(draft, n) for n in kernel.notes))


def in_names_of_steps(draft: Draft, text: str) -> str:
    """Return a text with loops as steps name them."""
    names = {str(loop): name for loop, name in draft.names.items()}
    return re.sub(r"\w+", lambda m: names.get(m[0], m[0]), text)


@contextmanager
def written_by_hand(written: Written) -> Iterator[None]:
    """Raise the refusals of a schedule as InputError with its label: they are the user's to mend."""
    try:
        yield
    except (ScheduleError, LegalityError, UnsupportedError) as e:
        places = {n: getattr(e, n) for n in ("node", "tensor", "dim", "rule", "remedy")}
        raise InputError(f"the schedule of {written.label}: {e.message}", **places) from e


@dataclass(frozen=True)
class Fitting:
    """A schedule for a group: the form that it begins with, and the schedule after its steps."""

    written: Written
    form: PlainForm
    draft: Draft


class Handmade:
    """The schedules of one compilation. ``required``: those that the user gave; each must fit a group.

    ``shipped``: the library's, used where they fit.
    """

    def __init__(self, required: Sequence[Written] = (), shipped: Sequence[Written] = ()) -> None:
        self.required = tuple(required)
        self._by_group = {x.group: x for x in (*shipped, *required)}
        self._shapes = {x.shape for x in self._by_group.values()}
        self._used: set[str] = set()

    def find(self, plan: FusionPlan, group: FusedGroup) -> Written | None:
        """Return the schedule that fits a group, or None if there is none."""
        if not self._by_group or shape_of(plan, group) not in self._shapes or group.kind in OTHER_KERNELS:
            return None
        return self._by_group.get(plain_form(plan, group).digest)

    def fitting(self, plan: FusionPlan, group: FusedGroup) -> Fitting | None:
        """Return the schedule of a group, applied to it, or None if there is none.

        InputError: a step does not fit, or the result does not compute the group.
        """
        written = self.find(plan, group)
        if written is None:
            return None
        self._used.add(written.group)
        with written_by_hand(written):
            lanes, steps = lanes_of([Step(*x) for x in written.steps])
            form = plain_form(plan, group, lanes)
            draft = form.start()
            for step in steps:
                draft = apply(draft, step)
        return Fitting(written, form, draft)

    def used(self) -> tuple[Written, ...]:
        """Return the schedules that fitted a group. InputError: a required one did not."""
        for x in self.required:
            if x.group not in self._used:
                raise InputError(
                    f"the schedule of {x.label} fits no group of this model", rule="schedules",
                    remedy="it was written for another model, other dims or options, or another version of polydyn: "
                    "polydyn.explore.groups(model) lists the groups",
                )  # fmt: skip
        return tuple(x for x in self._by_group.values() if x.group in self._used)

"""Name the pass after which a kernel computes something else: its loop IR is executed after every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polydyn.codegen.ir import Body, Call, Def, Inst, Set, Store, walk, walk_value
from polydyn.codegen.pipeline import Loops
from polydyn.errors import PolydynError
from polydyn.schedules.expr import Load
from polydyn.testing.loops.check import Case, cases_of
from polydyn.testing.loops.cuda import Unknown
from polydyn.testing.loops.rooms import Unbound
from polydyn.testing.plan.planned import Planned


class LoopError(PolydynError):
    """A kernel's loop IR computes something else than its group, after the step that the message names."""


def executable(body: Body) -> bool:
    """Whether all statements of a body are lowered to what the interpreter executes."""
    for n in walk(body):
        if isinstance(n, Inst):
            return False
        if isinstance(n, (Store, Def, Set)) and any(isinstance(v, Load) for v in walk_value(n.value)):
            return False
        if isinstance(n, Call) and any(isinstance(v, Load) for a in n.args for v in walk_value(a)):
            return False
    return True


def first_wrong(case: Case, loops: Loops, steps: Sequence[tuple[str, Body]]) -> tuple[str, str] | None:
    """Return (step, what is wrong) of the first step after which the first kernel of a case is wrong.

    Before a step that lowers all statements, nothing is executed; None: the kernel is right after its last step.
    """
    wrong = case.run(loops)
    if not wrong:
        return None
    name = case.kernel.name
    for step, body in steps:
        if not executable(body):
            continue
        try:
            error = case.run({**loops, name: body})
        except (Unknown, Unbound):
            continue
        if error:
            return step, error
    return "last", wrong


def verify_kernels(planned: Planned, loops: Loops) -> int:
    """Execute every kernel of a plan at small sizes and return how many were executed.

    Raises LoopError if one computes something else than the statements of its group.
    """
    done = 0
    for case in cases_of(planned, {}):
        try:
            found = first_wrong(case, loops, loops.steps.get(case.kernel.name, []))
        except Unknown:
            continue
        done += 1
        if found is not None:
            step, error = found
            raise LoopError(
                f"{case.name} computes something else than its group after the step {step}: {error}",
                rule=f"a pass keeps what a kernel computes, {_text(case.values.items())}",
                remedy="report it with the model",
            )
    return done


def _text(sizes: Iterable[tuple[str, int]]) -> str:
    return "at " + ", ".join(f"{n} = {v}" for n, v in sizes)

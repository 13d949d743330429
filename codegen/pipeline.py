"""The passes of a kernel as data: named steps from loop IR to loop IR, checked and shown one by one.

Every builder lists its steps in order. ``run`` applies them; with ``POLYDYN_VERIFY=1`` it checks the loop IR after each
(``check.verify_body``), and the debug ladder shows the loop IR after each step (``polydyn.debug``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from polydyn.clock import timed
from polydyn.codegen.check import free_names, verify_body
from polydyn.codegen.ir import Body
from polydyn.codegen.isl_ast import generate
from polydyn.codegen.show import show as show_body
from polydyn.codegen.show import show_tiled
from polydyn.debug import Level, show, verifying
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.model import Group
from polydyn.schedules.proof.proven import Proven


@dataclass(frozen=True)
class Step:
    """One pass of a kernel.

    ``what``: a sentence that describes the pass. ``opens``: symbols and buffers that the pass begins to use and a later
    step binds. All others must be bound already, so an error names the pass that lost a binding, not the last pass.
    """

    name: str
    what: str
    run: Callable[[Body], Body]
    opens: tuple[str, ...] = ()


Watcher = Callable[[str, str, Body], None]
"""Function that is called with a kernel's name, the name of a step and the body after it."""
LAST = "last"
"""The name of the step after which a kernel is printed."""
_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("polydyn_watchers", default=())


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` after every step of the kernels that this thread builds in the meantime."""
    token = _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


class Loops(dict[str, Body]):
    """The loop IR that kernels are printed from, by kernel name. ``steps``: kernel -> (step, the body after it)."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[tuple[str, Body]]] = {}


@contextmanager
def loops_kept() -> Iterator[Loops]:
    """Collect the loop IR of every kernel that this thread builds in the meantime."""
    kept = Loops()

    def keep(kernel: str, step: str, body: Body) -> None:
        kept.steps.setdefault(kernel, []).append((step, body))
        if step == LAST:
            kept[kernel] = body

    with watched(keep):
        yield kept


def finished(kernel: str, body: Body) -> None:
    """Report the loop IR that a kernel is printed from."""
    for watcher in _WATCHERS.get():
        watcher(kernel, LAST, body)


def loops(kernel: str, proven: Proven) -> Body:
    """Return the input of a kernel's steps: the loops of its schedule tree, statements not yet lowered."""
    tiled = proven.tiled
    show(Level.SCHEDULES, kernel, "tree", lambda: show_tiled(tiled))
    body = generate(tiled)
    show(Level.LOOPS, kernel, "loops", lambda: show_body(body))
    return body


def names_of(group: Group) -> tuple[str, ...]:
    """Return the names that any step of a group may use: its parameters and arrays, the symbols of their strides."""
    strides = (i for a in group.arrays.values() for i in (*a.strides, a.offset))
    return (*group.params, *group.arrays, *{x for i in strides for x in i.symbols()})


@timed("passes over the loop IR")
def run(kernel: str, body: Body, steps: Iterable[Step], names: Collection[str] = (), shown: bool = True) -> Body:
    """Apply all steps and return the body.

    ``kernel``: the part of the debug ladder that shows the steps, if ``shown``. ``names``: the kernel's symbols and
    buffers, which every step may use in addition to the free names of ``body``. CodegenError: the body after a step
    breaks an invariant of the loop IR (with ``POLYDYN_VERIFY=1``).
    """
    verify = verifying()
    opened = free_names(body).difference(names) if verify else frozenset()
    for step in steps:
        body = step.run(body)
        if verify:
            opened = opened.union(step.opens).difference(names)
            _verify(kernel, step, body, names, opened)
        for watcher in _WATCHERS.get():
            watcher(kernel, step.name, body)
        if shown:
            _show(kernel, step, body)
    return body


def _verify(kernel: str, step: Step, body: Body, names: Collection[str], opened: frozenset[str]) -> None:
    try:
        verify_body(body, names, names, open_names=opened)
    except CodegenError as e:
        raise CodegenError(f"{kernel}: after the step {step.name} ({step.what}): {e}") from e


def _show(kernel: str, step: Step, body: Body) -> None:
    show(Level.LOOPS, kernel, step.name, lambda: show_body(body), summary=step.what)

"""The last step of every CPU kernel: its loop IR, checked and printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from polydyn.clock import timed
from polydyn.codegen.check import verify_body
from polydyn.codegen.cpu.streaming import CACHE
from polydyn.codegen.ir import Body
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.passes.tiles import tasks
from polydyn.codegen.pipeline import Step, finished
from polydyn.codegen.printers.c import KernelPrinter
from polydyn.debug import Level, show
from polydyn.schedules.model import Array, stored

TASK_RANGE = ("begin", "end")
"""Arguments of a kernel's function in addition to buffers and symbols: the range of tasks to run."""


def bound_names(arrays: Mapping[str, Array], symbols: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that every step of a kernel may use (``pipeline.run``)."""
    return (*symbols, *TASK_RANGE, str(CACHE), *stored(arrays))


def ranges(order: Sequence[str] = ()) -> tuple[Step, ...]:
    """Return the step that turns the coincident band into a range of tasks; ``order`` as for ``tasks``."""
    return (Step("tasks", "the coincident band becomes a range of tasks", partial(tasks, runs=True, order=order)),)


@timed("printing")
def emit(kernel: Kernel, body: Body, arrays: Mapping[str, Array], inline_math: bool = False, width: int = 0) -> Kernel:
    """Return the kernel with its text.

    ``kernel`` has everything except text and buffers; ``inline_math`` and ``width`` as for ``KernelPrinter``.
    CodegenError: the loop IR is invalid.
    """
    buffers = stored(arrays)
    verify_body(body, (*kernel.symbols, *TASK_RANGE, str(CACHE)), buffers)
    outputs = [n for n, a in arrays.items() if a.role == "output"]
    finished(kernel.name, body)
    text = KernelPrinter(kernel.name, buffers, outputs, kernel.symbols, inline_math, width).kernel(body)
    show(Level.TEXTS, kernel.name, "kernel", lambda: text, "c")
    return replace(kernel, text=text, buffers=tuple(buffers))

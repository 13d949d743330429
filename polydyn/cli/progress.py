"""The progress line of a command on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from polydyn.logs import CompileProgress, Report, reporting

if TYPE_CHECKING:
    from polydyn.measure import Progress as TuningProgress

terminal = Console(stderr=True, highlight=False)


class TimeLeft(ProgressColumn):
    """The estimated time that is left, or nothing while it is unknown."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        left = task.time_remaining
        return Text("" if left is None else f"about {timedelta(seconds=int(left))} left", style="progress.remaining")


@contextmanager
def compiling(text: str) -> Iterator[Report]:
    """Show stage, k of n, elapsed time and time left of a compilation on standard error, if that is a terminal.

    Yield the function for ``report`` of ``polydyn.compile``.
    """
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(12), TextColumn("{task.fields[steps]}"),
        TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    shown = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    with shown as bar:
        line = bar.add_task(text, total=None, steps="", left="")

        def report(p: CompileProgress) -> None:
            left = "" if not p.left or p.left < 1 else f"about {timedelta(seconds=int(p.left))} left"
            steps = f"{p.done} of {p.total}" if p.total else ""
            bar.update(
                line, completed=p.done, total=p.total or None, description=f"{text}: {p.stage}", steps=steps, left=left
            )

        yield report


@contextmanager
def tuning(quiet: bool) -> Iterator[Callable[[TuningProgress], None]]:
    """Show the progress of tuning on standard output, unless ``quiet``: the stage, then group k of n, the best rate,
    elapsed time and time left. Yield the function for ``report`` of ``polydyn.tune``."""
    from polydyn.cli.output import terminal as output

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[best]}"), TimeElapsedColumn(),
        TimeLeft(),
    )  # fmt: skip
    with Progress(*columns, console=output(), disable=quiet) as bar:
        line = bar.add_task("reading the model", total=None, best="")

        def report(p: TuningProgress) -> None:
            done = (p.group - 1) * p.wanted + min(p.trials, p.wanted)
            best = f"best {p.best / 1e9:.1f} GFLOP/s"
            text = f"group {p.group} of {p.groups}"
            bar.update(line, total=p.groups * p.wanted, completed=done, description=text, best=best)

        def before(p: CompileProgress) -> None:
            if bar.tasks[0].total is None:  # the kernels of trials are compiled later
                bar.update(line, description=f"{p.stage} {p.done} of {p.total}" if p.total else p.stage)

        with reporting(before):
            yield report


@contextmanager
def working(text: str, steps: int | None = None, *, measuring: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a line with the elapsed time on standard error if that is a terminal; it disappears at the end.

    Yield a function to call after each of the ``steps``, with the description of the next one. ``measuring``: redraw
    the line only in these calls, so that drawing does not disturb a measurement.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    shown = Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal, auto_refresh=not measuring
    )
    with shown as bar:
        line = bar.add_task(text, total=steps)
        bar.refresh()

        def step(following: str) -> None:
            bar.update(line, advance=1, description=following, refresh=True)

        yield step

"""The progress line of a command on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

terminal = Console(stderr=True, highlight=False)


class TimeLeft(ProgressColumn):
    """The estimated time that is left, or nothing while it is unknown."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        left = task.time_remaining
        return Text("" if left is None else f"about {timedelta(seconds=int(left))} left", style="progress.remaining")


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

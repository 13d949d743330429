"""What a command says on a terminal while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

terminal = Console(stderr=True, highlight=False)


@contextmanager
def working(text: str, steps: int | None = None, *, measuring: bool = False) -> Iterator[Callable[[str], None]]:
    """A line with the time since it began, on the standard error where that is a terminal, gone in the end.

    It gives a function that is called after each of the ``steps`` with what comes next. ``measuring``: the line changes
    at these calls only, so that nobody draws while something is timed.
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

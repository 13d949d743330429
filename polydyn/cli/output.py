"""The text and the JSON that commands print."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import TYPE_CHECKING, Any

from polydyn.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console


@functools.cache
def terminal() -> Console:
    """Return the console of standard output."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_text(text: Any, style: str | None = None) -> None:
    """Print text as it is, or a table of rich."""
    terminal().print(text, style=style, markup=False)


def keep_source(source: str | os.PathLike[str], *outputs: str | os.PathLike[str] | None) -> None:
    """Raise InputError if an output of a command is the file that the command reads."""
    for output in outputs:
        with contextlib.suppress(OSError):  # one of them does not exist
            if output is not None and os.path.samefile(source, output):
                raise InputError(
                    f"the output {output} is the file that the command reads", rule="outputs",
                    remedy="name another output",
                )  # fmt: skip


def answer(as_json: bool, data: Any, *lines: str) -> None:
    """Print the result of a command: one line of JSON, or lines for people."""
    if as_json:
        print_json(data)
    for line in lines if not as_json else ():
        print_text(line)


def print_json(data: Any) -> None:
    """Print one line of JSON to standard output."""
    print(json.dumps(data, ensure_ascii=False))

"""The text and the JSON that commands print."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

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


def answer(as_json: bool, data: Any, *lines: str) -> None:
    """Print the result of a command: one line of JSON, or lines for people."""
    if as_json:
        print_json(data)
    for line in lines if not as_json else ():
        print_text(line)


def print_json(data: Any) -> None:
    """Print one line of JSON to standard output."""
    print(json.dumps(data, ensure_ascii=False))

"""Keep the names of a model's dims apart from the names that the compiler makes.

The compiler's own symbols are iterators, parameters of kernels, tile sizes and launch-time symbols. They begin with a
lower-case letter, or they contain punctuation. A user's name that is not a plain capitalised identifier gets a mark
when the model is imported. The mark is one character that does not occur in ordinary text. ``given_back`` removes it
from every text that leaves the compiler.
"""

from __future__ import annotations

import re
from typing import Any

MARK = "\ue000"
"""A character of Unicode's private use area. No exporter writes it; a name that contains it loses it."""

_PLAIN = re.compile(r"[A-Z][A-Za-z0-9_]*")


def internal_name(name: str) -> str:
    """Return the symbol for a name from the user: the name itself, or the marked name if the compiler might make it.

    A symbol stays what it is.
    """
    name = name.replace(MARK, "")
    return name if _PLAIN.fullmatch(name) else MARK + name


def given_back(text: str) -> str:
    """Return the text with names as the user wrote them."""
    return text.replace(MARK, "")


def given_back_everywhere(data: Any) -> Any:
    """Return plain data (dicts, lists, strings, numbers) with names as the user wrote them.

    Parts that are one object stay one object.
    """
    done: dict[int, Any] = {}

    def convert(x: Any) -> Any:
        if isinstance(x, str):
            return given_back(x)
        if id(x) in done:
            return done[id(x)]
        if isinstance(x, dict):
            done[id(x)] = {convert(k): convert(v) for k, v in x.items()}
        elif isinstance(x, (list, tuple)):
            done[id(x)] = list(map(convert, x))
        return done.get(id(x), x)

    return convert(data)

"""Names of sizes: those of the user, and those that the compiler makes, never meet.

The compiler's own symbols (iterators, parameters of kernels, tile sizes, launch-time symbols) begin with a lower-case
letter or with punctuation, or hold punctuation. A name of the user that is not a plain capitalised identifier is
therefore marked when a model is imported. The mark is one character that no text for people holds: whatever leaves
the compiler as text takes it out again (``given_back``).
"""

from __future__ import annotations

import re
from typing import Any

MARK = "\ue000"
"""Of Unicode's private use: no exporter writes it, and what a user writes with it loses it."""

_PLAIN = re.compile(r"[A-Z][A-Za-z0-9_]*")


def internal_name(name: str) -> str:
    """The symbol for a size of the user's: the name itself, or the marked name where the compiler might make it too.

    The same for a name that is one already.
    """
    name = name.replace(MARK, "")
    return name if _PLAIN.fullmatch(name) else MARK + name


def given_back(text: str) -> str:
    """A text with the user's names as the user wrote them."""
    return text.replace(MARK, "")


def given_back_everywhere(data: Any) -> Any:
    """Plain data (dicts, lists, strings, numbers) with the user's names as the user wrote them; parts that are one
    object stay one.
    """
    done: dict[int, Any] = {}

    def of(x: Any) -> Any:
        if isinstance(x, str):
            return given_back(x)
        if not isinstance(x, (dict, list, tuple)):
            return x
        if id(x) not in done:
            done[id(x)] = {of(k): of(v) for k, v in x.items()} if isinstance(x, dict) else list(map(of, x))
        return done[id(x)]

    return of(data)

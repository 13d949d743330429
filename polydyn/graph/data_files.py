"""The data files of models, without parsing them. Standard library only, because a cached program opens by it."""

from __future__ import annotations

import re
from pathlib import Path

_LOCATION = re.compile(rb"\x0a\x08location\x12([\x00-\x7f])")
"""The beginning of an entry of ``TensorProto.external_data`` with key "location", and the length of its value."""


def data_file(folder: Path, location: str) -> Path | None:
    """Return the resolved path of a regular file below the resolved ``folder``; None if there is no such file."""
    try:
        path = (folder / location).resolve()
        return path if path.is_relative_to(folder) and path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a loop of links, a NUL
        return None


def locations(data: bytes) -> list[str] | None:
    """Return the locations of data files in a serialized model, sorted; None if only a parser can find them.

    It finds the entries by their bytes. If the word "location" occurs anywhere else, a parser has to decide.
    """
    entries = list(_LOCATION.finditer(data))
    if len(entries) != data.count(b"location"):
        return None
    try:
        return sorted({data[e.end() : e.end() + e[1][0]].decode() for e in entries})
    except UnicodeDecodeError:
        return None

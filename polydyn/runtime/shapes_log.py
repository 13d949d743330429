"""The log of input shapes of a program's calls: a JSON list of ``{"dims": {"B": 1, "L": 61}, "count": 12}``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polydyn.arguments import checked_path
from polydyn.build.cache import writable, write_atomically
from polydyn.errors import InputError


def write_log(path: str | os.PathLike[str], shapes: Sequence[Mapping[str, Any]]) -> None:
    """Write the result of ``Program.shapes_seen``. InputError: the file cannot be written."""
    target = checked_path(path)
    with writable(target):
        write_atomically(target, (json.dumps(shapes) + "\n").encode())


def read_log(path: Path) -> list[tuple[dict[str, int], int]]:
    """Return shapes with counts. InputError: wrong format."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [({str(n): int(v) for n, v in x["dims"].items()}, int(x["count"])) for x in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(
            f"{path.name} is not a log of shapes ({e})",
            rule='a JSON list of {"dims": {"B": 1, "L": 61}, "count": 12}',
            remedy="write it with Program.save_shapes",
        ) from e

"""The log of shapes that calls of a program had: JSON, a list of ``{"dims": {"B": 1, "L": 61}, "count": 12}``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polydyn.errors import InputError


def write_log(path: str | os.PathLike[str], shapes: Sequence[Mapping[str, Any]]) -> None:
    """Writes what ``Program.shapes_seen`` gives."""
    Path(path).write_text(json.dumps(shapes) + "\n", encoding="utf-8")


def read_log(path: Path) -> list[tuple[dict[str, int], int]]:
    """Shapes with counts. InputError: another form."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [({str(n): int(v) for n, v in x["dims"].items()}, int(x["count"])) for x in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(
            f"{path.name} is no log of shapes ({e})",
            rule='a JSON list of {"dims": {"B": 1, "L": 61}, "count": 12}',
            remedy="write it with Program.save_shapes",
        ) from e

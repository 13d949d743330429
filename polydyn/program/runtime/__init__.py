"""C sources of the run-time library, compiled into every program's library."""

from __future__ import annotations

from pathlib import Path

UNITS = ("runtime.c", "strided.c", "pool.c", "waves.c", "indices.c")
"""Translation units."""

HEADERS = ("polydyn.h", "internal.h")
"""``polydyn.h`` is the public C ABI; ``internal.h`` is shared by the units and the generated host program."""


def sources() -> dict[str, str]:
    """File name -> text of every unit and header."""
    here = Path(__file__).parent
    return {name: (here / name).read_text(encoding="utf-8") for name in (*UNITS, *HEADERS)}

"""C sources of the run-time library, compiled into every program's library.

A translation unit is several files, joined: parsing the system's headers and starting a compiler for each file would
take a third of the time. Files of a unit are compiled with the same flags (``polydyn.build.compiler.UNIT_FLAGS``).
"""

from __future__ import annotations

from pathlib import Path

_SETUP = ("opening.c", "strided.c", "runtime.c", "seen.c")
UNITS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "setup.c": _SETUP,
        "running.c": ("cpu.c", "waves.c", "indices.c", "seal.c"),
        "pool.c": ("pool.c",),
    },
    "cuda": {
        "setup.c": _SETUP,
        "running.c": (
            "cuda.c", "cuda_choose.c", "cuda_indices.c", "cuda_kept.c", "cuda_nodes.c", "cuda_run.c", "indices.c",
            "seal.c",
        ),
    },
    "parts": {
        "setup.c": ("opening.c", "strided.c", "parts.c", "frame.c", "size_steps.c"),
        "running.c": ("sequence.c", "control.c", "unique.c", "seal.c"),
        "host_steps.c": ("host_steps.c",),
    },
}  # fmt: skip
"""Place where a program runs -> its translation units -> the files of each. ``parts``: a program of several parts,
whose library runs the parts in order and computes the host steps.

``setup.c`` opens programs and evaluates sizes. ``running.c`` and ``pool.c`` are on the path of every launch.
``host_steps.c`` contains loops over data.
"""

_HEADERS = ("polydyn.h", "internal.h")
HEADERS = {
    "cpu": _HEADERS,
    "cuda": (*_HEADERS, "polydyn_cuda.h", "cuda_internal.h"),
    "parts": (*_HEADERS, "polydyn_cuda.h", "sequence.h"),
}
"""Place -> its headers. ``internal.h`` is shared by the units and the generated host program."""

PUBLIC = ("polydyn.h", "polydyn_cuda.h")
"""The headers that callers include: the C ABI."""


def sources(place: str = "cpu") -> dict[str, str]:
    """Return the units and headers (file name -> text) of a program that runs at ``place``, a key of ``UNITS``."""
    here = Path(__file__).parent
    text = {p.name: p.read_text(encoding="utf-8") for p in here.glob("*.[ch]")}
    units = {
        unit: text[unit] if files == (unit,) else "".join(f'#line 1 "{f}"\n{text[f]}' for f in files)
        for unit, files in UNITS[place].items()
    }
    return units | {name: text[name] for name in HEADERS[place]}

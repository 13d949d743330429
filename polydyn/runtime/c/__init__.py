"""C sources of the run-time library, compiled into every program's library."""

from __future__ import annotations

from pathlib import Path

COMMON = ("opening.c", "seal.c", "runtime.c", "strided.c", "indices.c", "seen.c")
PLACES = {
    "cpu": ("cpu.c", "pool.c", "waves.c"),
    "cuda": ("cuda.c", "cuda_choose.c", "cuda_indices.c", "cuda_kept.c", "cuda_nodes.c", "cuda_run.c"),
}
"""Maps the place where a program runs to its translation units, in addition to ``COMMON``."""

HEADERS = ("polydyn.h", "internal.h")
"""``polydyn.h`` is the public C ABI; ``internal.h`` is shared by the units and the generated host program."""

CUDA_HEADERS = ("polydyn_cuda.h", "cuda_internal.h")
"""Additional headers of a CUDA program; ``polydyn_cuda.h`` is public."""

PUBLIC = ("polydyn.h", "polydyn_cuda.h")
"""The headers that callers include."""

STEPS = (
    "opening.c", "seal.c", "parts.c", "frame.c", "sequence.c", "control.c", "host_steps.c", "size_steps.c", "unique.c",
    "strided.c", "sequence.h", *HEADERS, "polydyn_cuda.h",
)  # fmt: skip
"""Files of a program of several parts: its C interface, the code that runs parts in order, and the host steps."""


def step_sources() -> dict[str, str]:
    """Return a mapping from the names in ``STEPS`` to their texts."""
    return {name: (Path(__file__).parent / name).read_text(encoding="utf-8") for name in STEPS}


def sources(place: str = "cpu") -> dict[str, str]:
    """Return the units and headers (file name -> text) of a program that runs on ``cpu`` or ``cuda``."""
    here = Path(__file__).parent
    headers = (*HEADERS, *(CUDA_HEADERS if place == "cuda" else ()))
    names = (*COMMON, *PLACES[place], *headers)
    return {name: (here / name).read_text(encoding="utf-8") for name in names}

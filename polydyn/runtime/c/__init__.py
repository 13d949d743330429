"""C sources of the run-time library, compiled into every program's library."""

from __future__ import annotations

from pathlib import Path

COMMON = ("opening.c", "runtime.c", "strided.c", "indices.c", "seen.c")
PLACES = {
    "cpu": ("cpu.c", "pool.c", "waves.c"),
    "cuda": ("cuda.c", "cuda_choose.c", "cuda_indices.c", "cuda_kept.c", "cuda_nodes.c", "cuda_run.c"),
}
"""Where a program runs -> the translation units for it, beside the common ones."""

HEADERS = ("polydyn.h", "internal.h")
"""``polydyn.h`` is the public C ABI; ``internal.h`` is shared by the units and the generated host program."""

CUDA_HEADERS = ("polydyn_cuda.h", "cuda_internal.h")
"""Further headers of a CUDA program; ``polydyn_cuda.h`` is public."""

PUBLIC = ("polydyn.h", "polydyn_cuda.h")
"""Headers that callers include."""

STEPS = (
    "opening.c", "parts.c", "frame.c", "sequence.c", "control.c", "host_steps.c", "size_steps.c", "unique.c",
    "strided.c", "sequence.h", *HEADERS, "polydyn_cuda.h",
)  # fmt: skip
"""Of a program of several parts: its C interface, what runs them in turn, and the steps in between."""


def step_sources() -> dict[str, str]:
    """File name -> text of those."""
    return {name: (Path(__file__).parent / name).read_text(encoding="utf-8") for name in STEPS}


def sources(place: str = "cpu") -> dict[str, str]:
    """File name -> text of every unit and header of a program that runs on ``cpu`` or ``cuda``."""
    here = Path(__file__).parent
    headers = (*HEADERS, *(CUDA_HEADERS if place == "cuda" else ()))
    names = (*COMMON, *PLACES[place], *headers)
    return {name: (here / name).read_text(encoding="utf-8") for name in names}

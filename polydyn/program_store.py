"""The files of the disk cache of programs (``program_cache``)."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace

from polydyn.build.cache import cache_dir
from polydyn.build.eviction import cache_limit, grown, touch
from polydyn.clock import timed
from polydyn.errors import ArtifactError, BuildError, FallbackWarning
from polydyn.onnx_runtime import RUNS
from polydyn.runtime.artifact import read_artifact
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Program

KIND = "programs"
"""The folder of the cache."""


@timed("opening a stored program")
def stored_program(key: str, *, threads: int | None = None) -> Program | None:
    """Return the program of a key; None if the cache does not have it, or its file is damaged."""
    try:
        path = cache_dir(KIND) / f"{key}.polydyn"
    except BuildError:  # a missing or unsafe cache; compiling reports it
        return None
    if not touch(path):
        return None
    try:
        artifact = replace(read_artifact(path), file=None)  # files of the cache are never overwritten
    except ArtifactError:  # damaged, or evicted just now
        return None
    for note in artifact.manifest["notes"]:
        if f") {RUNS}: " in note:
            warnings.warn(note, FallbackWarning, stacklevel=4)
    return open_program(artifact, threads=threads)


@timed("storing the program")
def store_program(program: Program, key: str) -> None:
    """Store a program, unless it would fill half of the cache or the cache cannot be written."""
    with contextlib.suppress(ArtifactError, BuildError, OSError):
        if program.weight_bytes <= cache_limit() // 2:
            path = cache_dir(KIND) / f"{key}.polydyn"
            program.save(path, with_threads=False)
            grown(path.parent.parent, path.stat().st_size)

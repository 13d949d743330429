"""Open a program from an artifact in memory or from a file. What few programs need is imported for them only."""

from __future__ import annotations

import os
from collections.abc import Callable

from polydyn.arguments import CODE, TRUST, checked_path
from polydyn.errors import ArtifactError, InputError, needing_packages
from polydyn.runtime.artifact import Artifact, read_artifact
from polydyn.runtime.program import Program


def open_program(artifact: Artifact, *, threads: int | None = None, compilations: int = 0) -> Program:
    """Open the program of an artifact, after the programs of its parts, if it has any."""
    threads = artifact.manifest.get("threads") if threads is None else threads
    program = _open(artifact, threads, compilations)
    if "general" in artifact.manifest:
        from polydyn.runtime.composite import general_of

        program.general = open_program(general_of(artifact), threads=threads)
    if "overridden" in artifact.manifest:
        from polydyn.runtime.overrides import WithOverrides, overridden_of

        if isinstance(program, WithOverrides) and (second := overridden_of(artifact)) is not None:
            program.second = open_program(second, threads=threads)
    return program


def _open(artifact: Artifact, threads: int | None, compilations: int) -> Program:
    def kind(plain: type[Program]) -> Callable[..., Program]:
        if "overridden" in artifact.manifest:
            from polydyn.runtime.overrides import overriding

            plain = overriding(plain)
        if artifact.manifest.get("host"):
            from polydyn.runtime.texts import with_texts

            return with_texts(plain)
        return plain

    if "order" in artifact.manifest:
        from polydyn.runtime.composite import split
        from polydyn.runtime.parts_program import PartsProgram

        parts = [open_program(p, threads=threads) for p in split(artifact)]
        if "cuda" in artifact.manifest:
            from polydyn.runtime.cuda.parts import CudaPartsProgram

            return kind(CudaPartsProgram)(artifact, parts, compilations=compilations)
        return kind(PartsProgram)(artifact, parts, threads=threads, compilations=compilations)
    if "cuda" in artifact.manifest:
        from polydyn.runtime.cuda.program import CudaProgram

        return kind(CudaProgram)(artifact, compilations=compilations)
    return kind(Program)(artifact, threads=threads, compilations=compilations)


def load(path: str | os.PathLike[str], *, threads: int | None = None, trust: str = CODE) -> Program:
    """Open a saved program; this needs no compiler and imports only numpy. A device program is a ``CudaProgram``.
    ``threads``: threads per call, by default the number it was saved with, else all cores.

    Every byte of the file is checked against its hash; large weights stay mapped. Loading runs native code from the
    file: hashes detect damage, but they are not signatures. ``trust="sources"`` uses no machine code of the file: this
    machine's compiler builds its C texts again, after checks (SECURITY.md says against what this helps).
    ArtifactError: the file is damaged, made for another version or processor, or cannot be built from its sources.
    """
    if not isinstance(trust, str) or trust not in TRUST:
        raise InputError(f"trust is {trust!r}", rule="trust", remedy=f"pass {' or '.join(map(repr, TRUST))}")
    checked = checked_path(path, error=ArtifactError)
    if trust == CODE:
        return open_program(read_artifact(checked), threads=threads)
    with needing_packages('polydyn.load(trust="sources")'):
        from polydyn.runtime.from_sources import rebuilt  # the only use of a compiler here

    return open_program(rebuilt(read_artifact(checked, check_machine=False), str(path)), threads=threads)

"""Run saved programs from C, without Python: ``run_stdin.c``. An emulator runs programs of another architecture."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polydyn.runtime.artifact import read_artifact

HERE = Path(__file__).parent


def build(compiler: Sequence[str], folder: Path) -> Path:
    """Build the C program in a folder. ``compiler``: its command, with any flags."""
    made, include = folder / "run_stdin", HERE.parent / "runtime" / "c"
    strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1"]
    source = HERE / "run_stdin.c"
    subprocess.run([*compiler, *strict, f"-I{include}", str(source), "-o", str(made), "-ldl"], check=True)
    return made


class RefusedError(Exception):
    """The program ended with this text."""


def run(
    command: Sequence[str], artifact: Path, calls: Sequence[Mapping[str, Any]], threads: int = 2
) -> list[dict[str, Any]]:
    """Return the outputs of a saved program for each call; ``command`` runs ``build``'s program.

    RefusedError: it failed.
    """
    return run_and_listen(command, artifact, calls, threads)[0]


def run_and_listen(
    command: Sequence[str], artifact: Path, calls: Sequence[Mapping[str, Any]], threads: int = 2,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, Any]], str]:  # fmt: skip
    """Return what ``run`` does, and what the program wrote to standard error. RefusedError: it failed."""
    read = read_artifact(artifact, check_machine=False)
    library = artifact.with_suffix(".so")
    library.write_bytes(read.library)
    inputs, outputs = ([(io["name"], io["dtype"]) for io in read.manifest[k]] for k in ("inputs", "outputs"))
    data = b""
    for given in calls:
        for name, _ in inputs:
            a = np.asarray(given[name])
            data += struct.pack(f"<{a.ndim + 1}q", a.ndim, *a.shape) + a.tobytes()
    done = subprocess.run(
        [*command, str(library), str(artifact), str(threads)], input=data, capture_output=True, timeout=600,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode:
        raise RefusedError(done.stderr.decode(errors="replace"))
    found, at = [], 0
    for _ in calls:
        row = {}
        for name, dtype in outputs:
            (rank,) = struct.unpack_from("<q", done.stdout, at)
            shape = struct.unpack_from(f"<{rank}q", done.stdout, at + 8)
            a = np.frombuffer(done.stdout, dtype, int(np.prod(shape)), at + 8 * (rank + 1)).reshape(shape)
            row[name], at = a, at + 8 * (rank + 1) + a.nbytes
        found.append(row)
    assert at == len(done.stdout)
    return found, done.stderr.decode(errors="replace")

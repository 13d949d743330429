"""Damage saved programs: each must be rejected with an ArtifactError, or be read as the undamaged one.

usage: python -m polydyn.testing.damage_artifacts PROGRAM [COUNT] [--first N] [--sanitize]

A file is a function of its number: cut off, or with changed bits, changed bytes or bytes from elsewhere. The reader in
Python must reject it, unless the change is in bytes without a meaning. With ``--sanitize`` a C program also opens each
file (``open_damaged.c``). It contains the sources of PROGRAM, built with the sanitizers of addresses and of undefined
behaviour, so PROGRAM must be a program for the CPU without parts. Prints failures and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polydyn.build.compiler import find_compiler
from polydyn.errors import ArtifactError
from polydyn.runtime.artifact import Artifact, read_artifact
from polydyn.testing.damage import Damage, cut_off, flipped, moved, overwritten

LOADER = "open_damaged.c"
FLAGS = ("-std=gnu11", "-O1", "-g", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
DAMAGES: Sequence[Damage] = (cut_off, flipped, overwritten, moved)


def damage(data: bytes, number: int) -> bytes:
    """Return the file of a number."""
    r = random.Random(number)
    return r.choice(DAMAGES)(data, r)


def damaged(data: bytes, number: int) -> str:
    """Read the file of a number. Return the failure, or "" if it was rejected or read as the undamaged one."""
    with tempfile.TemporaryDirectory(prefix="polydyn-") as folder:
        path = Path(folder) / "p"
        path.write_bytes(data)
        original = _content(read_artifact(path))
        path.write_bytes(damage(data, number))
        try:
            found = _content(read_artifact(path))
        except ArtifactError:
            return ""
        except Exception as e:  # the failure to report
            return f"{number}: {type(e).__name__}: {e}"
    return "" if found == original else f"{number}: read as another program"


def _content(a: Artifact) -> object:
    return a.manifest, a.sources, a.library, a.weights.tobytes(), a.images


def sanitized_loader(artifact: Artifact, folder: Path) -> Path:
    """Build ``open_damaged.c`` with a program's sources and return it. CalledProcessError: it does not compile."""
    sources = {**artifact.sources, LOADER: (Path(__file__).parent / LOADER).read_text(encoding="utf-8")}
    for name, text in sources.items():
        (folder / name).write_text(text, encoding="utf-8")
    units = [n for n in sources if n.endswith(".c")]
    command = [*find_compiler().command, *FLAGS, *units, "-o", "open_damaged", "-lm", "-ldl"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return folder / "open_damaged"


def opened(loader: Path, data: bytes, number: int) -> str:
    """Give the file of a number to a loader. Return the failure, or "" if it did not end by a signal or a report."""
    with tempfile.TemporaryDirectory(prefix="polydyn-") as folder:
        path = Path(folder) / "p"
        path.write_bytes(damage(data, number))
        done = subprocess.run([str(loader), str(path)], capture_output=True, text=True, timeout=60)
    if done.returncode in (0, 1) and "Sanitizer" not in done.stderr and "runtime error" not in done.stderr:
        return ""
    return f"{number}: {loader.name} ended with {done.returncode}: {done.stderr[:400]}"


def main() -> None:
    """Damage a program many times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true")
    args = parser.parse_args()
    data = args.program.read_bytes()
    numbers = range(args.first, args.first + args.count)
    failures = [f for n in numbers if (f := damaged(data, n))]
    if args.sanitize:
        with tempfile.TemporaryDirectory(prefix="polydyn-") as folder:
            loader = sanitized_loader(read_artifact(args.program), Path(folder))
            failures += [f for n in numbers if (f := opened(loader, data, n))]
    print("\n".join([*failures, f"{args.count} files from {args.first}: {len(failures)} failures"]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

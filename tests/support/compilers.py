"""Run chosen tests with every C compiler that is here: ``make compilers-test``.

gcc, clang (also under a name with its version) and zig (on the path, or of the Python package ziglang). What is missing
is named. Exit code 1: a test failed, or none of the compilers is here.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from polydyn.testing.cells import c_compilers
from tests.support.paths import ROOT

CHOSEN = (
    "tests/kernels/test_c_math.py",
    "tests/kernels/test_c_values.py",
    "tests/kernels/test_targets.py",
    "tests/kernels/test_halves.py",
    "tests/kernels/test_bf16.py",
    "tests/kernels/test_attention.py",
    "tests/kernels/test_quantization.py",
    "tests/kernels/test_words.py",
    "tests/kernels/test_transpose.py",
    "tests/kernels/test_classical.py",
    "tests/program/test_control_flow.py",
    "tests/program/test_sequences.py",
    "tests/program/test_parts_from_c.py",
    "tests/models/test_models.py",
)
"""Functions and values of the headers; kernels for avx2, avx512 and the emulated matrix unit; halves, bytes, attention,
forests; loops, sequences, a program in C; the stored models."""


def here() -> tuple[dict[str, str], list[str]]:
    """Return the command of every compiler that is here, by its name, and the names of the others."""
    found = c_compilers()
    return {n: c for n, c in found.items() if c}, [n for n, c in found.items() if not c]


def main() -> int:
    """Run the tests with one compiler after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=CHOSEN, help="files of tests instead of the chosen ones")
    parser.add_argument("--only", help="one of gcc, clang, zig")
    arguments = parser.parse_args()
    commands, missing = here()
    results: dict[str, int] = {}
    for name, command in commands.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as cache:
            variables = {**os.environ, "CC": command, "POLYDYN_CACHE": cache}
            variables.setdefault("ZIG_GLOBAL_CACHE_DIR", str(Path(tempfile.gettempdir()) / "polydyn-compilers-test"))
            print(f"== {name}: CC={shlex.quote(command)}", flush=True)
            run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments.tests]
            results[name] = subprocess.run(run, cwd=ROOT, env=variables).returncode
    for name, code in results.items():
        print(f"{name}: {'passed' if code == 0 else f'failed (exit code {code})'}")
    for name in missing:
        print(f"{name}: not here, not tested")
    return 1 if any(results.values()) or not results else 0


if __name__ == "__main__":
    sys.exit(main())

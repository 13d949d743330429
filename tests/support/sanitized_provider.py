"""Run the tests of the execution provider with an instrumented provider library: ``make sanitize``.

usage: python -m tests.support.sanitized_provider [ARGUMENT OF PYTEST ...]

gcc's sanitizers of addresses, leaks and undefined behaviour. Python and ONNX Runtime are not instrumented, so reports
count only if they name a file of the provider. Compiling processes are instrumented too. Exit code 1: a finding, or a
test that fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from polydyn.ort.library import UNITS
from tests.support.paths import ROOT
from tests.support.sanitized import KINDS

CHILD = """
import ctypes, gc, os, sys, pytest
code = pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]])
gc.collect()
ctypes.CDLL(None).__lsan_do_recoverable_leak_check()
os._exit(code)
"""
"""The program that runs the tests. Leaks are looked for before the end of the process, which unloads the library."""
PROVIDER_TESTS = (
    "tests/ort",
    "--deselect",
    "tests/ort/test_ort_context.py::test_a_host_in_c_runs_an_extracted_program",
)
"""All tests but one, whose process is not Python and does not begin with the sanitizers' libraries."""
_FILES = re.compile(r"\b(" + "|".join(map(re.escape, UNITS)) + r"):\d+")
_KIND = re.compile(r"runtime error:|ERROR: AddressSanitizer|leak of")


def findings(text: str) -> Iterator[str]:
    """Yield the reports of a sanitizer's log that name a file of the provider."""
    for report in re.split(r"\n\s*\n", text):
        if _KIND.search(report) and _FILES.search(report):
            yield report.strip()


def run(arguments: Sequence[str], before: str = "") -> tuple[int, list[str]]:
    """Run tests; return pytest's exit code and the findings. ``before``: Python code that runs first."""
    with tempfile.TemporaryDirectory(prefix="polydyn-provider-") as folder:
        flags = [*KINDS["memory"]]
        libraries = [
            subprocess.run(["gcc", f"-print-file-name={n}"], capture_output=True, text=True, check=True).stdout.strip()
            for n in ("libasan.so", "libubsan.so", "libstdc++.so")
        ]
        log = f"log_path={folder}/log"
        settings = {
            "CC": " ".join(["gcc", *flags]), "LD_PRELOAD": " ".join(libraries), "PYTHONMALLOC": "malloc",
            "POLYDYN_CACHE": f"{folder}/cache", "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
            "ASAN_OPTIONS": f"leak_check_at_exit=0:alloc_dealloc_mismatch=0:handle_segv=0:{log}",
        }  # fmt: skip
        command = [sys.executable, "-c", before + CHILD, *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings})
        found = [f for p in Path(folder).glob("log.*") for f in findings(p.read_text(errors="replace"))]
        return done.returncode, found


def main() -> int:
    """Run the tests of the provider, or what the arguments name."""
    code, found = run(sys.argv[1:] or PROVIDER_TESTS)
    print(*found, f"{len(found)} findings in the provider", sep="\n\n")
    return 1 if code or found else 0


if __name__ == "__main__":
    sys.exit(main())

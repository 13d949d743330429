"""Run today's fuzzers on an older revision, to see which of its faults they find.

usage: python -m benchmarks.detection REVISION models|functions|modules COUNT [--first N] [--jobs 1] [--out FOLDER]

Writes the product of REVISION and the current ``polydyn/testing`` into a temporary folder. There it runs
``testing.fuzz_models`` (without plans, whose form changes), or ``testing.fuzz_torch`` on functions or modules, on COUNT
seeds from N on. Prints the fuzzer's output. A person judges which fault each failure shows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUZZERS = {
    "models": ("fuzz_models", "--plan", "0"),
    "functions": ("fuzz_torch", "--kind", "aten"),
    "modules": ("fuzz_torch", "--kind", "modules"),
}


def with_todays_fuzzers(revision: str, folder: Path) -> None:
    """Write the product of ``revision`` with the fuzzers of this checkout into ``folder``."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    testing = folder / "polydyn" / "testing"
    shutil.rmtree(testing)
    shutil.copytree(ROOT / "polydyn" / "testing", testing, ignore=shutil.ignore_patterns("__pycache__"))


def main() -> int:
    """Run the command line; return the fuzzer's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("fuzzer", choices=FUZZERS)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    module, *more = FUZZERS[args.fuzzer]
    out = ["--out", str(Path(args.out).resolve())] if args.out else []
    with tempfile.TemporaryDirectory(prefix="polydyn-detection-") as folder:
        with_todays_fuzzers(args.revision, Path(folder))
        words = [str(args.count), "--first", str(args.first), "--jobs", str(args.jobs), *more, *out]
        command = [sys.executable, "-m", f"polydyn.testing.{module}", *words]
        return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}).returncode


if __name__ == "__main__":
    sys.exit(main())

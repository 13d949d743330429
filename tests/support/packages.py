"""The sources of a wheel, alone in a folder, and the wheel that pip builds from them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def copy_sources(to: Path) -> Path:
    """Copy the sources of a wheel, so that a build leaves nothing in the repository."""
    for name in ("polydyn", "schedules", "codegen"):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def build_wheel(source: Path, to: Path) -> Path:
    """Build the wheel of a folder or an sdist, with the setuptools of this environment."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(to), str(source)], check=True, cwd=to)
    (wheel,) = to.glob("*.whl")
    return wheel

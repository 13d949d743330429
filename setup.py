"""Compiles the run-time library when polydyn is installed. All else is in setup.cfg."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithObjects(build_py):
    """Copies the package, and compiles the files of its run-time library for this machine."""

    def run(self) -> None:
        """Copy the package, then compile; without a compiler the run-time library is compiled at first starts."""
        super().run()
        package = HERE if self.editable_mode else HERE / self.build_lib
        subprocess.run(
            [sys.executable, "-m", "polydyn.program.package_objects", package / "polydyn" / "build" / "compiled"],
            cwd=HERE, env={**os.environ, "PYTHONPATH": str(HERE)}, check=False,
        )  # fmt: skip


setup(cmdclass={"build_py": BuildWithObjects})

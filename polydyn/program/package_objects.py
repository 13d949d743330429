"""Compiles the C files of the run-time library when the package is installed, so that no first start compiles them.

They are 0.8 s of each first start, 2.3 s for models of several parts. ``setup.py`` runs this file with a folder as its
argument (``cache.OF_PACKAGE``). Keys are those of the user's cache: another compiler, other flags or other texts do not
find these objects, and are compiled as without them. Standard library only, because the environment of a build has
nothing else.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from polydyn.build import cache
from polydyn.build.compiler import Building, build_library
from polydyn.errors import PolydynError
from polydyn.runtime.c import sources

OBJECTS = "POLYDYN_OBJECTS"
"""Environment variable: 0 compiles nothing, for packages that are installed on other machines."""


def compile_objects(folder: Path) -> None:
    """Compile the run-time files of programs for this machine into a folder that ``FileCache`` reads; replace it.

    BuildError: there is no compiler, or a file cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)  # objects of an earlier version
    os.environ["POLYDYN_CACHE"] = str(folder)
    cache.OF_PACKAGE = folder
    texts = sources("cpu")
    units = {n: t for n, t in texts.items() if n.endswith(".c")}
    with Building({n: t for n, t in texts.items() if n not in units}, "cpu") as building:
        building.compile(units)
    texts = sources("parts")
    units = {n: t for n, t in texts.items() if n.endswith(".c")}
    build_library(units, {n: t for n, t in texts.items() if n not in units}, "cpu:baseline")


def main() -> int:
    """Compile the objects. An installation does not fail without them."""
    if os.environ.get(OBJECTS) == "0":
        return 0
    try:
        compile_objects(Path(sys.argv[1]))
    except PolydynError as e:
        print(f"the run-time library is compiled at first starts: {e}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

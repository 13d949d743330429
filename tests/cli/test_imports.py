"""The modules that short processes import are those of tests/golden/imports.txt: each costs time in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import polydyn
from tests.support.tiny import model, node

TAB = "import sys; sys.argv = ['polydyn']; from polydyn.__main__ import start; start()"
SHORT = {
    "polydyn.load, run": "import numpy as np, polydyn; "
    "polydyn.load('m.polydyn').run({'x': np.ones((2, 4), np.float32)})",
    "session of a cached program, run": "import numpy as np, polydyn; s = polydyn.InferenceSession('m.onnx'); "
    "s.run(None, {'x': np.ones((2, 4), np.float32)}); assert s.program.compilations == 0",
    "polydyn --help": TAB.replace("'polydyn'", "'polydyn', '--help'"),
    "TAB: commands": TAB,
    "TAB: options of compile": TAB,
}
WORDS = {"TAB: commands": ("polydyn ", "1"), "TAB: options of compile": ("polydyn compile --", "2")}
LISTED = "import atexit, sys; atexit.register(lambda: print('MODULES', *sys.modules)); "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its program, which is in the cache too."""
    path = tmp_path_factory.mktemp("imports")
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 4])}, ["y"]), str(path / "m.onnx"))
    polydyn.compile(path / "m.onnx", cache=True).save(path / "m.polydyn")
    polydyn.InferenceSession(str(path / "m.onnx"))
    return path


def imported(code: str, folder: Path, more: dict[str, str]) -> list[str]:
    """Return the modules of polydyn and the packages that a process imports; Python's own differ by version."""
    done = subprocess.run([sys.executable, "-c", LISTED + code], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, **more, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True)  # fmt: skip
    modules = done.stdout.rpartition("MODULES ")[2].split()
    ours = [m for m in modules if m.partition(".")[0] == "polydyn"]
    others = {m.partition(".")[0] for m in modules} - {*sys.stdlib_module_names, "polydyn", "__main__", "__mp_main__"}
    return sorted(ours) + sorted(m for m in others if "editable" not in m and "distutils" not in m)


def test_short_processes_import_what_is_listed(folder: Path, golden: Callable[[str, str], None]) -> None:
    lines = []
    for name, code in SHORT.items():
        words, number = WORDS.get(name, ("", ""))
        more = {"_POLYDYN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number} if words else {}
        lines += [f"== {name}", *imported(code, folder, more)]
    golden("imports.txt", "\n".join(lines))

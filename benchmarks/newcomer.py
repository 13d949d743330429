"""Times a newcomer's path: ``python -m benchmarks.newcomer``.

Clones this repository (its last commit) into an empty folder and follows README.md with only Python, gcc and make: no
environment, no polydyn cache, no wheels that pip has stored. It is the contributor among the users of
``benchmarks.users``. The first compiled model must exist within 3 minutes, the
first picture of a notebook, in a Jupyter kernel, within 5; pip downloads packages from its usual source. The exit code
is 1 if it took longer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL, PICTURE = 180.0, 300.0
"""Maximum seconds from the beginning of the clone."""
KERNEL = """
import sys
import nbformat
from nbclient import NotebookClient

class Shown(Exception):
    pass

def look(cell, cell_index, execute_reply):
    if any("<svg" in "".join(o.get("data", {}).get("text/html", "")) for o in cell.get("outputs", ())):
        raise Shown

path = "notebooks/1_from_onnx_to_kernel.ipynb"
client = NotebookClient(nbformat.read(path, 4), on_cell_executed=look, resources={"metadata": {"path": "notebooks"}})
try:
    client.execute()
except Shown:
    sys.exit(0)
sys.exit("no cell shows a picture")
"""


def main() -> int:
    """Print the seconds after every step; return 1 if a step fails or takes too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that make uses")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "polydyn"
        environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
        environment |= {"POLYDYN_CACHE": f"{name}/cache", "PIP_NO_CACHE_DIR": "1", "IPYTHONDIR": f"{name}/ipython"}
        install = [".venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        steps = (
            ("clone", ["git", "clone", "--quiet", str(ROOT), str(clone)], Path(name), PICTURE),
            ("first compiled model: make demo", ["make", "demo", f"PYTHON={python}"], clone, MODEL),
            ("Jupyter's kernel", [*install, "-e", ".[explore]", "nbclient", "ipykernel"], clone, PICTURE),
            ("first picture of a notebook", [".venv/bin/python", "-c", KERNEL], clone, PICTURE),
        )
        start, late = time.monotonic(), False
        for what, command, folder, limit in steps:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            passed = time.monotonic() - start
            if done.returncode:
                print(f"{what} failed:\n{done.stdout}{done.stderr}")
                return 1
            late |= passed > limit
            print(f"{passed:6.1f} s  {what} (at most {limit:.0f})", flush=True)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())

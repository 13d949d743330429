"""Try a real model: ``python -m benchmarks.demo [MODEL.onnx [B=1,L=8 ...]]``, or ``make demo``.

Without arguments: the recogniser of lines of text in the package rapidocr 3.4.5 (PP-OCRv4, 10.9 MB), which pip
downloads once, at three batch sizes and widths. The model is compiled once and compared with ONNX Runtime by ``polydyn
try``: whether it is right, how much faster it is, and the spread of the times. The exit code is that of the command,
but 0 where the model is right and not faster.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.models.downloads import install

SLOWER = 4
"""Exit code of ``polydyn try``: right, and not faster."""
FOLDER = Path(__file__).parent / "out" / "demo"
PACKAGE = "rapidocr==3.4.5"
MODEL = "rapidocr/models/ch_PP-OCRv4_rec_infer.onnx"
SYMBOLS = ("--symbol", "x=N,_,H,W")
SHAPES = ("N=1,H=48,W=320", "N=2,H=48,W=173", "N=6,H=48,W=100")


def command(arguments: list[str]) -> list[str]:
    """Return the command line of ``polydyn try``. ``arguments``: a model and shapes, or nothing.

    CalledProcessError: pip cannot download the package; a model that is here can be named instead.
    """
    model, *shapes = arguments or (str(FOLDER / MODEL), *SHAPES)
    if not arguments:
        FOLDER.parent.mkdir(exist_ok=True)
        install("pypi", PACKAGE, FOLDER)
    given = [x for shape in shapes for x in ("--shape", shape)]
    return [sys.executable, "-m", "polydyn", "try", model, *given, *(() if arguments else SYMBOLS)]


if __name__ == "__main__":
    code = subprocess.run(command(sys.argv[1:])).returncode
    sys.exit(0 if code == SLOWER else code)

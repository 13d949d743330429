"""Times polydyn beside ONNX Runtime on any exported model; see benchmarks/side_by_side.py for arguments.

A script, not a module: the folder of the same name, which holds the models, is what ``import benchmarks.models`` finds.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)

from benchmarks.side_by_side import main  # noqa: E402 (the path comes first)

main()

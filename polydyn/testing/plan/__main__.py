"""``python -m polydyn.testing.plan MODEL.onnx B=2 L=5``."""

import sys

from polydyn.testing.plan.check import main

sys.exit(main())

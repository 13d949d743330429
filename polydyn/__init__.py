"""polydyn: compiles an ONNX model once, for every shape.

>>> import polydyn
>>> model = polydyn.compile("bert.onnx")          # doctest: +SKIP
>>> out = model(input_ids=ids, attention_mask=mask)   # doctest: +SKIP
"""

from __future__ import annotations

__version__ = "0.1.0"

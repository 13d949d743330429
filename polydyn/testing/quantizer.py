"""Models quantized by ONNX Runtime's tools, for tests and benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polydyn.schedules.expr import Array


class Reader:
    """Feeds for calibration, one after another (ONNX Runtime's CalibrationDataReader)."""

    def __init__(self, feeds: Sequence[Mapping[str, Array]]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Mapping[str, Array] | None:
        """Return the next feeds, or None if there are no more."""
        return next(self.feeds, None)


def quantize(source: str, to: Path, scheme: str, feeds: Sequence[Mapping[str, Array]], **more: Any) -> str:
    """Return the path of the quantized model: ``scheme`` is ``dynamic``, ``QDQ`` or ``QOperator``.

    ``feeds``: for calibration. ``more``: options of the tools; options that end with ``_type`` by name (``QInt8``).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

        more = {k: QuantType[v] if k.endswith("_type") else v for k, v in more.items()}
        if scheme == "dynamic":
            quantize_dynamic(source, to, **more)
        else:
            quantize_static(source, to, Reader(feeds), quant_format=QuantFormat[scheme], **more)
    return str(to)

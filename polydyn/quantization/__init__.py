"""Conversions of models to fewer bits: ``quantize`` and ``to_half``. The results are plain ONNX."""

from polydyn.quantization.halves import to_half
from polydyn.quantization.report import Converted, Layer, Report
from polydyn.quantization.weights import quantize

__all__ = ["Converted", "Layer", "Report", "quantize", "to_half"]

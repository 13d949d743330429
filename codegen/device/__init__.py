"""The device side of generated CUDA kernels: C++ headers (read ``README.md`` here first)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HEADERS"]

HEADERS = Path(__file__).parent
"""The folder of ``pd_device.cuh`` and its companions."""

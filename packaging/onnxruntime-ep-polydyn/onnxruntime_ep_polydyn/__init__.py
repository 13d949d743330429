"""polydyn as an execution provider of ONNX Runtime, under the names that packages of providers have by convention."""

from __future__ import annotations

from polydyn.ort import get_ep_name, get_ep_names, get_library_path

__all__ = ["get_ep_name", "get_ep_names", "get_library_path"]

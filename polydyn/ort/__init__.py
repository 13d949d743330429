"""polydyn inside ONNX Runtime: an execution provider that compiles the nodes of a session (docs/onnxruntime.md).

>>> import onnxruntime, polydyn.ort
>>> polydyn.ort.register()                                                                          # doctest: +SKIP
>>> session = onnxruntime.InferenceSession("bert.onnx", providers=["PolydynExecutionProvider"])     # doctest: +SKIP

The provider is a library in C. It is built on first use and stored in the cache. The nodes that polydyn does not
support stay with ONNX Runtime.
"""

from __future__ import annotations

from polydyn.ort.library import get_ep_name, get_ep_names, get_library_path
from polydyn.ort.registration import InferenceSession, devices, install, register, session_options, unregister
from polydyn.ort.settings import provider_options

__all__ = [
    "InferenceSession", "devices", "get_ep_name", "get_ep_names", "get_library_path", "install", "provider_options",
    "register", "session_options", "unregister",
]  # fmt: skip

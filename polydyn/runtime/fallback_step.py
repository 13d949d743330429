"""The host step that runs a region in ONNX Runtime. It is imported on first use (docs/adr/0030-fallback.md)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from polydyn.errors import InputError
from polydyn.onnx_runtime import ort_session


@lru_cache(maxsize=256)
def _session(model: str) -> Any:
    """Return the session of a model. Its threads do not spin, because the program has its own threads."""
    return ort_session(base64.b64decode(model), spin=False)


def other_runtime(arrays: Sequence[Any], settings: Mapping[str, Any]) -> tuple[list[Any], list[int]]:
    """Run a region. Return its outputs, and all their sizes in order.

    Arrays are passed without copies. An output that shares memory with an input is copied. InputError: ONNX Runtime
    reports an error.
    """
    feeds = dict(zip(settings["names"], arrays, strict=True))
    session = _session(settings["model"])
    try:
        outputs = session.run(None, feeds)
    except Exception as e:  # ONNX Runtime raises many undocumented classes
        raise InputError(str(e).strip().split("\n")[0], rule="ONNX Runtime") from e
    if [o.ndim for o in outputs] != settings["ranks"]:
        raise InputError("results do not have the ranks that the model declares", rule="ONNX Runtime")
    results = [o.copy() if any(np.may_share_memory(o, a) for a in arrays) else o for o in outputs]
    return results, [n for o in results for n in o.shape]

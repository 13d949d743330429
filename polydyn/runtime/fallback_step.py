"""The host's step that runs a region in ONNX Runtime, which is imported when it runs (docs/adr/0030-fallback.md)."""

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
    """A session of a model; its threads do not spin, because the program's own are at work."""
    return ort_session(base64.b64decode(model), spin=False)


def other_runtime(arrays: Sequence[Any], settings: Mapping[str, Any]) -> tuple[list[Any], list[int]]:
    """The outputs of the region, and all their sizes in order. Arrays go in and come out without copies,
    but for one that is handed through: no result lies where an input does. InputError: what ONNX Runtime says.
    """
    feeds = dict(zip(settings["names"], arrays, strict=True))
    session = _session(settings["model"])
    try:
        outputs = session.run(None, feeds)
    except Exception as e:  # of many classes, none of them documented
        raise InputError(str(e).strip().split("\n")[0], rule="ONNX Runtime") from e
    if [o.ndim for o in outputs] != settings["ranks"]:
        raise InputError("results have other ranks than the model says", rule="ONNX Runtime")
    own = [o.copy() if any(np.may_share_memory(o, a) for a in arrays) else o for o in outputs]
    return own, [n for o in own for n in o.shape]

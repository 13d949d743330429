"""What sessions with the provider did on this machine, from the files of the cache, for ``polydyn doctor``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from polydyn.build.cache import cache_root
from polydyn.errors import PolydynError
from polydyn.ort.library import get_library_path
from polydyn.ort.registration import check_version

MAX_MODELS, MAX_REASONS = 3, 3
"""Maximum models, the last first, and maximum nodes of each, that a report names."""


def provider_state() -> tuple[str, bool]:
    """Return whether the provider works here, as text, and whether it is absent. PolydynError: it cannot be built."""
    try:
        installed = version("onnxruntime")
    except PackageNotFoundError:
        return "onnxruntime is not installed", True
    check_version(installed)
    programs = len(list((cache_root() / "ort").glob("*.ep")))
    return f"onnxruntime {installed}, {get_library_path()}, {programs} stored programs", False


def last_sessions() -> Iterator[str]:
    """Yield a line for each of the models that were checked last: how many nodes polydyn computes, and why not all."""
    files = sorted((cache_root() / "ort").glob("*.sets"), key=_changed, reverse=True)
    for path in files[:MAX_MODELS]:
        lines = path.read_text(errors="replace").splitlines()
        counts = re.fullmatch(r"polydyn-sets 1 (\d+) (\d+) (\d+)", lines[0]) if lines else None
        if counts is None:
            continue
        nodes, sets, left = map(int, counts.groups())
        reasons = [x.removeprefix("left ") for x in lines if x.startswith("left ")]
        shown = [*reasons[:MAX_REASONS], *([f"and {left - MAX_REASONS} more"] if left > MAX_REASONS else [])]
        text = f"computes {nodes - left} of {nodes} nodes in {sets} sets"
        failed = path.with_suffix(".failed")
        if failed.exists():
            text = f"computes no nodes: {failed.read_text(errors='replace').splitlines()[0]}"
        yield "; ".join([f"model {path.stem[:8]}: {text}", *(f"left to ONNX Runtime: {s}" for s in shown)])


def state_or_error() -> tuple[str, bool, bool]:
    """Return the text of ``provider_state``, whether it is right, and whether something is absent."""
    try:
        text, absent = provider_state()
    except PolydynError as e:
        return str(e), True, True
    return text, True, absent


def _changed(path: Path) -> float:
    return path.stat().st_mtime

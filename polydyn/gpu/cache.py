"""A content-addressed file cache for compiled kernels."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["cache_root", "cached", "content_key"]


def cache_root() -> Path:
    """``$POLYDYN_CACHE_DIR``, else ``$XDG_CACHE_HOME/polydyn``, else ``~/.cache/polydyn``."""
    chosen = os.environ.get("POLYDYN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polydyn"


def content_key(*parts: str | bytes) -> str:
    """A hex key of all parts; the boundaries between parts count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def cached(kind: str, key: str, suffix: str, make: Callable[[Path], Iterable[tuple[str, bytes]]]) -> Path:
    """The path ``<root>/<kind>/<key><suffix>``, made on the first call.

    ``make(folder)`` returns (suffix, content) pairs, one of them for ``suffix``; the others are written beside it
    (a log, a source). Files appear whole or not at all, so concurrent compilations of one kernel are harmless.
    """
    folder = cache_root() / kind
    wanted = folder / (key + suffix)
    if wanted.exists():
        return wanted
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="tmp-") as scratch:
        made = sorted(make(Path(scratch)), key=lambda pair: pair[0] == suffix)  # the wanted file comes last
        for ending, content in made:
            part = Path(scratch) / ("out" + ending)
            part.write_bytes(content)
            os.replace(part, folder / (key + ending))
    return wanted

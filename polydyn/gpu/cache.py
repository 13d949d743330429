"""Compiled kernels in the cache on disk (``polydyn.build.cache``)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from polydyn.build.cache import FileCache
from polydyn.build.cache import digest as content_key

__all__ = ["cached", "content_key"]


def cached(kind: str, key: str, make: Callable[[Path], bytes]) -> bytes:
    """Return the entry of that kind and key; create it if it is absent, damaged or evicted.

    ``make(folder)`` creates it in an empty folder, which is removed afterwards. Concurrent compilations of the same
    kernel are harmless. BuildError: the cache cannot be written.
    """
    cache = FileCache(kind)
    body = cache.get(key)
    if body is None:
        with tempfile.TemporaryDirectory(prefix="polydyn-", ignore_cleanup_errors=True) as scratch:
            body = make(Path(scratch))
        cache.put(key, body)
    return body

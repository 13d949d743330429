"""The bound on the cache on disk: when it is exceeded, the least recently used entries are removed.

The modification time of a file is the time of its last use. The length of the file ``blocks`` in the cache folder is
the number of 4 KiB blocks in the cache: every process that stores a file appends that many bytes. So the files are
scanned only when the limit is reached; eviction corrects the length. Any process may evict at any time: a removed file
is created again, and a mapped library stays mapped. Files are removed only from the folders in ``KINDS``, and only if
their names have the form of the cache's own. Standard library only, because ``polydyn.load`` imports this.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from polydyn.errors import BuildError

KINDS = {
    "compilers": "the versions of C compilers, and the flags that they understand",
    "objects": "compiled C, and the libraries linked from it",
    "lib": "libraries of programs, as they are loaded",
    "cuda": "compiled CUDA, with the output of ptxas",
    "emulated": "CUDA compiled for the CPU",
    "libcuda": "the driver library of the emulation",
    "sources": "hashes of polydyn's own files",
    "programs": "whole programs, as polydyn.compile stores them",
    "ort": "models and programs of the execution provider of ONNX Runtime",
}
"""Folders that can be created again from their sources. ``machines`` is not one of them: it contains measurements."""

BLOCKS, BLOCK = "blocks", 4096
LIMIT = "4G"
IN_USE_SECONDS, UNFINISHED_SECONDS = 60.0, 3600.0
"""Seconds after its last use in which a file is not evicted, because another process may be about to open it; the same
for an unfinished file.
"""

_CACHE_NAME = re.compile(r"\.?[0-9a-f]{64}(\.\w+)*")
"""A key or hash, optionally with a suffix; with a leading dot while the file is being written."""


class Entry(NamedTuple):
    """A file of the cache: time of its last use in nanoseconds, size in blocks."""

    path: Path
    used: int
    blocks: int

    @property
    def bytes(self) -> int:
        """The size on disk in bytes."""
        return self.blocks * BLOCK

    @property
    def in_use(self) -> bool:
        """Whether another process may be using the file now."""
        return abs(time.time_ns() - self.used) < (UNFINISHED_SECONDS if self.unfinished else IN_USE_SECONDS) * 1e9

    @property
    def unfinished(self) -> bool:
        """Whether the file has a temporary name."""
        return self.path.name.startswith(".")


def cache_limit() -> int:
    """Return the maximum bytes of the cache: ``$POLYDYN_CACHE_LIMIT`` (for example 500M or 4G), 4 GB by default.

    BuildError: it is not a size.
    """
    text = os.environ.get("POLYDYN_CACHE_LIMIT") or LIMIT
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if size is None:
        raise BuildError(f"POLYDYN_CACHE_LIMIT is {text!r}", rule="a number of bytes", remedy="set it as in 500M or 4G")
    return int(float(size[1]) * 1000.0 ** " KMGT".index(size[2].upper() or " "))


def entries(root: Path, kind: str) -> Iterator[Entry]:
    """Yield the cache's own files of a kind, in no particular order."""
    with contextlib.suppress(OSError), os.scandir(root / kind) as scan:
        for file in scan:
            if _CACHE_NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    s = file.stat(follow_symlinks=False)
                    yield Entry(Path(file.path), s.st_mtime_ns, -(-s.st_size // BLOCK))


def touch(path: Path) -> bool:
    """Record a use of a file. Return False if the file does not exist."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a cache that belongs to another user is read without recording
    return True


def grown(root: Path, size: int) -> None:
    """Add a new file of ``size`` bytes to the count; evict if the limit is exceeded. BuildError: invalid limit."""
    limit = cache_limit()
    with contextlib.suppress(OSError):  # the file is stored; an error in bounding the cache must not stop the caller
        with (root / BLOCKS).open("ab") as f:
            before = f.tell()
            f.write(bytes(-(-size // BLOCK)))
            blocks = f.tell()
        if not before or blocks * BLOCK > limit:
            evict(root, limit)


def evict(root: Path, limit: int) -> None:
    """Reduce a cache larger than the limit to 7/8 of the limit, removing the least recently used entries first.

    Files in use are kept regardless of the limit. OSError: ``blocks`` cannot be written.
    """
    oldest = sorted((e for kind in KINDS for e in entries(root, kind)), key=lambda e: (e.used, e.path))
    blocks = sum(e.blocks for e in oldest)
    if blocks * BLOCK > limit:
        for e in oldest:
            if blocks * BLOCK <= limit - limit // 8:
                break
            if not e.in_use and _removed(e):
                blocks -= e.blocks
    os.truncate(root / BLOCKS, max(1, blocks))  # 0 means that the cache was never counted


def clear(root: Path) -> list[Entry]:
    """Remove all entries except those being written; return the removed ones."""
    candidates = [e for kind in KINDS for e in entries(root, kind)]
    removed = [e for e in candidates if not (e.unfinished and e.in_use) and _removed(e)]
    (root / BLOCKS).unlink(missing_ok=True)
    return removed


def _removed(e: Entry) -> bool:
    """Remove a file unless it was used in the meantime. Return whether it is gone."""
    try:
        if e.path.stat().st_mtime_ns != e.used:
            return False
        e.path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

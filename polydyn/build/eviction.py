"""The bound on the cache on disk: when it is exceeded, the entries unused for longest are removed.

The modification time of a file is that of its last use. The length of the file ``blocks`` in the cache folder is the
number of blocks of 4 KiB in the cache: whoever stores a file appends as many bytes, so that nobody looks at all files
before the limit is reached; eviction looks, and makes the length right. Any process may evict at any time: a file that
is gone is made again, and a library that is mapped stays mapped. Files are removed only from the folders of ``KINDS``,
and only those that are named as the cache names its own. Standard library only: ``polydyn.load`` comes through here.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polydyn.errors import BuildError

KINDS = {
    "objects": "compiled C, and the libraries linked from it",
    "lib": "libraries of programs, as they are loaded",
    "cuda": "compiled CUDA, with what ptxas says of it",
    "emulated": "CUDA compiled for the CPU",
    "libcuda": "the driver library of the emulation",
    "programs": "whole programs of sessions, of torch.compile and of jobs",
}
"""Folders that can be made again from their sources. ``machines`` is none: it holds measurements."""

BLOCKS, BLOCK = "blocks", 4096
LIMIT = "4G"
IN_USE, BEGUN = 60.0, 3600.0
"""Seconds from its last use during which eviction leaves a file alone, as somebody may be about to open it; the same
for a file that is not finished.
"""

_OWN = re.compile(r"\.?[0-9a-f]{64}(\.\w+)*")
"""A key or hash, perhaps with an ending; with a dot in front while it is being written."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache: nanoseconds of its last use, size in blocks."""

    path: Path
    used: int
    blocks: int

    @property
    def bytes(self) -> int:
        """Bytes on the disk."""
        return self.blocks * BLOCK

    @property
    def in_use(self) -> bool:
        """Whether another process may be using it now."""
        return abs(time.time_ns() - self.used) < (BEGUN if self.unfinished else IN_USE) * 1e9

    @property
    def unfinished(self) -> bool:
        """Whether it has a temporary name."""
        return self.path.name.startswith(".")


def cache_limit() -> int:
    """Bytes that the cache may take: ``$POLYDYN_CACHE_LIMIT`` (as in 500M or 4G), 4 GB when it is not set.

    BuildError: it is not a size.
    """
    text = os.environ.get("POLYDYN_CACHE_LIMIT") or LIMIT
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if size is None:
        raise BuildError(f"POLYDYN_CACHE_LIMIT is {text!r}", rule="a number of bytes", remedy="set it as in 500M or 4G")
    return int(float(size[1]) * 1000.0 ** " KMGT".index(size[2].upper() or " "))


def entries(root: Path, kind: str) -> Iterator[Entry]:
    """The cache's own files of a kind, in no order."""
    with contextlib.suppress(OSError), os.scandir(root / kind) as scan:
        for file in scan:
            if _OWN.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    s = file.stat(follow_symlinks=False)
                    yield Entry(Path(file.path), s.st_mtime_ns, -(-s.st_size // BLOCK))


def touch(path: Path) -> bool:
    """Records a use of a file; False when it is gone."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a cache that others own is read all the same
    return True


def grown(root: Path, size: int) -> None:
    """Counts a new file of so many bytes in the cache; evicts when the limit is exceeded. BuildError: bad limit."""
    limit = cache_limit()
    with contextlib.suppress(OSError):  # the file is there; a cache that cannot be bounded is no reason to stop
        with (root / BLOCKS).open("ab") as f:
            before = f.tell()
            f.write(bytes(-(-size // BLOCK)))
            blocks = f.tell()
        if not before or blocks * BLOCK > limit:
            evict(root, limit)


def evict(root: Path, limit: int) -> None:
    """Brings the cache, if it is larger than the limit, down to 7/8 of it: what was used longest ago goes first.

    What is in use stays, whatever the limit. OSError: ``blocks`` cannot be written.
    """
    oldest = sorted((e for kind in KINDS for e in entries(root, kind)), key=lambda e: (e.used, e.path))
    blocks = sum(e.blocks for e in oldest)
    if blocks * BLOCK > limit:
        for e in oldest:
            if blocks * BLOCK <= limit - limit // 8:
                break
            if not e.in_use and _removed(e):
                blocks -= e.blocks
    os.truncate(root / BLOCKS, max(1, blocks))  # 0 would stand for a cache that nobody has counted


def clear(root: Path) -> list[Entry]:
    """Removes all entries except those being written; returns them."""
    candidates = [e for kind in KINDS for e in entries(root, kind)]
    removed = [e for e in candidates if not (e.unfinished and e.in_use) and _removed(e)]
    (root / BLOCKS).unlink(missing_ok=True)
    return removed


def _removed(e: Entry) -> bool:
    """Removes a file unless it was used since it was found; whether it is gone."""
    try:
        if e.path.stat().st_mtime_ns != e.used:
            return False
        e.path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

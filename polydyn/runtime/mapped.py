"""A saved program's file, which stays mapped: calls must not read weights that somebody has changed since.

Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable

from polydyn.errors import ArtifactError

PART = 1 << 22
"""Bytes that are hashed at a time."""


def joined_hash(parts: Iterable[bytes]) -> str:
    """SHA-256 of the SHA-256 digests of all parts, in order."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


class MappedFile:
    """The open file behind mapped weights. ``begin``, ``size``: their place in bytes; ``digest``: their
    ``joined_hash``.
    """

    def __init__(self, path: str | os.PathLike[str], begin: int, size: int, digest: str) -> None:
        """OSError: the file cannot be read."""
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._number)
        self._path, self._begin, self._size, self._digest = path, begin, size, digest
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._number)
        return found.st_mtime_ns, found.st_size

    def check(self) -> None:
        """ArtifactError: the weights in the file are not those that were loaded. Costs one call of the system."""
        now = self._now()
        if now == self._stamp:
            return
        if now[1] < self._begin + self._size or self._hash() != self._digest:
            raise ArtifactError(
                f"{self._path} was overwritten while its program is in use",
                remedy="load it again; write a new version under another name and rename it, as Program.save does",
            )
        self._stamp = now  # only its times were changed

    def _hash(self) -> str:
        """The hash of what the file holds now; read, because a mapping of a truncated file ends the process."""
        end, number = self._begin + self._size, self._number
        starts = range(self._begin, end, PART)
        return joined_hash(hashlib.sha256(os.pread(number, min(PART, end - s), s)).digest() for s in starts)

"""The file of a saved program that stays mapped: calls must not read weights that were changed after loading.

Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable

from polydyn.errors import ArtifactError

PART = 1 << 22
"""Number of bytes that are hashed at a time."""


def joined_hash(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of the SHA-256 digests of all parts, in order."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


class MappedFile:
    """The open file of mapped weights. ``begin``, ``size``: position of the weights in bytes; ``digest``: their
    ``joined_hash``.
    """

    def __init__(self, path: str | os.PathLike[str], begin: int, size: int, digest: str) -> None:
        """OSError: the file cannot be read."""
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._number)
        self._path, self._begin, self._size, self._digest = path, begin, size, digest
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._number)
        return status.st_mtime_ns, status.st_size

    def check(self) -> None:
        """Check that the weights are unchanged, with one system call. ArtifactError: the file was overwritten."""
        now = self._now()
        if now == self._stamp:
            return
        if now[1] < self._begin + self._size or self._hash() != self._digest:
            raise ArtifactError(
                f"{self._path} was overwritten while its program is in use",
                remedy="load it again; write a new version under another name and rename it, as Program.save does",
            )
        self._stamp = now  # only the file's times have changed

    def _hash(self) -> str:
        """Return the hash of the file's current content. It is read, because access to a mapping of a truncated file
        would end the process."""
        end, number = self._begin + self._size, self._number
        starts = range(self._begin, end, PART)
        return joined_hash(hashlib.sha256(os.pread(number, min(PART, end - s), s)).digest() for s in starts)

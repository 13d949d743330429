"""The cache on disk: files named by the content that determines them.

A file is written under a temporary name and then renamed, so that readers see all of it or nothing. The size of the
cache is bounded (``eviction``): a file may disappear at any time and is then created again. Standard library only,
because ``polydyn.load`` imports this.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from polydyn.build.eviction import grown, touch
from polydyn.errors import BuildError, PolydynError, UnwritableError


def cache_root() -> Path:
    """Return ``$POLYDYN_CACHE``, else ``$XDG_CACHE_HOME/polydyn``, else ``~/.cache/polydyn``.

    BuildError: the user has no home folder.
    """
    chosen, caches = os.environ.get("POLYDYN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen) if chosen else Path(caches or "~/.cache").expanduser() / "polydyn"
    except RuntimeError as e:
        raise BuildError(f"no place for the cache: {e}", remedy="set POLYDYN_CACHE to a writable folder") from e


def cache_dir(kind: str) -> Path:
    """Return the folder of a kind in ``cache_root()``; create it for this user alone.

    BuildError: this failed, or another user may write to the folder.
    """
    root = cache_root()
    path = root / kind
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (root, path):
            folder.mkdir(exist_ok=True, mode=0o700)
            _check_owner(folder)
    except OSError as e:
        raise BuildError(
            f"cannot create the cache folder for {kind}: {e}", remedy="set POLYDYN_CACHE to a writable folder"
        ) from e
    return path


def _check_owner(folder: Path) -> None:
    """Raise BuildError if any user may write to a folder, or another user than root owns it: its code would run."""
    state = folder.stat()
    if state.st_mode & 0o002 or state.st_uid not in (os.geteuid(), 0):
        who = "every user may write to" if state.st_mode & 0o002 else f"user {state.st_uid} owns"
        raise BuildError(
            f"{who} the cache folder {folder}", rule="libraries of the cache are run: only you may write to it",
            remedy=f"chmod o-w {folder}, or set POLYDYN_CACHE to a folder of your own",
        )  # fmt: skip


def digest(*parts: str | bytes) -> str:
    """Return the SHA-256 of the parts, each prefixed by its length, as hex text."""
    h = hashlib.sha256()
    for p in parts:
        data = p.encode() if isinstance(p, str) else p
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file with a temporary name in the same folder. At the end of the block it is renamed to ``path``; after
    an error it is removed. OSError as from ``open``.
    """
    import tempfile  # only writing needs it

    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w+b") as f:
            yield f
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_atomically(path: Path, *chunks: bytes | memoryview) -> None:
    """Write a file under a temporary name in the same folder, then rename it. OSError as from ``open``."""
    with replacing(path) as f:
        for chunk in chunks:
            f.write(chunk)


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Convert OSErrors while writing a user's file. UnwritableError: no folder, no permission or no space."""
    try:
        yield
    except PolydynError:
        raise
    except OSError as e:
        raise UnwritableError.of(path, e) from e


OF_PACKAGE = Path(__file__).parent / "compiled"
"""A cache that is never written: what was compiled when the package was installed (``package_objects``)."""


class FileCache:
    """Byte strings by key. Every entry is stored with its hash; one whose hash does not match counts as absent.

    What the user's cache does not have may be in ``OF_PACKAGE``.
    """

    def __init__(self, kind: str) -> None:
        self.folder = cache_dir(kind)

    def get(self, key: str) -> bytes | None:
        """Return the entry, or None if it is absent or damaged."""
        body = _entry(self.path(key))
        if body is None:
            return _entry(OF_PACKAGE / self.folder.name / key)
        touch(self.path(key))
        return body

    def put(self, key: str, body: bytes) -> None:
        """Store the entry. BuildError: the folder cannot be written."""
        try:
            write_atomically(self.path(key), body, hashlib.sha256(body).digest())
        except OSError as e:
            raise BuildError(
                f"the cache folder {self.folder} cannot be written: {e.strerror}",
                remedy="set POLYDYN_CACHE to a writable folder with free space",
            ) from e
        grown(self.folder.parent, len(body) + 32)

    def path(self, key: str) -> Path:
        """Return the path of an entry's file, which contains the entry and then its hash."""
        return self.folder / key


def _entry(path: Path) -> bytes | None:
    """Return the content of an entry's file, or None if there is none or its hash does not match."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body, check = data[:-32], data[-32:]
    return body if hashlib.sha256(body).digest() == check else None


def stored_file(kind: str, name: str, body: bytes) -> Path:
    """Return a file in the cache with exactly this content; write it if it is absent or different (for dlopen)."""
    path = cache_dir(kind) / name
    try:
        if path.read_bytes() == body and touch(path):
            return path
    except OSError:
        pass
    try:
        write_atomically(path, body)
    except OSError as e:
        raise BuildError(
            f"{path} cannot be written: {e.strerror}", remedy="set POLYDYN_CACHE to a writable folder with free space"
        ) from e
    grown(path.parent.parent, len(body))
    return path


def library_file(data: bytes) -> Path:
    """Return a shared library as a file of the cache. BuildError: it cannot be written."""
    return stored_file("lib", f"{hashlib.sha256(data).hexdigest()}.so", data)


def open_library(data: bytes) -> ctypes.CDLL:
    """Load a shared library. It stays mapped if its file is removed. If the cache cannot be written, as in a container
    with a read-only root, or forbids execution, the library is loaded from memory.

    BuildError: neither is possible. OSError: the system cannot load it.
    """
    try:
        for _ in range(30):  # other processes may evict its file before it is opened, even several times
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(library_file(data)))
        return ctypes.CDLL(str(library_file(data)))
    except (BuildError, OSError):
        return _in_memory(data)


@functools.cache
def _in_memory(data: bytes) -> ctypes.CDLL:
    """Load a shared library from an anonymous file. The file stays open: the system knows a library by its path, which
    is the number of the open file. OSError: the system cannot load it."""
    number = os.memfd_create("polydyn", os.MFD_CLOEXEC)
    with open(number, "wb", closefd=False) as f:
        f.write(data)
    return ctypes.CDLL(f"/proc/self/fd/{number}")

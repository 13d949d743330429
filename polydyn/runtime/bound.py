"""A call on fixed arrays, repeated at the cost of one call into C. Standard library and numpy only."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polydyn.errors import InputError
from polydyn.runtime.mapped import MappedFile

_forks = 0
"""Forks between the first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class BoundCall:
    """``Program.run`` on the arrays given to ``Program.bind``: names, shapes, strides and memory are checked once.

    Calling it reads the inputs as they are then, overwrites ``outputs`` (name -> array) and returns them. One call runs
    at a time; other threads wait. A signal handler may call it too. After a fork the child has a context of its own. It
    keeps the arrays, the program and a context (its arena included) for as long as it lives.
    """

    __slots__ = ("__weakref__", "_check", "_file", "_forks", "_keep", "_lock", "_renew", "_run", "outputs")

    def __init__(
        self, run: Callable[[], int], check: Callable[[int], None], keep: object, outputs: dict[str, Any],
        renew: Callable[[], Callable[[], int]] | None = None, file: MappedFile | None = None,
    ) -> None:  # fmt: skip
        """``run``: the call, in a context that nobody else uses; ``check``: of its error code; ``keep``: the arrays.

        ``renew``: returns ``run`` in a new context, for a child process: a thread of the parent may have been calling.
        ``file``: see ``Artifact.file``.
        """
        self._run, self._check, self._keep, self._renew, self._file = run, check, keep, renew, file
        self._lock, self._forks = threading.RLock(), _forks
        self.outputs = outputs

    def __copy__(self) -> BoundCall:
        return self  # its context goes back to the program with the first that goes

    def __deepcopy__(self, memo: object) -> BoundCall:
        return self

    def __call__(self) -> dict[str, Any]:
        """Computes once more. InputError: an index tensor now holds an index outside its axis. ArtifactError: the file
        of the program was overwritten.
        """
        if self._forks != _forks:
            self._after_fork()
        if self._file is not None:
            self._file.check()
        with self._lock:
            code = self._run()
        if code:
            self._check(code)
        return self.outputs

    def _after_fork(self) -> None:
        """In the child: a lock that no thread of the parent holds, and a context that none of them uses."""
        self._lock = threading.RLock()
        if self._renew is not None:
            self._run = self._renew()
        self._forks = _forks


def refuse_conversions(names: list[str], feeds: Mapping[str, Any], addresses: list[int]) -> None:
    """InputError for an input whose memory is not what the program would read: later calls would not see changes."""
    for name, address in zip(names, addresses, strict=True):
        given = feeds[name]
        if not isinstance(given, np.ndarray) or given.__array_interface__["data"][0] != address:
            raise InputError(
                f"input '{name}' cannot be bound: it would have to be converted or copied first",
                tensor=name,
                remedy="bind an aligned numpy array of the input's dtype, or use run()",
            )

"""Repeated calls on fixed arrays, each at the cost of one call into C. Standard library and numpy only."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from polydyn.errors import InputError, WrongTypeError
from polydyn.runtime.mapped import MappedFile

_forks = 0
"""Number of forks between the first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class BoundCall:
    """``Program.run`` on the arrays given to ``Program.bind``: names, shapes, strides and memory are checked once.

    A call reads the current inputs, overwrites ``outputs`` (name -> array) and returns them. Calls run one at a time;
    other threads wait. A signal handler may call it too. After a fork the child has its own context. The object keeps
    the arrays, the program and a context (including its arena) alive.
    """

    __slots__ = ("__weakref__", "_check", "_file", "_forks", "_keep", "_lock", "_renew", "_run", "outputs")

    def __init__(
        self, run: Callable[[], int], check: Callable[[int], None], keep: object, outputs: dict[str, Any],
        renew: Callable[[], Callable[[], int]] | None = None, file: MappedFile | None = None,
    ) -> None:  # fmt: skip
        """``run``: the call, in a context used only here; ``check``: raises the error of a code; ``keep``: the arrays.

        ``renew``: returns ``run`` in a new context, for a child process, because a thread of the parent may have been
        in a call. ``file``: see ``Artifact.file``.
        """
        self._run, self._check, self._keep, self._renew, self._file = run, check, keep, renew, file
        self._lock, self._forks = threading.RLock(), _forks
        self.outputs = outputs

    def __repr__(self) -> str:
        return f"<BoundCall: outputs {', '.join(self.outputs)}>"

    def __copy__(self) -> BoundCall:
        return self  # the first object that is freed returns the context to the program

    def __deepcopy__(self, memo: object) -> BoundCall:
        return self

    def __reduce__(self) -> NoReturn:
        raise WrongTypeError(
            "a bound call cannot be pickled: it holds addresses of this process", rule="pickle",
            remedy="bind again in the other process, to a program that polydyn.load opens",
        )  # fmt: skip

    def __call__(self) -> dict[str, Any]:
        """Compute once more. InputError: an index tensor now has an index outside its axis. ArtifactError: the file of
        the program was overwritten.
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
        """In a child process: replace the lock and context, which the threads of the parent may hold."""
        self._lock = threading.RLock()
        if self._renew is not None:
            self._run = self._renew()
        self._forks = _forks


def wrong_output(name: str, dtype: object, shape: tuple[int, ...]) -> InputError:
    """Return the error of an array in ``out`` that is not of the dtype and shape of this call."""
    needed = f"an array of {dtype} and shape {shape}"
    remedy = f"pass numpy.empty({shape}, {str(dtype)!r}), or leave the output out"
    return InputError(f"out['{name}'] must be {needed} in this call", tensor=name, remedy=remedy)


def wrong_memory(name: str) -> InputError:
    """Return the error of an array in ``out`` that cannot be written to as it is."""
    remedy = "pass an array that numpy.empty returned, not a view or a read-only array"
    return InputError(f"out['{name}'] must be C-contiguous, aligned and writeable", tensor=name, remedy=remedy)


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return the value of an input as an array. InputError: numpy cannot convert it."""
    try:
        return np.asarray(value)
    except Exception as e:  # any exception of the value's __array__
        raise InputError(f"input '{name}' is not an array: {e}", tensor=name, remedy="pass a numpy array") from e


def reject_conversions(names: list[str], feeds: Mapping[str, Any], addresses: list[int]) -> None:
    """Raise InputError for an input that the program cannot read in place, because later calls would miss changes."""
    for name, address in zip(names, addresses, strict=True):
        value = feeds[name]
        if not isinstance(value, np.ndarray) or value.__array_interface__["data"][0] != address:
            raise InputError(
                f"input '{name}' cannot be bound: it would have to be converted or copied first",
                tensor=name,
                remedy="bind an aligned numpy array of the input's dtype, or use run()",
            )

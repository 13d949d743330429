"""Texts and maps around a program of numbers: inputs are encoded before a call, results decoded after it.

``manifest["host"]`` (``graph/texts.py``): ``words``, a text for each number; ``inputs``, the names of text inputs;
``outputs``, a name -> ``{"texts": 1}`` or ``{"maps": keys}``. The C interface takes and returns the numbers. Standard
library and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from polydyn.arguments import checked_feeds, checked_out
from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.bound import BoundCall, as_array
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.program import Array, Program
from polydyn.runtime.spans import Span
from polydyn.runtime.tables import Table

TEXTS = "texts"


class Words:
    """The numbers of texts. In each call, texts that are not in the model get the next free numbers."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.numbers = {w: k for k, w in enumerate(words)}

    def encode(self, name: str, value: Any, others: dict[str, int]) -> Array:
        """Return an array of texts as int64 of the same shape. ``others``: further texts of the call; new ones are
        added.

        As in ONNX Runtime, bytes are UTF-8, and other elements of an object array are converted by ``str``. InputError:
        an array of numbers.
        """
        array = as_array(name, value)
        if array.dtype.kind not in "OUST" and array.size:
            raise InputError(
                f"input '{name}' is {array.dtype}, the program takes texts", tensor=name,
                remedy="convert it: array.astype(object)",
            )  # fmt: skip
        try:
            texts = [t.decode() for t in array.flat] if array.dtype.kind == "S" else list(map(str, array.flat))
        except UnicodeDecodeError as e:
            raise InputError(f"input '{name}' has bytes that are not UTF-8: {e}", tensor=name) from e
        known, count = self.numbers, len(self.words)
        codes = (n if (n := known.get(t)) is not None else others.setdefault(t, count + len(others)) for t in texts)
        return np.fromiter(codes, np.int64, array.size).reshape(array.shape)

    def decode(self, numbers: Array, others: dict[str, int]) -> Array:
        """Return an object array with the texts of numbers."""
        every = np.empty(len(self.words) + len(others), object)
        every[:] = [*self.words, *others]
        return every[numbers]


def maps(name: str, scores: Array, keys: list[Any]) -> list[dict[Any, float]]:
    """Return a map from keys to scores for each row, with sorted keys. InputError: wrong number of columns."""
    rows = scores.reshape(1, -1) if scores.ndim == 1 else scores
    if rows.shape[1] != len(keys):
        message = f"'{name}' has {rows.shape[1]} scores for {len(keys)} classes"
        raise InputError(message, tensor=name, rule="one score for each key")
    order = sorted(dict.fromkeys(keys))
    return [{k: scored[k] for k in order} for row in rows.tolist() for scored in [dict(zip(keys, row, strict=True))]]


class WithTexts(Program):
    """Base class in front of a program class, for programs with texts or maps."""

    @property
    def _host(self) -> Mapping[str, Any]:
        host: Mapping[str, Any] = self.manifest["host"]
        return host

    @property
    def _words(self) -> Words:
        if "words" not in self.__dict__:
            self.__dict__["words"] = Words(self._host["words"])
        words: Words = self.__dict__["words"]
        return words

    def _encoded(self, feeds: Mapping[str, Any], others: dict[str, int]) -> dict[str, Any]:
        typed = self._host["inputs"]
        return {n: self._words.encode(n, v, others) if n in typed else v for n, v in checked_feeds(feeds).items()}

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Any]:
        """Implement ``Program.run``; texts are object arrays (inputs may be ``str`` or bytes arrays), maps a list of
        dicts.

        InputError also: ``out`` names an output of texts or maps.
        """
        kinds, others = self._host["outputs"], dict[str, int]()
        if odd := sorted(kinds.keys() & checked_out(out).keys()):
            raise InputError(f"output '{odd[0]}' has no numbers to write into an array", tensor=odd[0])
        results: dict[str, Any] = dict(super().run(self._encoded(feeds, others), out))
        for name, kind in kinds.items():
            numbers = results[name] if isinstance(results[name], np.ndarray) else results[name].numpy()
            decoded = self._words.decode(numbers, others) if TEXTS in kind else maps(name, numbers, kind["maps"])
            results[name] = decoded
        return results

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> BoundCall:
        """Raise UnsupportedError, because texts and maps are converted in every call."""
        raise UnsupportedError("a program with texts or maps has no bound calls", rule="bind", remedy="use run()")

    def profile(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[LaunchTime]:  # fmt: skip
        """Implement ``Program.profile``, without the conversions."""
        return super().profile(self._encoded(feeds, {}), repeats, out)

    def trace(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[Span]:  # fmt: skip
        """Implement ``Program.trace``, without the conversions."""
        return super().trace(self._encoded(feeds, {}), repeats, out)

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """Implement ``Program.arguments``, with the types that a caller sees."""
        kinds = self._host["outputs"] if kind == "outputs" else {name: {TEXTS: 1} for name in self._host["inputs"]}
        return [_as_caller_sees(a, kinds[a["name"]]) if a["name"] in kinds else a for a in super().arguments(kind)]


def _as_caller_sees(argument: dict[str, Any], kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return an argument with the type that a caller sees."""
    if TEXTS in kind:
        return argument | {"dtype": "string"}
    key = "string" if any(isinstance(k, str) for k in kind["maps"]) else "int64"
    return argument | {"dtype": f"seq(map({key},tensor(float)))", "shape": []}


_KINDS: dict[type[Program], Callable[..., Program]] = {}


def with_texts(kind: type[Program]) -> Callable[..., Program]:
    """Return a subclass of ``kind`` for programs with texts."""
    if kind not in _KINDS:
        _KINDS[kind] = cast(Callable[..., Program], type(f"{kind.__name__}WithTexts", (WithTexts, kind), {}))
    return _KINDS[kind]

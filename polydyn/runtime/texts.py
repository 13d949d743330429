"""Texts and maps around a program of numbers: inputs encoded before a call, results decoded after it.

``manifest["host"]`` (``graph/texts.py``): ``words``, a text for each number; ``inputs``, the names of inputs of texts;
``outputs``, a name -> ``{"texts": 1}`` or ``{"maps": keys}``. From C the program takes and gives the numbers.
Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.bound import BoundCall
from polydyn.runtime.program import Array, LaunchTime, Program
from polydyn.runtime.spans import Span

TEXTS = "texts"


class Words:
    """The numbers of texts. In one call, texts that the model does not name get the numbers after its own."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.numbers = {w: k for k, w in enumerate(words)}

    def encode(self, name: str, value: Any, others: dict[str, int]) -> Array:
        """An array of texts as int64 of its shape. ``others``: the further texts of the call, which grow.

        As in ONNX Runtime, bytes are UTF-8, and other objects in an array of objects count as ``str`` gives them.
        InputError: an array of numbers.
        """
        array = np.asarray(value)
        if array.dtype.kind not in "OUST" and array.size:
            raise InputError(
                f"input '{name}' is {array.dtype}, the program takes texts", tensor=name,
                remedy="convert it: array.astype(object)",
            )  # fmt: skip
        try:
            texts = [t.decode() for t in array.flat] if array.dtype.kind == "S" else list(map(str, array.flat))
        except UnicodeDecodeError as e:
            raise InputError(f"input '{name}' has bytes that are no UTF-8: {e}", tensor=name) from e
        known, count = self.numbers, len(self.words)
        found = (n if (n := known.get(t)) is not None else others.setdefault(t, count + len(others)) for t in texts)
        return np.fromiter(found, np.int64, array.size).reshape(array.shape)

    def decode(self, numbers: Array, others: dict[str, int]) -> Array:
        """An array of objects with the texts of numbers."""
        every = np.empty(len(self.words) + len(others), object)
        every[:] = [*self.words, *others]
        return every[numbers]


def maps(name: str, scores: Array, keys: list[Any]) -> list[dict[Any, float]]:
    """A map from keys to scores for each row, keys in order. InputError: another number of columns."""
    rows = scores.reshape(1, -1) if scores.ndim == 1 else scores
    if rows.shape[1] != len(keys):
        why = f"'{name}' has {rows.shape[1]} scores for {len(keys)} classes"
        raise InputError(why, tensor=name, rule="one score for each key")
    order = sorted(dict.fromkeys(keys))
    return [{k: found[k] for k in order} for row in rows.tolist() for found in [dict(zip(keys, row, strict=True))]]


class WithTexts(Program):
    """What a program with texts or maps does differently; a class in front of the one that computes."""

    @property
    def _host(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.manifest["host"]
        return found

    @property
    def _words(self) -> Words:
        if "words" not in self.__dict__:
            self.__dict__["words"] = Words(self._host["words"])
        found: Words = self.__dict__["words"]
        return found

    def _encoded(self, feeds: Mapping[str, Any], others: dict[str, int]) -> dict[str, Any]:
        typed = self._host["inputs"]
        return {n: self._words.encode(n, v, others) if n in typed else v for n, v in feeds.items()}

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Any]:
        """As ``Program.run``; texts are arrays of objects (inputs: of ``str`` or bytes too), maps a list of dicts.

        InputError also: ``out`` names an output of texts or maps.
        """
        kinds, others = self._host["outputs"], dict[str, int]()
        if odd := sorted(kinds.keys() & (out or {}).keys()):
            raise InputError(f"output '{odd[0]}' has no numbers to write into an array", tensor=odd[0])
        results: dict[str, Any] = dict(super().run(self._encoded(feeds, others), out))
        for name, kind in kinds.items():
            numbers = results[name] if isinstance(results[name], np.ndarray) else results[name].numpy()
            found = self._words.decode(numbers, others) if TEXTS in kind else maps(name, numbers, kind["maps"])
            results[name] = found
        return results

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> BoundCall:
        """UnsupportedError: texts and maps are converted in every call."""
        raise UnsupportedError("a program with texts or maps has no bound calls", rule="bind", remedy="use run()")

    def profile(self, feeds: Mapping[str, Any], repeats: int = 5) -> list[LaunchTime]:
        """As ``Program.profile``, without the conversions."""
        return super().profile(self._encoded(feeds, {}), repeats)

    def trace(self, feeds: Mapping[str, Any], repeats: int = 5) -> list[Span]:
        """As ``Program.trace``, without the conversions."""
        return super().trace(self._encoded(feeds, {}), repeats)

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """As ``Program.arguments``, with the types that a caller sees."""
        kinds = self._host["outputs"] if kind == "outputs" else {name: {TEXTS: 1} for name in self._host["inputs"]}
        return [_seen(a, kinds[a["name"]]) if a["name"] in kinds else a for a in super().arguments(kind)]


def _seen(argument: dict[str, Any], kind: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller sees of an argument."""
    if TEXTS in kind:
        return argument | {"dtype": "string"}
    key = "string" if any(isinstance(k, str) for k in kind["maps"]) else "int64"
    return argument | {"dtype": f"seq(map({key},tensor(float)))", "shape": []}


_KINDS: dict[type[Program], Callable[..., Program]] = {}


def with_texts(kind: type[Program]) -> Callable[..., Program]:
    """The class of a program with texts that computes as the class ``kind`` does."""
    if kind not in _KINDS:
        _KINDS[kind] = cast(Callable[..., Program], type(f"{kind.__name__}WithTexts", (WithTexts, kind), {}))
    return _KINDS[kind]

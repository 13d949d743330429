"""What the C run time reads of a program of several parts, decoded from its words, as ``runtime/c/frame.c`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PART, PYTHON, BRANCH, ITERATE = range(4)
"""Kinds of stages; all others are single steps of the host."""
SYMBOL, WITH_VALUE = 2, (1, 2)
"""Words of an expression: one that names a symbol; those that have a value behind them."""


@dataclass(frozen=True)
class BodyWords:
    """A model that a step runs. ``formals``: which inputs of it; ``captured``: pairs of an input of it and one of the
    step; ``sizes``: inputs that bring a size; ``results``: outputs, and inputs that it hands on (-1, -2, ...);
    ``direct``: whether it writes each result to its place.
    """

    model: int
    formals: tuple[int, ...]
    captured: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    results: tuple[int, ...]
    direct: tuple[bool, ...]


@dataclass(frozen=True)
class LoopWords:
    """``counts``: it has a number and a condition; ``plain``: no result is copied. ``carried``: whether each grows in
    place, which row it is too (-1: none), whether it stays. ``rows`` and ``slices``: axis, whether backwards.
    """

    body: BodyWords
    counts: bool
    plain: bool
    carried: tuple[tuple[bool, int, bool], ...]
    rows: tuple[tuple[int, bool], ...]
    slices: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class StageWords:
    """``inputs``, ``made``: tensors by number (-1: none); ``reads``: symbols of its sizes; ``says``: those it gives."""

    kind: int
    inputs: tuple[int, ...]
    made: tuple[int, ...]
    reads: frozenset[int]
    says: tuple[int, ...]
    model: int = -1
    loop: LoopWords | None = None
    branches: tuple[BodyWords, ...] = ()


@dataclass(frozen=True)
class FrameWords:
    """``rooms``: of each tensor (-1: none); ``results``: which go to memory of the caller's; ``constants``: which are;
    ``outputs``: the tensors that outputs are; ``given``: symbols that inputs show.
    """

    rooms: tuple[int, ...]
    results: tuple[bool, ...]
    constants: tuple[bool, ...]
    inputs: int
    outputs: tuple[int, ...]
    given: frozenset[int]
    stages: tuple[StageWords, ...]


def frame_words(words: Sequence[int]) -> FrameWords:
    """The words of a program of several parts."""
    return _Reader(iter(words)).frame()


class _Reader:
    def __init__(self, words: Iterator[int]) -> None:
        self.words = words

    def take(self) -> int:
        return int(next(self.words))

    def numbers(self) -> tuple[int, ...]:
        return tuple(self.take() for _ in range(self.take()))

    def expression(self) -> frozenset[int]:
        """Its symbols."""
        found, words = set[int](), iter(self.numbers())
        for w in words:
            if w in WITH_VALUE:
                value = next(words)
                found |= {value} if w == SYMBOL else set()
        return frozenset(found)

    def ios(self) -> list[int]:
        """The ranks of inputs or outputs."""
        return [(self.numbers(), self.numbers(), self.take(), self.take())[3] for _ in range(self.take())]

    def frame(self) -> FrameWords:
        self.numbers()
        models, _ = self.take(), self.take()
        for _ in range(4 * models + 2):
            self.take()
        inputs = len(self.ios())
        self.numbers()
        outputs = []
        for rank in self.ios():
            outputs.append(self.take())
            for _ in range(rank):
                self.expression()
        tensors = [self.tensor() for _ in range(self.take())]
        self.take(), self.take()
        given = frozenset([(self.take(), self.take(), self.take())[2] for _ in range(self.take())])
        for _ in range(self.take()):
            self.take(), self.take(), self.expression(), self.numbers(), self.numbers()
        for _ in range(self.take()):
            self.take(), self.expression(), self.expression(), self.numbers(), self.numbers()
        self.take()
        stages = tuple(self.stage() for _ in range(self.take()))
        rooms, results, constants = zip(*tensors, strict=True)
        return FrameWords(rooms, results, constants, inputs, tuple(outputs), given, stages)

    def tensor(self) -> tuple[int, bool, bool]:
        """Its room, whether it is a result, and whether it is a constant."""
        _, room, result, _, constant = (self.take() for _ in range(5))
        if constant >= 0:
            self.numbers()
        return room, bool(result), constant >= 0

    def stage(self) -> StageWords:
        kind, _ = self.take(), self.take()
        self.numbers(), self.numbers(), self.numbers()
        inputs, made, says = self.numbers(), self.numbers(), self.numbers()
        reads = frozenset[int]().union(*(self.expression() for _ in range(self.take())))
        stage = (kind, inputs, made, reads, says)
        if kind == PART:
            return StageWords(*stage, model=self.take())
        if kind == ITERATE:
            return StageWords(*stage, loop=self.loop())
        return StageWords(*stage, branches=(self.body(), self.body()) if kind == BRANCH else ())

    def body(self) -> BodyWords:
        model, formals = self.take(), self.numbers()
        captured, sizes, results, direct = (self.numbers() for _ in range(4))
        return BodyWords(model, formals, _pairs(captured), sizes[::2], results, tuple(map(bool, direct)))

    def loop(self) -> LoopWords:
        body = self.body()
        counts, plain, _ = (self.take() for _ in range(3))
        self.numbers()
        forms, rows = self.numbers(), []
        for _ in range(self.take()):
            _, axis, back = (self.take() for _ in range(3))
            for _ in range(self.take()):
                self.expression()
            rows.append((axis, bool(back)))
        carried = tuple((bool(a), r, bool(s)) for a, r, s in zip(forms[::3], forms[1::3], forms[2::3], strict=True))
        slices = tuple((a, bool(b)) for a, b in _pairs(self.numbers()))
        return LoopWords(body, bool(counts), bool(plain), carried, tuple(rows), slices)


def _pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))

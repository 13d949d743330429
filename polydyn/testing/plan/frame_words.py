"""Decode the frame of a program of several parts from its words, as the C run time does in ``runtime/c/frame.c``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PART, PYTHON, BRANCH, ITERATE = range(4)
"""Kinds of stages. All other kinds are single host steps."""
SYMBOL, WITH_VALUE = 2, (1, 2)
"""Words of an expression: the tag of a symbol, and the tags that a value follows."""


@dataclass(frozen=True)
class BodyWords:
    """A model that a step runs. ``formals``: input numbers of the formals; ``captured``: pairs (input of the model,
    input of the step); ``sizes``: inputs that supply a size; ``results``: output numbers, or -1 - k for an input k that
    is passed through; ``direct``: whether the model writes a result directly to its destination.
    """

    model: int
    formals: tuple[int, ...]
    captured: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    results: tuple[int, ...]
    direct: tuple[bool, ...]


@dataclass(frozen=True)
class LoopWords:
    """A loop. ``counts``: it has a trip count and a condition; ``plain``: no result is copied. ``carried``: for each
    tensor, whether it grows in place, its row output or -1, and whether it is constant. ``rows`` and ``slices``: (axis,
    whether backwards).
    """

    body: BodyWords
    counts: bool
    plain: bool
    carried: tuple[tuple[bool, int, bool], ...]
    rows: tuple[tuple[int, bool], ...]
    slices: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class StageWords:
    """A stage. ``inputs``, ``made``: tensor numbers (-1: absent); ``reads``, ``says``: size symbols it uses, sets."""

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
    """A decoded frame. ``rooms``: room of each tensor or -1; ``results``: whether a tensor is stored in the caller's
    memory; ``constants``: whether it is a constant; ``outputs``: tensor number of each output; ``given``: symbols known
    from inputs.
    """

    rooms: tuple[int, ...]
    results: tuple[bool, ...]
    constants: tuple[bool, ...]
    inputs: int
    outputs: tuple[int, ...]
    given: frozenset[int]
    stages: tuple[StageWords, ...]


def frame_words(words: Sequence[int]) -> FrameWords:
    """Decode the words of a program of several parts."""
    return _Reader(iter(words)).frame()


class _Reader:
    def __init__(self, words: Iterator[int]) -> None:
        self.words = words

    def take(self) -> int:
        return int(next(self.words))

    def numbers(self) -> tuple[int, ...]:
        return tuple(self.take() for _ in range(self.take()))

    def expression(self) -> frozenset[int]:
        """Return the symbols of an expression."""
        found, words = set[int](), iter(self.numbers())
        for w in words:
            if w in WITH_VALUE:
                value = next(words)
                found |= {value} if w == SYMBOL else set()
        return frozenset(found)

    def ios(self) -> list[int]:
        """Return the ranks of inputs or outputs."""
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
        """Return (room, is a result, is a constant) of a tensor."""
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

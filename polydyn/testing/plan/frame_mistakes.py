"""Mistakes in what C reads of a program of several parts: rooms, the order of stages, the forms of loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeAlias

from polydyn.testing.plan.frame_words import BodyWords, FrameWords, LoopWords, StageWords
from polydyn.testing.plan.framed import Framed
from polydyn.testing.plan.mistakes import Places, mistake

FrameMistake: TypeAlias = Callable[[Framed, Random], "tuple[str, Framed] | None"]


def _with(made: Framed, **changes: Any) -> Framed:
    return replace(made, words=replace(made.words, **changes))


def _with_stage(made: Framed, k: int, stage: StageWords) -> Framed:
    return _with(made, stages=tuple(stage if j == k else s for j, s in enumerate(made.words.stages)))


def _changed(values: tuple[Any, ...], k: int, value: Any) -> tuple[Any, ...]:
    return (*values[:k], value, *values[k + 1 :])


def _lives(words: FrameWords) -> dict[int, tuple[int, int]]:
    """Of each tensor the stages from the one that makes it to the last one that reads it; outputs stay."""
    out: dict[int, tuple[int, int]] = {}
    for k, s in enumerate(words.stages):
        out |= dict.fromkeys(s.made, (k, k))
        out |= {t: (out[t][0], k) for t in s.inputs if t in out}
    return out | {t: (out[t][0], len(words.stages)) for t in words.outputs if t in out}


# -- rooms and stages ------------------------------------------------------------------------------------------------


@mistake
def shared_room(made: Framed) -> Places[Framed]:
    """Two tensors that are there at the same time have one room."""
    words, lives = made.words, _lives(made.words)
    for a, b in ((a, b) for a in lives for b in lives if a != b and words.rooms[a] != words.rooms[b]):
        together = lives[a][0] <= lives[b][0] <= lives[a][1] or lives[b][0] <= lives[a][0] <= lives[b][1]
        read = lives[a][1] > lives[a][0] and lives[b][1] > lives[b][0]
        if together and read and min(words.rooms[a], words.rooms[b]) >= 0:
            what = f"{made.names[b]} in the room of {made.names[a]}"
            yield what, partial(_with, made, rooms=_changed(words.rooms, b, words.rooms[a]))


@mistake
def step_before_its_producer(made: Framed) -> Places[Framed]:
    """A stage runs in front of the one that makes what it reads, or that says a size."""
    stages = made.words.stages
    for k in range(1, len(stages)):
        if {*stages[k - 1].made} & {*stages[k].inputs} or {*stages[k - 1].says} & stages[k].reads:
            swapped = (*stages[: k - 1], stages[k], stages[k - 1], *stages[k + 1 :])
            order = (*made.order[: k - 1], made.order[k], made.order[k - 1], *made.order[k + 1 :])
            yield f"stage {k} before {k - 1}", partial(replace, _with(made, stages=swapped), order=order)


@mistake
def other_input(made: Framed) -> Places[Framed]:
    """A stage reads another tensor."""
    for k, s in enumerate(made.words.stages):
        there = {*range(made.words.inputs), *(t for x in made.words.stages[:k] for t in x.made)}
        for i, t in enumerate(s.inputs):
            for other in sorted(there - {t}) if t >= 0 else ():
                what = f"stage {k} reads {made.names[other]} instead of {made.names[t]}"
                yield what, partial(_with_stage, made, k, replace(s, inputs=_changed(s.inputs, i, other)))


@mistake
def other_output(made: Framed) -> Places[Framed]:
    """The caller gets another tensor."""
    for o, t in enumerate(made.words.outputs):
        for other in (x for s in made.words.stages for x in s.made if x != t):
            what = f"the caller gets {made.names[other]} as {made.names[t]}"
            yield what, partial(_with, made, outputs=_changed(made.words.outputs, o, other))


# -- loops -----------------------------------------------------------------------------------------------------------


def _loops(made: Framed) -> Iterator[tuple[int, StageWords, LoopWords]]:
    return ((k, s, s.loop) for k, s in enumerate(made.words.stages) if s.loop is not None)


def _with_loop(made: Framed, k: int, **changes: Any) -> Framed:
    s = made.words.stages[k]
    assert s.loop is not None
    return _with_stage(made, k, replace(s, loop=replace(s.loop, **changes)))


def _with_form(made: Framed, k: int, j: int, form: tuple[bool, int, bool]) -> Framed:
    s = made.words.stages[k]
    assert s.loop is not None
    return _with_loop(made, k, carried=_changed(s.loop.carried, j, form))


@mistake
def in_place_too_early(made: Framed) -> Places[Framed]:
    """What a loop carries is written where it lies, though the body does not only add to its end."""
    for k, _, loop in _loops(made):
        for j, (in_place, row, stays) in enumerate(loop.carried):
            direct = loop.body.direct[int(loop.counts) + j]  # what is copied is copied behind the body
            if direct and not in_place and row < 0 and not stays:
                yield f"loop {k}: {j} in place", partial(_with_form, made, k, j, (True, row, stays))


@mistake
def stays_though_it_changes(made: Framed) -> Places[Framed]:
    """What a loop carries is taken to be the same after each turn."""
    for k, _, loop in _loops(made):
        for j, (in_place, _, stays) in enumerate(loop.carried):
            if not stays:
                yield f"loop {k}: {j} stays", partial(_with_form, made, k, j, (in_place, -1, True))


@mistake
def other_row(made: Framed) -> Places[Framed]:
    """What a loop carries is taken to be another row, or is no longer read from its row."""
    for k, _, loop in _loops(made):
        for j, (in_place, row, stays) in enumerate(loop.carried):
            for other in range(-1, len(loop.rows)):
                own = loop.body.results[int(loop.counts) + j]
                first = int(loop.counts) + len(loop.carried)
                if other not in (row, -1) and not stays and loop.body.results[first + other] != own:
                    yield f"loop {k}: {j} is row {other}", partial(_with_form, made, k, j, (in_place, other, stays))


@mistake
def turned_rows(made: Framed) -> Places[Framed]:
    """Rows, or slices, are taken from the other end."""
    for k, _, loop in _loops(made):
        for which in ("rows", "slices"):
            forms = getattr(loop, which)
            for r, (axis, back) in enumerate(forms):
                turned = _changed(forms, r, (axis, not back))
                yield f"loop {k}: {which} {r} turned", partial(_with_loop, made, k, **{which: turned})


def _bodies(made: Framed) -> Iterator[tuple[int, BodyWords, Callable[[BodyWords], Framed]]]:
    """Every body with what puts another one in its place."""
    for k, s in enumerate(made.words.stages):
        if s.loop is not None:
            yield k, s.loop.body, lambda b, k=k: _with_loop(made, k, body=b)  # type: ignore[misc]
        for n, body in enumerate(s.branches):
            yield k, body, lambda b, k=k, s=s, n=n: _with_stage(  # type: ignore[misc]
                made, k, replace(s, branches=_changed(s.branches, n, b))
            )


@mistake
def swapped_results(made: Framed) -> Places[Framed]:
    """Two results of a body change places."""
    for k, body, put in _bodies(made):
        for r in range(len(body.results) - 1):
            if body.results[r] != body.results[r + 1]:
                turned = (*body.results[:r], body.results[r + 1], body.results[r], *body.results[r + 2 :])
                yield f"results {r} and {r + 1} of stage {k} swapped", partial(put, replace(body, results=turned))


@mistake
def written_nowhere(made: Framed) -> Places[Framed]:
    """A body is not told where to write a result, or is told so of one that it only hands on."""
    for k, body, put in _bodies(made):
        for r, direct in enumerate(body.direct):
            if direct or body.results[r] < 0:
                what = f"result {r} of stage {k} is {'copied' if direct else 'written'}"
                yield what, partial(put, replace(body, direct=_changed(body.direct, r, not direct)))


@mistake
def other_captured(made: Framed) -> Places[Framed]:
    """A body reads another tensor around it."""
    for k, body, put in _bodies(made):
        for c, (i, at) in enumerate(body.captured):
            for other in range(len(made.words.stages[k].inputs)):
                if made.words.stages[k].inputs[other] not in (-1, made.words.stages[k].inputs[at]):
                    captured = _changed(body.captured, c, (i, other))
                    yield f"stage {k} captures {other}, not {at}", partial(put, replace(body, captured=captured))


ON_FRAMES: tuple[FrameMistake, ...] = (
    shared_room, step_before_its_producer, other_input, other_output, in_place_too_early, stays_though_it_changes,
    other_row, turned_rows, swapped_results, written_nowhere, other_captured,
)  # fmt: skip

"""Plant mistakes in the encoded frame of a program of several parts: rooms, order of stages, forms of loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeAlias

from polydyn.testing.plan.frame_words import BodyWords, FrameWords, LoopWords, StageWords
from polydyn.testing.plan.framed import Framed
from polydyn.testing.plan.mistakes import Sites, mistake

FrameMistake: TypeAlias = Callable[[Framed, Random], "tuple[str, Framed] | None"]


def _with(framed: Framed, **changes: Any) -> Framed:
    return replace(framed, words=replace(framed.words, **changes))


def _with_stage(framed: Framed, k: int, stage: StageWords) -> Framed:
    return _with(framed, stages=tuple(stage if j == k else s for j, s in enumerate(framed.words.stages)))


def _changed(values: tuple[Any, ...], k: int, value: Any) -> tuple[Any, ...]:
    return (*values[:k], value, *values[k + 1 :])


def _lives(words: FrameWords) -> dict[int, tuple[int, int]]:
    """Return the live range of each tensor in stages. Outputs live until the end."""
    out: dict[int, tuple[int, int]] = {}
    for k, s in enumerate(words.stages):
        out |= dict.fromkeys(s.made, (k, k))
        out |= {t: (out[t][0], k) for t in s.inputs if t in out}
    return out | {t: (out[t][0], len(words.stages)) for t in words.outputs if t in out}


# -- rooms and stages ------------------------------------------------------------------------------------------------


@mistake
def shared_room(framed: Framed) -> Sites[Framed]:
    """Two tensors with overlapping live ranges share one room."""
    words, lives = framed.words, _lives(framed.words)
    for a, b in ((a, b) for a in lives for b in lives if a != b and words.rooms[a] != words.rooms[b]):
        together = lives[a][0] <= lives[b][0] <= lives[a][1] or lives[b][0] <= lives[a][0] <= lives[b][1]
        read = lives[a][1] > lives[a][0] and lives[b][1] > lives[b][0]
        if together and read and min(words.rooms[a], words.rooms[b]) >= 0:
            what = f"{framed.names[b]} in the room of {framed.names[a]}"
            yield what, partial(_with, framed, rooms=_changed(words.rooms, b, words.rooms[a]))


@mistake
def step_before_its_producer(framed: Framed) -> Sites[Framed]:
    """A stage runs before the stage that computes one of its inputs or sizes."""
    stages = framed.words.stages
    for k in range(1, len(stages)):
        if {*stages[k - 1].made} & {*stages[k].inputs} or {*stages[k - 1].says} & stages[k].reads:
            swapped = (*stages[: k - 1], stages[k], stages[k - 1], *stages[k + 1 :])
            order = (*framed.order[: k - 1], framed.order[k], framed.order[k - 1], *framed.order[k + 1 :])
            yield f"stage {k} before {k - 1}", partial(replace, _with(framed, stages=swapped), order=order)


@mistake
def other_input(framed: Framed) -> Sites[Framed]:
    """A stage reads another tensor."""
    for k, s in enumerate(framed.words.stages):
        there = {*range(framed.words.inputs), *(t for x in framed.words.stages[:k] for t in x.made)}
        for i, t in enumerate(s.inputs):
            for other in sorted(there - {t}) if t >= 0 else ():
                what = f"stage {k} reads {framed.names[other]} instead of {framed.names[t]}"
                yield what, partial(_with_stage, framed, k, replace(s, inputs=_changed(s.inputs, i, other)))


@mistake
def other_output(framed: Framed) -> Sites[Framed]:
    """The caller gets another tensor."""
    for o, t in enumerate(framed.words.outputs):
        for other in (x for s in framed.words.stages for x in s.made if x != t):
            what = f"the caller gets {framed.names[other]} as {framed.names[t]}"
            yield what, partial(_with, framed, outputs=_changed(framed.words.outputs, o, other))


# -- loops -----------------------------------------------------------------------------------------------------------


def _loops(framed: Framed) -> Iterator[tuple[int, StageWords, LoopWords]]:
    return ((k, s, s.loop) for k, s in enumerate(framed.words.stages) if s.loop is not None)


def _with_loop(framed: Framed, k: int, **changes: Any) -> Framed:
    s = framed.words.stages[k]
    assert s.loop is not None
    return _with_stage(framed, k, replace(s, loop=replace(s.loop, **changes)))


def _with_form(framed: Framed, k: int, j: int, form: tuple[bool, int, bool]) -> Framed:
    s = framed.words.stages[k]
    assert s.loop is not None
    return _with_loop(framed, k, carried=_changed(s.loop.carried, j, form))


@mistake
def in_place_too_early(framed: Framed) -> Sites[Framed]:
    """A carried tensor is updated in place, although the body does more than append to it."""
    for k, _, loop in _loops(framed):
        for j, (in_place, row, stays) in enumerate(loop.carried):
            direct = loop.body.direct[int(loop.counts) + j]  # copies are framed after the body
            if direct and not in_place and row < 0 and not stays:
                yield f"loop {k}: {j} in place", partial(_with_form, framed, k, j, (True, row, stays))


@mistake
def stays_though_it_changes(framed: Framed) -> Sites[Framed]:
    """A carried tensor is treated as constant over all iterations."""
    for k, _, loop in _loops(framed):
        for j, (in_place, _, stays) in enumerate(loop.carried):
            if not stays:
                yield f"loop {k}: {j} stays", partial(_with_form, framed, k, j, (in_place, -1, True))


@mistake
def other_row(framed: Framed) -> Sites[Framed]:
    """A carried tensor is read from the wrong row output, or no longer from its row output."""
    for k, _, loop in _loops(framed):
        for j, (in_place, row, stays) in enumerate(loop.carried):
            for other in range(-1, len(loop.rows)):
                own = loop.body.results[int(loop.counts) + j]
                first = int(loop.counts) + len(loop.carried)
                if other not in (row, -1) and not stays and loop.body.results[first + other] != own:
                    yield f"loop {k}: {j} is row {other}", partial(_with_form, framed, k, j, (in_place, other, stays))


@mistake
def turned_rows(framed: Framed) -> Sites[Framed]:
    """Rows or slices are taken in the opposite order."""
    for k, _, loop in _loops(framed):
        for which in ("rows", "slices"):
            forms = getattr(loop, which)
            for r, (axis, back) in enumerate(forms):
                turned = _changed(forms, r, (axis, not back))
                yield f"loop {k}: {which} {r} turned", partial(_with_loop, framed, k, **{which: turned})


def _bodies(framed: Framed) -> Iterator[tuple[int, BodyWords, Callable[[BodyWords], Framed]]]:
    """Yield (stage, body, function that replaces the body) for every body."""
    for k, s in enumerate(framed.words.stages):
        if s.loop is not None:
            yield k, s.loop.body, lambda b, k=k: _with_loop(framed, k, body=b)  # type: ignore[misc]
        for n, body in enumerate(s.branches):
            yield (
                k,
                body,
                lambda b, k=k, s=s, n=n: _with_stage(  # type: ignore[misc]
                    framed, k, replace(s, branches=_changed(s.branches, n, b))
                ),
            )


@mistake
def swapped_results(framed: Framed) -> Sites[Framed]:
    """Two results of a body are swapped."""
    for k, body, put in _bodies(framed):
        for r in range(len(body.results) - 1):
            if body.results[r] != body.results[r + 1]:
                turned = (*body.results[:r], body.results[r + 1], body.results[r], *body.results[r + 2 :])
                yield f"results {r} and {r + 1} of stage {k} swapped", partial(put, replace(body, results=turned))


@mistake
def written_nowhere(framed: Framed) -> Sites[Framed]:
    """A body gets no address for a result, or gets one for a result that it only passes through."""
    for k, body, put in _bodies(framed):
        for r, direct in enumerate(body.direct):
            if direct or body.results[r] < 0:
                what = f"result {r} of stage {k} is {'copied' if direct else 'written'}"
                yield what, partial(put, replace(body, direct=_changed(body.direct, r, not direct)))


@mistake
def other_captured(framed: Framed) -> Sites[Framed]:
    """A body captures the wrong outer tensor."""
    for k, body, put in _bodies(framed):
        for c, (i, at) in enumerate(body.captured):
            for other in range(len(framed.words.stages[k].inputs)):
                if framed.words.stages[k].inputs[other] not in (-1, framed.words.stages[k].inputs[at]):
                    captured = _changed(body.captured, c, (i, other))
                    yield f"stage {k} captures {other}, not {at}", partial(put, replace(body, captured=captured))


ON_FRAMES: tuple[FrameMistake, ...] = (
    shared_room, step_before_its_producer, other_input, other_output, in_place_too_early, stays_though_it_changes,
    other_row, turned_rows, swapped_results, written_nowhere, other_captured,
)  # fmt: skip

"""Measuring of calls for commands: alternating times, their spread, and the largest error of results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydyn.cli.baselines import Call
    from polydyn.runtime.program import Program


def allowed_error(program: Program) -> float:
    """Return the allowed difference of results of whole programs: a few units in the last place for 16-bit types."""
    from polydyn.verification import TOLERANCE, UNITS

    return max(TOLERANCE, *(8 * UNITS.get(o["dtype"], 0.0) for o in program.manifest["outputs"]))


def measured(
    program: Program, shapes: Sequence[dict[str, int]], calls: Mapping[str, Call], rounds: int
) -> Iterator[tuple[dict[str, int], tuple[Any, Any]]]:
    """Yield each shape with the result of ``alternating`` for inputs of ``program``."""
    from polydyn.cli.inputs import feeds_for
    from polydyn.cli.progress import working

    with working(shape_text(shapes[0]), len(shapes), measuring=True) as step:
        for shape, following in zip(shapes, [*map(shape_text, shapes[1:]), ""], strict=True):
            yield shape, alternating(calls, feeds_for(program, shape, {}), rounds)
            step(following)


def alternating(calls: Mapping[str, Call], feeds: Mapping[str, Any], rounds: int) -> tuple[Any, Any]:
    """Return the seconds of every call, and the results of the first call, which is a warm-up and not timed."""
    results = {n: call(feeds) for n, call in calls.items()}
    times: dict[str, list[float]] = {n: [] for n in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(feeds)
            times[name].append(time.perf_counter() - start)
    return times, results


def largest_error(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Return the maximum error of all outputs; infinite if their shapes differ."""
    from polydyn.verification import TOLERANCE
    from polydyn.verification import compare as compare_arrays

    return max(
        compare_arrays(n, ours[n], theirs[n], TOLERANCE).error if ours[n].shape == theirs[n].shape else float("inf")
        for n in ours
    )


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range of times relative to their median; 0 for fewer than four."""
    if len(times) < 4:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / statistics.median(times)


def shape_text(shape: Mapping[str, int]) -> str:
    """Return sizes as the command line takes them: B=1,L=8."""
    return ",".join(f"{n}={v}" for n, v in shape.items())

"""``polydyn tune``: try tiles of a model's contractions on the target, and store the best in a record file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polydyn.backends.options import Options
from polydyn.cli.group import main
from polydyn.cli.machine import CompileSettings, as_json, of_machine
from polydyn.cli.output import print_json, print_text

if TYPE_CHECKING:
    from polydyn.measure import TunedGroup

@main.command()
@click.argument("model")
@click.option("--trials", default=64, show_default=True, type=click.IntRange(1), help="Tiles to try per group.")
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--from-log", "log", help="Shapes seen in traffic: JSON of Program.shapes_seen().")
@as_json
@of_machine
def tune(model: str, trials: int, seed: int, log: str | None, as_json: bool, settings: CompileSettings) -> None:
    """Tune the kernels of MODEL on this machine, or for a CUDA device.

    For CUDA, tiles are measured if the device is present, and otherwise ranked by a model. Results are added to
    --records. If tuning is stopped, the next call continues.

    With --schedules, other numbers for the steps of these schedules are searched instead, and the file is rewritten.
    """
    if settings.schedules:
        _tune_schedules(model, trials, seed, log, as_json, settings)
        return
    from polydyn.cli.progress import tuning
    from polydyn.measure import tune as tune_model
    from polydyn.runtime.explain import text_table
    from polydyn.runtime.shapes_log import read_log

    if settings.records is None:
        raise click.UsageError("--records names no file to add to; it is created if it does not exist")
    seen = read_log(Path(log)) if log else []
    with tuning(as_json) as report:
        groups = tune_model(
            model, settings.records, target=settings.target, dims=dict(settings.dims),
            threads=settings.threads, trials=trials, seed=seed, seen=seen, options=settings.options,
            symbols=dict(settings.symbols), report=report,
        )  # fmt: skip
    if as_json:
        print_json([asdict(g) for g in groups])
        return
    strategy = "" if settings.strategy == Options.strategy else f" --strategy {settings.strategy}"
    on = ("" if settings.target == "cpu" else f" --target {settings.target}") + (" --tf32" if settings.tf32 else "")
    heading = ("group", "source", "tiles kept", "binaries", "measured now", "seconds", "gain")
    rows = [
        (g.label, g.source, str(g.tuples), str(g.binaries), str(g.measured), f"{g.seconds:.1f}", _gain(g))
        for g in groups
    ]
    print_text(text_table(heading, rows))
    for g in groups:
        if g.declined:
            print_text(f"{g.label} is not tuned: {g.declined}")
    if any(g.source == "model" for g in groups):
        print_text(f"no {settings.target} device is present: an analytical model ranked the tiles")
    print_text(f"compile with --records {settings.records}{strategy}{on}")


def _tune_schedules(
    model: str, trials: int, seed: int, log: str | None, as_json: bool, settings: CompileSettings
) -> None:
    """Search the numbers of schedules, file by file."""
    from polydyn.explore.handmade import save_schedules
    from polydyn.explore.tuning import tune_schedules
    from polydyn.runtime.shapes_log import read_log

    if settings.records is not None:
        raise click.UsageError("--schedules searches schedules, --records tiles: give one of them")
    seen = read_log(Path(log)) if log else []
    for path in settings.schedules:
        found = tune_schedules(
            model, path, dict(settings.dims), trials, seed, seen, settings.options, settings.target
        )
        save_schedules(path, *(x.best for x in found))
        rows = [{"label": x.best.group.label, "candidates": x.candidates, "timed": len(x.trials), "gain": x.gain}
                for x in found]  # fmt: skip
        if as_json:
            print_json(rows)
            continue
        for x in found:
            timed = f"{len(x.trials)} of {x.candidates} timed"
            print_text(f"{x.best.group.label}: {timed}, {x.gain:.2f} times as fast as before")
            print_text(f"timed at {', '.join(map(str, x.sizes))}")
            print_text(str(x.best))
        print_text(f"compile with --schedules {path}")


def _gain(g: TunedGroup) -> str:
    """Return the text of the gain over the kernel without tuning."""
    from polydyn.search.outcomes import MIN_GAIN

    if g.gain is None:
        return "-"
    return f"{g.gain:.2f}" if g.gain >= MIN_GAIN else f"{g.gain:.2f}, the default is kept"

"""``polydyn batch``: offline jobs on Dask, their status, their report."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydyn.cli.group import main
from polydyn.cli.machine import DIFFERENT, as_json
from polydyn.cli.output import answer, print_text, terminal
from polydyn.errors import InputError
from polydyn.runtime.tables import counted

if TYPE_CHECKING:
    from polydyn.jobs.ledger import Attempt, Ledger
    from polydyn.jobs.run import State, Step


class Batches(click.Group):
    """A group in which ``batch FILE`` means ``batch run FILE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``run`` if no command is named."""
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@main.group("batch", cls=Batches)
def batch() -> None:
    """Offline jobs from a YAML or JSON file: ``polydyn batch jobs.yaml -j 4``.

    A killed worker costs one attempt. After a killed batch, the next call continues.
    """


JOBS = click.argument("jobs", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@batch.command()
@JOBS
@click.option("-j", "workers", default=1, show_default=True, type=click.IntRange(1, 256), help="Local workers.")
@click.option("--scheduler", metavar="tcp://HOST:PORT", help="The address of a Dask scheduler to use instead.")
@click.option("--files", type=click.Choice(("content", "path")), default="content", show_default=True,
              help="How files reach the workers of a scheduler: by content, or by paths that they share.")  # fmt: skip
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Run jobs whose output, records, model or target matches, as in 'bert*' or cuda; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and why a step cannot begin. Nothing runs.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Also write this JUnit XML file.")
@as_json
def run(
    jobs: Path, workers: int, scheduler: str | None, files: str, only: tuple[str, ...], dry_run: bool,
    junit: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Run the jobs of a file, except finished ones; exit code 3 if a job failed."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from polydyn.jobs.run import Batch

    if dry_run:
        _show_plan(Batch(jobs, only=only).plan(), as_json)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal(), transient=True, disable=as_json or not terminal().is_terminal) as bar:
        line = bar.add_task("starting workers", total=None, left="")

        def say(text: str, state: State) -> None:
            left = "" if state.left is None else f"about {state.left:.0f} s left"
            bar.update(line, total=state.steps, completed=state.ended, description="jobs", left=left)
            if not as_json:
                print_text(text)

        result = Batch(jobs, workers, scheduler, files == "path", say, only).run()
    if junit is not None:
        _write(jobs, junit)
    s = result.state
    counts = {"steps": s.steps, "done": s.done, "skipped": s.skipped, "failed": s.failed}
    summary = f"{counted(s.steps, 'step')}: {s.done} done, {s.skipped} done before, {s.failed} failed; {result.report}"
    answer(as_json, counts | {"report": str(result.report)}, summary)
    sys.exit(DIFFERENT if s.failed else 0)


def _show_plan(planned: list[tuple[Step, str]], as_json: bool) -> None:
    """Print what ``run`` would do; exit code 3 if a step cannot begin."""
    from polydyn.runtime.explain import text_table

    rows = [(s.name, s.kind, s.job.arguments.target, what) for s, what in planned]
    counts = Counter(what.partition(",")[0].partition(" (")[0] for _, what in planned)
    names = ("step", "kind", "target", "state")
    answer(
        as_json, {"steps": [dict(zip(names, r, strict=True)) for r in rows]}, text_table(names, rows),
        f"{counted(len(rows), 'step')}: {', '.join(f'{n} {what}' for what, n in counts.items())}",
    )  # fmt: skip
    sys.exit(DIFFERENT if "cannot begin" in counts else 0)


@batch.command()
@JOBS
@as_json
def status(jobs: Path, as_json: bool) -> None:
    """Show the latest attempt of every step in the ledger of a job file."""
    from polydyn.jobs.ledger import failures_first, latest, matrix
    from polydyn.runtime.explain import text_table

    ledger = _ledger(jobs)
    final, attempts = latest(ledger.attempts()), ledger.attempts()
    runs, steps = ledger.runs(), ledger.steps()
    ledger.close()
    heading = ("step", "outcome", "attempts", "seconds", "what")
    tried = {job: sum(a.job == job for a in attempts) for job in final}
    rows = [
        (job, a.outcome, str(tried[job]), f"{a.facts.get('seconds', 0.0):.1f}", a.error.partition("\n")[0])
        for job, a in failures_first(final)
    ]
    targets, models = matrix(steps, final)
    table = [text_table(("model", *targets), [(m, *o) for m, o in models])] if len(targets) > 1 else []
    done = sum(a.outcome == "done" for a in final.values())
    answer(
        as_json, {"runs": len(runs), "steps": [_plain(a) for a in final.values()]}, text_table(heading, rows), *table,
        f"{len(final)} steps begun, {done} done, {len(attempts)} attempts in {len(runs)} runs",
    )  # fmt: skip


@batch.command()
@JOBS
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
              help="The HTML file; JUnit XML if it ends in .xml.")  # fmt: skip
@as_json
def report(jobs: Path, output: Path, as_json: bool) -> None:
    """Write the report of the last run as one HTML page, or as JUnit XML."""
    _write(jobs, output)
    answer(as_json, {"output": str(output)}, str(output))


def _write(jobs: Path, output: Path) -> None:
    """Write the report of the last run; the form follows from the suffix. UnwritableError: the file is not writable."""
    from polydyn.build.cache import writable
    from polydyn.jobs.junit import write_junit
    from polydyn.jobs.report import write_report

    ledger = _ledger(jobs)
    with closing(ledger), writable(output):
        (write_junit if output.suffix == ".xml" else write_report)(ledger, jobs.name, output)


def _ledger(jobs: Path) -> Ledger:
    from polydyn.jobs.ledger import Ledger, folder_of

    path = folder_of(jobs) / "ledger.db"
    if not path.exists():
        raise InputError(f"{jobs.name} was never run", rule="batch status", remedy=f"polydyn batch {jobs.name}")
    return Ledger.open(path)


def _plain(a: Attempt) -> dict[str, Any]:
    return {"step": a.job, "outcome": a.outcome, "error": a.error, "facts": dict(a.facts), "attempt": a.number}

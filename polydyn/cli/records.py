"""``polydyn records``: show, merge, copy and prune record files."""

from __future__ import annotations

from collections import Counter

import click

from polydyn.cli.group import main
from polydyn.cli.machine import as_json
from polydyn.cli.output import answer
from polydyn.errors import InputError
from polydyn.runtime.explain import text_table
from polydyn.search.records import Records


@main.group("records")
def records() -> None:
    """The record files of ``polydyn tune``."""


@records.command()
@click.argument("file")
@as_json
def show(file: str, as_json: bool) -> None:
    """Show machines, groups and the number of records of each kind in FILE."""
    with Records.open(file, readonly=True) as opened:
        rows, digest = opened.rows(), opened.digest()
    counts = Counter((r.hardware.name, r.group.digest, r.kind, r.source) for r in rows)
    names = ("hardware", "group", "kind", "source")
    data = [dict(zip(names, k, strict=True)) | {"count": n} for k, n in sorted(counts.items())]
    heading = ("machine", "group", "kind", "source", "records")
    answer(
        as_json, {"digest": digest, "records": len(rows), "counts": data},
        text_table(heading, [(*k, str(n)) for k, n in sorted(counts.items())]),
        f"{len(rows)} records of {len({r.group.digest for r in rows})} groups, content {digest}",
    )  # fmt: skip


@records.command()
@click.argument("target")
@click.argument("sources", nargs=-1, required=True)
@as_json
def merge(target: str, sources: tuple[str, ...], as_json: bool) -> None:
    """Add all records of SOURCES to TARGET, which is created if it does not exist. Equal records count once."""
    for source in sources:
        with Records.open(source, readonly=True):
            pass  # check that all sources are readable before anything is written
    with Records.open(target) as opened:
        new = {source: opened.merge(source) for source in sources}
    answer(as_json, {"target": target, "new": new}, *(f"{s}: {count} new records" for s, count in new.items()))


@records.command()
@click.argument("file")
@click.argument("copy")
@as_json
def export(file: str, copy: str, as_json: bool) -> None:
    """Write all records of FILE to a new file COPY, in an order that depends only on their content."""
    with Records.open(file, readonly=True) as opened:
        rows = opened.rows()
        opened.export(copy, rows)
    answer(as_json, {"copy": copy, "records": len(rows)}, f"{copy}: {len(rows)} records")


@records.command()
@click.argument("file")
@click.argument("copy")
@click.option("--kind", "kinds", multiple=True, help="Keep this kind, as in search (the kind that compilation reads).")
@click.option("--machine", "machines", multiple=True, help="Keep the records of this machine.")
@as_json
def prune(file: str, copy: str, kinds: tuple[str, ...], machines: tuple[str, ...], as_json: bool) -> None:
    """Write the selected records of FILE to a new file COPY; FILE does not change."""
    if not kinds and not machines:
        raise InputError("no records are selected", rule="records prune", remedy="give --kind or --machine")
    with Records.open(file, readonly=True) as opened:
        rows = opened.rows()
        known = {r.kind for r in rows} | {r.hardware.name for r in rows}
        unknown = [x for x in (*kinds, *machines) if x not in known]
        if unknown:
            raise InputError(f"{file} has nothing of {unknown[0]}", remedy=f"it has {', '.join(sorted(known))}")
        selected = [r for r in rows if (not kinds or r.kind in kinds) and (not machines or r.hardware.name in machines)]
        opened.export(copy, selected)
    facts = {"copy": copy, "records": len(selected), "of": len(rows)}
    answer(as_json, facts, f"{copy}: {len(selected)} of {len(rows)} records")

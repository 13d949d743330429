"""``polydyn cache``: the contents of the cache of compiled code."""

from __future__ import annotations

import time

import click

from polydyn.build.cache import cache_root
from polydyn.build.eviction import KINDS, cache_limit, clear, entries
from polydyn.cli.group import main
from polydyn.cli.machine import as_json
from polydyn.cli.output import answer
from polydyn.runtime.explain import text_table


@main.command()
@click.option("--clear", "emptied", is_flag=True, help="Delete the cache. Kernels are compiled again when needed.")
@as_json
def cache(emptied: bool, as_json: bool) -> None:
    """Show the cache of compiled code: its folder, its size and its entries by kind.

    POLYDYN_CACHE names the folder, POLYDYN_CACHE_LIMIT its maximum size (as in 500M; 4G by default). If the cache is
    larger, the least recently used entries are deleted, except those used within the last minute.
    """
    root, limit = cache_root(), cache_limit()
    if emptied:
        removed = clear(root)
        size = sum(e.bytes for e in removed)
        facts = {"folder": str(root), "removed": len(removed), "bytes": size}
        answer(as_json, facts, f"{root}: removed {_amount(len(removed), size)}")
        return
    rows, now = [], time.time_ns()
    total = files = 0
    for kind, description in KINDS.items():
        cached = list(entries(root, kind))
        size = sum(e.bytes for e in cached)
        oldest = f"{(now - min(e.used for e in cached)) / 86_400e9:.1f}" if cached else "-"
        rows.append((kind, description, str(len(cached)), f"{size / 1e6:.1f}", oldest))
        total, files = total + size, files + len(cached)
    kinds = {r[0]: {"entries": int(r[2]), "megabytes": float(r[3])} for r in rows}
    answer(
        as_json, {"folder": str(root), "limit_bytes": limit, "entries": files, "bytes": total, "kinds": kinds},
        f"{root}: {_amount(files, total)}, at most {limit / 1e6:g} MB\n",
        text_table(("kind", "", "entries", "MB", "days unused, at most"), rows),
    )  # fmt: skip


def _amount(count: int, size: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}, {size / 1e6:.1f} MB"

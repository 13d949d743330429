"""The report of a batch: one self-contained HTML page with plots and logs."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path

from polydyn.build.cache import write_atomically
from polydyn.jobs.ledger import DONE, Attempt, Ledger, latest

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #1c2330; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top }
th { border-bottom: 2px solid #c7cedb } tr + tr td { border-top: 1px solid #e6e9f0 } td.n { text-align: right }
.done { color: #17603a } .failed, .died, .timeout, .memory, .lost, .interrupted { color: #a1260d }
pre { background: #f4f6fa; padding: .6rem; overflow-x: auto; max-height: 24rem } small { color: #5b6577 }
svg text { font: 11px system-ui, sans-serif; fill: #1c2330 } .bars rect { fill: #5377c2 } .bars .bad { fill: #c2573f }
"""
WIDTH, ROW = 900, 18
MAX_ATTEMPTS_SHOWN = 400
"""Maximum number of attempts in the timeline."""


def write_report(ledger: Ledger, name: str, path: Path) -> None:
    """Write the report of the last run of a ledger. OSError: the file cannot be written."""
    runs = ledger.runs()
    if not runs:
        return
    number, began, ended, version, workers = runs[-1]
    attempts = ledger.attempts()
    now = [a for a in attempts if a.run == number]
    before = latest(a for a in attempts if a.run < number and a.outcome in (DONE, "gone"))
    final = latest(now)
    counts = {o: sum(a.outcome == o for a in final.values()) for o in {a.outcome for a in final.values()}}
    summary = ", ".join(f"{n} {o}" for o, n in sorted(counts.items())) or "nothing was left to do"
    end = "unfinished" if ended is None else f"{ended - began:.0f} s"
    parts = [
        f"<h1>{html.escape(name)}</h1><p>Run {number}, {_date(began)}, {end}, polydyn {version}, workers: "
        f"{html.escape(workers)}.<br>Steps of this run: {summary}; {len(now)} attempts.</p>",
        f"<h2>Time of each attempt</h2>{timeline(now, began)}",
        f"<h2>Steps</h2>{_table(final, before)}",
        f"<h2>Logs</h2>{''.join(map(_log, now))}",
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}</title><style>{STYLE}</style>"
    write_atomically(path, (head + "".join(parts) + "</html>\n").encode())


def timeline(attempts: Sequence[Attempt], began: float) -> str:
    """Draw attempts as SVG bars over the time of the run; only the last ``MAX_ATTEMPTS_SHOWN`` of them."""
    shown = list(attempts)[-MAX_ATTEMPTS_SHOWN:]
    if not shown:
        return "<p>none</p>"
    span = max((a.ended or a.began) for a in shown) - began or 1.0
    rows = []
    for k, a in enumerate(shown):
        left = 300 + (WIDTH - 320) * (a.began - began) / span
        wide = max((WIDTH - 320) * ((a.ended or a.began) - a.began) / span, 2.0)
        kind = "" if a.outcome == DONE else " class=bad"
        label = html.escape(a.job if len(a.job) <= 44 else f"…{a.job[-43:]}")
        title = html.escape(f"{a.job}: {a.outcome}, {(a.ended or a.began) - a.began:.1f} s, attempt {a.number}")
        rows.append(
            f"<g><title>{title}</title><text x=0 y={k * ROW + 13}>{label}</text>"
            f"<rect{kind} x={left:.1f} y={k * ROW + 3} width={wide:.1f} height={ROW - 6} rx=2 /></g>"
        )
    axis = len(shown) * ROW + 14
    rows.append(f"<text x=300 y={axis}>0 s</text><text x={WIDTH - 60} y={axis}>{span:.0f} s</text>")
    return f'<svg class=bars viewBox="0 0 {WIDTH} {axis + 6}" width=100%>{"".join(rows)}</svg>'


def _table(final: dict[str, Attempt], before: dict[str, Attempt]) -> str:
    head = "step,outcome,attempts,seconds,peak MB,result,last run"
    rows = [f"<tr>{''.join(f'<th>{h}' for h in head.split(','))}"]
    for job, a in sorted(final.items()):
        f = a.facts
        cells = [
            f"<td>{html.escape(job)}", f'<td class="{a.outcome}">{a.outcome}', f"<td class=n>{a.number}",
            f"<td class=n>{f.get('seconds', 0.0):.1f}", f"<td class=n>{f.get('peak_bytes', 0) / 1e6:.0f}",
            f"<td>{html.escape(a.error.partition(chr(10))[0]) if a.error else _result(a)}",
            f"<td>{_compared(a, before.get(job))}",
        ]  # fmt: skip
        rows.append(f"<tr>{''.join(cells)}")
    return f"<table>{''.join(rows)}</table>"


def _result(a: Attempt) -> str:
    f = a.facts
    if "groups" in f:
        return f"{f['groups']} groups, {f['measured']} measured ({', '.join(f['sources'])})"
    if "launches" in f:
        return f"{f['launches']} launches of {f['kernels']} kernels, {f['artifact_bytes'] / 1e6:.2f} MB"
    return ""


def _compared(a: Attempt, b: Attempt | None) -> str:
    """Return what changed since the step was last done."""
    if b is None:
        return "<small>first time</small>"
    old, new = b.facts.get("seconds") or 0.0, a.facts.get("seconds") or 0.0
    parts = [f"{old:.1f} s then ({new / old:.2f} times)" if old and new else f"{old:.1f} s then"]
    for name in ("launches", "kernels", "artifact_bytes", "groups", "measured"):
        x, y = b.facts.get(name), a.facts.get(name)
        if x is not None and y is not None and x != y:
            parts.append(f"{name.replace('_', ' ')} {x} before, {y} now")
    return f"<small>{html.escape(', '.join(parts))}</small>"


def _log(a: Attempt) -> str:
    text = "\n".join(filter(None, (a.error, a.log)))
    if not text:
        return ""
    heading = html.escape(f"{a.job}, attempt {a.number}: {a.outcome} on {a.worker or 'no worker'}")
    return f"<details><summary>{heading}</summary><pre>{html.escape(text)}</pre></details>"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

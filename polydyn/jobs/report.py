"""The report of a batch: one self-contained HTML page with plots and logs."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Sequence
from pathlib import Path

from polydyn.build.cache import write_atomically
from polydyn.jobs.ledger import DONE, Attempt, Ledger, failures_first, latest, matrix

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --line: #c7cedb; --soft: #5b6577; --bad: #a1260d; --good: #17603a }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ee; --line: #454d5c; --soft: #9aa4b5; --bad: #ff9a85; --good: #7fd0a3 }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: var(--ink); padding: 0 1rem }
.wide { overflow-x: auto } td { overflow-wrap: anywhere; min-width: 4rem } th { cursor: pointer }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top }
th { border-bottom: 2px solid var(--line) } tr + tr td { border-top: 1px solid var(--line) } td.n { text-align: right }
.done { color: var(--good) } .failed, .died, .timeout, .memory, .lost, .interrupted { color: var(--bad) }
pre { border: 1px solid var(--line); padding: .6rem; overflow-x: auto; max-height: 24rem } small { color: var(--soft) }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink) }
.bars rect { fill: #5377c2 } .bars .bad { fill: #c2573f }
"""
SCRIPT = """
const box = document.querySelector('input'), rows = [...document.querySelectorAll('tbody tr')]
box.oninput = () => rows.forEach(r => r.hidden = !r.textContent.includes(box.value))
document.querySelectorAll('th').forEach(h => h.onclick = () => {
  const body = h.closest('table').tBodies[0], own = [...body.rows], k = h.cellIndex
  const text = r => r.cells[k].textContent, up = h.dataset.up = h.dataset.up == '1' ? '' : '1'
  own.sort((a, b) => (up ? 1 : -1) * text(a).localeCompare(text(b), undefined, {numeric: true}))
  own.forEach(r => body.append(r))
})
"""
"""Filters the table of steps by text, and sorts it by a column."""
WIDTH, ROW = 900, 18
LABEL = 44
"""Maximum characters of a label in the timeline."""
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
        f"{_matrix(ledger, attempts)}<h2>Steps</h2><input type=search placeholder=filter>{_table(final, before)}",
        f"<h2>Logs</h2>{''.join(map(_log, now))}",
    ]
    head = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(name)}</title><style>{STYLE}</style>"
    )
    write_atomically(path, f"{head}{''.join(parts)}<script>{SCRIPT}</script></html>\n".encode())


def timeline(attempts: Sequence[Attempt], began: float) -> str:
    """Draw attempts as SVG bars over the time of the run; only the last ``MAX_ATTEMPTS_SHOWN`` of them."""
    shown = list(attempts)[-MAX_ATTEMPTS_SHOWN:]
    if not shown:
        return "<p>none</p>"
    names = _short([a.job for a in shown])
    span = max((a.ended or a.began) for a in shown) - began or 1.0
    rows = []
    for k, a in enumerate(shown):
        left = 300 + (WIDTH - 320) * (a.began - began) / span
        wide = max((WIDTH - 320) * ((a.ended or a.began) - a.began) / span, 2.0)
        kind = "" if a.outcome == DONE else " class=bad"
        label = html.escape(names[k])
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
    rows = [f"<thead><tr>{''.join(f'<th>{h}' for h in head.split(','))}</thead><tbody>"]
    for job, a in failures_first(final):
        f = a.facts
        cells = [
            f"<td>{html.escape(job)}", f'<td class="{a.outcome}">{a.outcome}', f"<td class=n>{a.number}",
            f"<td class=n>{f.get('seconds', 0.0):.1f}", f"<td class=n>{f.get('peak_bytes', 0) / 1e6:.0f}",
            f"<td>{html.escape(a.error.partition(chr(10))[0]) if a.error else _result(a)}",
            f"<td>{_compared(a, before.get(job))}",
        ]  # fmt: skip
        rows.append(f"<tr>{''.join(cells)}")
    return f"<div class=wide><table>{''.join(rows)}</tbody></table></div>"


def _matrix(ledger: Ledger, attempts: Sequence[Attempt]) -> str:
    """Return the outcomes as a table of models and targets, if there are several of both."""
    targets, rows = matrix(ledger.steps(), latest(attempts))
    if len(targets) < 2 or len(rows) < 2:
        return ""
    head = "".join(f"<th>{html.escape(t)}" for t in ("model", *targets))
    lines = [
        f"<tr><td>{html.escape(model)}" + "".join(f'<td class="{o}">{html.escape(o)}' for o in outcomes)
        for model, outcomes in rows
    ]
    return (f"<h2>Models and targets</h2><div class=wide><table class=matrix><thead><tr>{head}</tr></thead><tbody>"
            f"{''.join(lines)}</tbody></table></div>")  # fmt: skip


def _short(names: Sequence[str]) -> list[str]:
    """Return names of at most ``LABEL`` characters without the folders that all share; long ones lose their middle."""
    shared = os.path.commonpath(names) if len({*names}) > 1 and not any(map(os.path.isabs, names)) else ""
    cut = [n[len(shared) + 1 :] if shared else n for n in names]
    half = (LABEL - 1) // 2
    return [n if len(n) <= LABEL else f"{n[:half]}…{n[-half:]}" for n in cut]


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

"""A program at a shape as a self-contained HTML page: kernels, choices, times, roofline, memory, sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from polydyn.explore.pictures.calls import roofline, timeline
from polydyn.explore.pictures.colours import safe, si
from polydyn.runtime.explain import Explanation
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.program import Program
from polydyn.runtime.spans import Span
from polydyn.search.hardware import Hardware, Instruction

STYLE = """
:root{color-scheme:light dark} body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
table{border-collapse:collapse;width:100%} th,td{text-align:left;padding:.25rem .6rem;vertical-align:top}
th{border-bottom:2px solid #8b919c} tr+tr td{border-top:1px solid #8b919c55} td.n{text-align:right;white-space:nowrap}
pre{background:#8b919c1a;padding:.6rem;overflow-x:auto;max-height:30rem} code,td:first-child{overflow-wrap:anywhere}
summary{cursor:pointer} .k{white-space:nowrap}
"""


def limits(peak: float, bandwidth: float, threads: int) -> Hardware:
    """Describe a machine by two totals over all threads: operations and bytes of memory per second."""
    fma = Instruction("given", "vector", "float32", (1, 1, 1), peak / threads)
    return Hardware("a machine with the given limits", "cpu", threads, 1 << 20, 1 << 20, bandwidth * 8 / threads,
                    bandwidth, 32, 32, 16, (fma,))  # fmt: skip


def explain_page(
    program: Program, report: Explanation, times: Sequence[LaunchTime] | None = None,
    spans: Sequence[Span] | None = None, hardware: Hardware | None = None,
) -> str:  # fmt: skip
    """Return the page. ``times`` and ``spans``: ``program.profile`` and ``program.trace`` at the shape of ``report``.
    The timeline needs ``spans``, the roofline ``times`` and ``hardware``.
    """
    m = program.manifest
    title = str(report).partition("\n")[0]
    parts = [f"<h1>{_text(m['name'] or 'model')}</h1><p>{_text(title)}.<br>polydyn {_text(m['polydyn'])}, target "
             f"{_text(m['target'])}, weights {program.weight_bytes / 1e6:.2f} MB.</p>"]  # fmt: skip
    if spans is not None:
        parts.append(f"<h2>Where the time goes</h2>{timeline(report, spans)._repr_html_()}")
    if times and hardware is not None:
        parts.append(f"<h2>Roofline</h2>{roofline(report, times, hardware)._repr_html_()}")
    parts += [f"<h2>Launches</h2>{_launches(report, times)}", f"<h2>What a call must meet</h2>{_demands(m)}"]
    parts.append(f"<h2>Memory plan</h2>{_memory(m)}")
    if m["notes"]:
        parts.append(f"<h2>Notes</h2><ul>{''.join(f'<li>{_text(n)}' for n in m['notes'])}</ul>")
    parts.append(f"<h2>Sources</h2>{_sources(program.sources)}")
    meta = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head = f"<!doctype html><html lang=en>{meta}<title>{_text(title)}</title><style>{STYLE}</style>"
    return f"{head}{''.join(parts)}</html>\n"


def _text(x: object) -> str:
    return escape(safe(str(x)))


def _table(heading: Iterable[str], rows: Iterable[str]) -> str:
    return f"<table><tr>{''.join(f'<th>{_text(h)}' for h in heading)}{''.join(rows)}</table>"


def _launches(report: Explanation, times: Sequence[LaunchTime] | None) -> str:
    rows = []
    for k, x in enumerate(report.launches):
        spent = f"{times[k].nanoseconds / 1e3:.1f}" if times else ""
        choices = " ".join(f"{n}={v}" for n, v in x.choices.items())
        why = "\n".join((*x.reasons, *x.selection))
        numbers = (x.wave, x.tasks, x.threads if x.tasks else "skipped", si(x.flops), si(x.bytes), spent)
        cells = "".join(f"<td class=n>{_text(n)}" for n in numbers)
        label = f"<details><summary>{_text(x.label)}</summary><pre>{_text(why)}</pre></details>"
        kernel = f"<code class=k>{_text(x.kernel)}</code><br><small>{_text(choices)}</small>"
        rows.append(f"<tr><td>{label}<td>{kernel}{cells}")
    return _table(("launch (why)", "kernel", "wave", "tasks", "threads", "FLOP", "bytes", "µs"), rows)


def _demands(m: Mapping[str, Any]) -> str:
    lines = [f"{s['symbol']} is axis {s['axis']} of {s['input']}" for s in m["symbols"]]
    lines += [f"{g['rule']}: {g['message']}" for g in m["guards"]]
    lines += [f"{c['rule']}: {c['message']}" for c in m["index_checks"]]
    return f"<ul>{''.join(f'<li>{_text(x)}' for x in lines)}</ul>" if lines else "<p>nothing</p>"


def _memory(m: Mapping[str, Any]) -> str:
    rows = [f"<tr><td class=n>{k}<td>{' → '.join(f'<code>{_text(t)}</code>' for t in tenants)}"
            for k, tenants in enumerate(m.get("memory", ()))]  # fmt: skip
    return _table(("slot", "buffers that lie there one after the other"), rows) if rows else "<p>no buffers between</p>"


def _sources(sources: Mapping[str, str]) -> str:
    generated = {n: t for n, t in sources.items() if n.startswith(("kernels", "host")) or n.endswith(".cu")}
    return "".join(f"<details><summary>{_text(n)}, {len(t.splitlines())} lines</summary><pre>{_text(t)}</pre></details>"
                   for n, t in sorted(generated.items()))  # fmt: skip

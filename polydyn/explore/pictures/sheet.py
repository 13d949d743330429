"""A sheet of SVG, 900 units wide, with a theme for light and dark pages, text cut by character count, and arrows.

A picture is self-contained: no script, no network, no plotting package. Text widths are overestimated; text that does
not fit is cut, and the tooltip has all of it. Ids are global in a page, so they contain a hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from html import escape
from math import ceil
from pathlib import Path

from polydyn.build.cache import writable, write_atomically
from polydyn.errors import InputError
from polydyn.explore.pictures.colours import GREY, safe

MONO, SANS = 0.61, 0.55
"""Widths of a character in em."""
WIDTH = 900

STYLE = """<style>
.pd{--fg0:#1b1e24;--bg0:#fff}
@media (prefers-color-scheme:dark){.pd{--fg0:#e6e8ec;--bg0:#15171c}}
.pd{--fg:var(--jp-content-font-color0,var(--vscode-editor-foreground,var(--fg0)));
--bg:var(--jp-layout-color0,var(--vscode-editor-background,var(--bg0)));color:var(--fg);
width:100%;max-width:1150px;height:auto;font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
.pd text{fill:var(--fg)}
.pd .m{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.pd .s{fill-opacity:.72}.pd .b{font-weight:650}
.pd .l{stroke:var(--fg);fill:none}.pd .g{stroke:var(--fg);stroke-opacity:.13;fill:none}.pd .bg{fill:var(--bg)}
.pd .h:hover{opacity:.75}
</style>"""


@dataclass(frozen=True)
class Picture:
    """A drawing with a title: notebooks show it through ``_repr_html_``, ``svg`` is its text, ``save`` writes a file.

    ``folded``: (heading, picture or preformatted text) pairs, shown below it and initially closed.
    """

    title: str
    svg: str
    folded: tuple[tuple[str, Picture | str], ...] = ()

    def __str__(self) -> str:
        return self.title

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def _repr_html_(self) -> str:
        parts = [self.svg]
        for heading, content in self.folded:
            inner = content._repr_html_() if isinstance(content, Picture) else f"<pre>{escape(safe(content))}</pre>"
            parts.append(f"<details><summary>{escape(safe(heading))}</summary>{inner}</details>")
        return "".join(parts)

    def save(self, path: str | Path) -> None:
        """Write ``.svg`` (only the drawing) or ``.html`` (with the folded parts). InputError: another suffix, or the
        file cannot be written.
        """
        p = Path(path)
        if p.suffix not in (".svg", ".html"):
            raise InputError(f"{p.name} is not a picture file", rule="Picture.save", remedy="end it in .svg or .html")
        meta = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
        page = f"<!doctype html>{meta}<title>{escape(safe(self.title))}</title>{self._repr_html_()}\n"
        with writable(p):
            write_atomically(p, (page if p.suffix == ".html" else self.svg + "\n").encode())


class Sheet:
    """Collects the parts of a drawing in order; ``picture()`` returns the result. Lengths are in units of the sheet."""

    def __init__(self, title: str, sub: str = "", width: int = WIDTH) -> None:
        self.title, self.width, self.height = title, width, 0.0
        self.parts: list[str] = []
        self._arrows: dict[str, str] = {}
        self._id = "pd" + sha256(f"{title}{sub}".encode()).hexdigest()[:8]
        self.text(12, 24, title, 16, "b", most=width - 24)
        if sub:
            self.text(12, 44, sub, 12, "s", most=width - 24)
        self.top = 62 if sub else 42

    def down(self, y: float) -> None:
        """Extend the sheet to at least ``y``."""
        self.height = max(self.height, y)

    def text(
        self, x: float, y: float, s: str, size: float = 12, cls: str = "", anchor: str = "start", fill: str = "",
        most: float = 0.0, tip: str = "", keep: str = "start", turn: float = 0.0,
    ) -> None:  # fmt: skip
        """Add a line of text. ``most``: maximum width; ``keep``: the part that remains if it is cut."""
        em = (MONO if "m" in cls.split() else SANS) * size
        whole, s = s, cut(s, int(most / em), keep) if most else s
        tip = tip or (whole if s != whole else "")
        style = f' style="fill:{fill}"' if fill else ""
        rotated = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
        kind = f' class="{cls}"' if cls else ""
        blanks = ' xml:space="preserve"' if "  " in s or s[:1] == " " else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{kind} text-anchor="{anchor}"{style}{rotated}{blanks}>'
            f"{_hover(tip)}{escape(safe(s))}</text>"
        )
        self.down(y + 6)

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = "none", stroke: str = "", *, r: float = 0.0,
        opacity: float = 1.0, line: float = 1.0, dash: str = "", tip: str = "", cls: str = "",
    ) -> None:  # fmt: skip
        """Add a rectangle; ``cls`` ``bg`` fills it with the page's colour."""
        kinds = " ".join(filter(None, (cls, "h" if tip else "")))
        attributes = [f'class="{kinds}"'] * bool(kinds) + [f'fill="{fill}"'] * ("bg" not in cls)
        attributes += [f'rx="{r}"'] * bool(r) + [f'fill-opacity="{opacity}"'] * (opacity != 1)
        attributes += [f'stroke="{stroke}" stroke-width="{line}"'] * bool(stroke)
        attributes += [f'stroke-dasharray="{dash}"'] * bool(dash)
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0):.1f}" height="{max(h, 0):.1f}" {" ".join(attributes)}>'
            f"{_hover(tip)}</rect>"
        )
        self.down(y + h)

    def path(
        self, d: str, stroke: str = "", line: float = 1.2, dash: str = "", opacity: float = 1.0, arrow: bool = False,
        tip: str = "", cls: str = "l",
    ) -> None:  # fmt: skip
        """Add a line given by SVG path commands."""
        style = f' style="stroke:{stroke}"' if stroke else ""
        end = f' marker-end="url(#{self._id}{self._arrow(stroke)})"' if arrow else ""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="{d}" class="{cls}" fill="none"{style} stroke-width="{line}" stroke-opacity="{opacity}"{dashed}'
            f"{end}>{_hover(tip)}</path>"
        )

    def _arrow(self, stroke: str) -> str:
        return self._arrows.setdefault(stroke, f"a{len(self._arrows)}")

    def dot(self, x: float, y: float, r: float, fill: str = GREY, tip: str = "", opacity: float = 1.0,
            stroke: str = "none", cls: str = "h") -> None:  # fmt: skip
        """Add a circle."""
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" {"" if "bg" in cls else f"fill={chr(34)}{fill}{chr(34)}"} '
            f'fill-opacity="{opacity}" stroke="{stroke}" class="{cls}">{_hover(tip)}</circle>'
        )
        self.down(y + r)

    def legend(self, x: float, y: float, entries: list[tuple[str, str]], size: float = 12) -> float:
        """Add colours with labels in a row; return the end."""
        for colour, label in entries:
            self.rect(x, y - 9, 11, 11, colour, colour, r=2, opacity=0.85)
            self.text(x + 16, y, label, size, "s")
            x += 16 + len(label) * size * SANS + 16
        return x

    def picture(self, folded: tuple[tuple[str, Picture | str], ...] = ()) -> Picture:
        """Return the drawing."""
        marks = "".join(
            f'<marker id="{self._id}{n}" viewBox="0 0 8 8" refX="7.4" refY="4" markerUnits="userSpaceOnUse" '
            f'markerWidth="10" markerHeight="10" orient="auto-start-reverse">'
            f'<path d="M0,0.6L8,4L0,7.4z" style="fill:{c or "var(--fg)"}"/></marker>'
            for c, n in self._arrows.items()
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="pd" viewBox="0 0 {self.width} {ceil(self.height + 10)}"'
        label = escape(safe(self.title))
        svg = f'{head} role="img" aria-label="{label}">{STYLE}<defs>{marks}</defs>{"".join(self.parts)}</svg>'
        return Picture(self.title, svg, folded)


def cut(s: str, most: int, keep: str = "start") -> str:
    """Return at most ``most`` characters of a text: its start, its end or both."""
    if len(s) <= most:
        return s
    if keep == "end":
        return "…" + s[len(s) - max(most, 1) + 1 :] if most > 1 else "…"
    if keep == "both":
        half = max(most - 1, 0) // 2
        return s[: max(most - 1, 0) - half] + "…" + s[len(s) - half :]
    return s[: max(most - 1, 0)] + "…"


def _hover(tip: str) -> str:
    return f"<title>{escape(safe(tip))}</title>" if tip else ""

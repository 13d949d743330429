"""Colours and number formats: hues of groups and statements, a colour scale, sizes with k and M, ceilings."""

from __future__ import annotations

import re
from collections.abc import Iterable

from polydyn.schedules.names import given_back

GREY, RED, ORANGE, DARK = "#8b919c", "#e0524d", "#d9622b", "#0d0f12"
KIND = {"contract": "#3d8fe0", "attention": "#a36bec", "nest": "#22a884", "copy": GREY}
"""The hue of each kind of group."""
HUES = ("#3d8fe0", "#e09b2d", "#d9609f", "#22a884", "#a36bec", "#d9622b", "#6fae3d", "#2fb3c4")
_SCALE = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("µ", 1e-6), ("n", 1e-9),
          ("p", 1e-12))  # fmt: skip
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def hues(names: Iterable[str]) -> dict[str, str]:
    """Return a hue for each name by its position; grey if there are more names than hues."""
    return {n: HUES[i] if i < len(HUES) else GREY for i, n in enumerate(dict.fromkeys(names))}


def scale(t: float) -> str:
    """Return a colour between dark blue at 0 and yellow at 1."""
    t = min(1.0, max(0.0, t)) * (len(_SCALE) - 1)
    i = min(int(t), len(_SCALE) - 2)
    return "#" + "".join(f"{round(a + (b - a) * (t - i)):02x}" for a, b in zip(_SCALE[i], _SCALE[i + 1], strict=True))


def ink(colour: str) -> str:
    """Return black or white, whichever is more readable on a colour."""
    return max("#111111", "#ffffff", key=lambda text: contrast(text, colour))


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours, from 1 to 21 (WCAG 2.2; text needs 4.5)."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def safe(s: str) -> str:
    """Return the text with user-visible names, without characters that XML does not allow."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", given_back(s))


def si(x: float, digits: int = 3) -> str:
    """Format a number with a unit prefix: 1500 is 1.5k."""
    for unit, f in _UNITS:
        if abs(x) >= f:
            return f"{x / f:.{digits}g}{unit}" if abs(x / f) < 999.5 else f"{x / f:.0f}{unit}"
    return "0"


def algebra(x: object) -> str:
    """Format a size: ``2*B*L`` is 2·B·L, ``((H + 1) // 2)`` is ⌈H/2⌉, twice that is ⌈H/4⌉, 100000 is 100k."""
    s, previous = str(x), ""

    def ceiling(m: re.Match[str]) -> str:
        name, inner, plus, by = m[2] or m[1], int(m[3] or 1), int(m[4]), int(m[5])
        return f"⌈{name}/{inner * by}⌉" if plus == by - 1 else m[0]

    pattern = r"\(\((?:([A-Za-z]\w*)|⌈(\w+)/(\d+)⌉) \+ (\d+)\) // (\d+)\)"
    while s != previous:
        previous, s = s, re.sub(pattern, ceiling, s)
    s = re.sub(r"\d{5,}", lambda m: si(int(m[0])), s).replace("*", "·")
    return s[1:-1] if s[:1] == "(" and s.count("(") == 1 and s[-1] == ")" else s

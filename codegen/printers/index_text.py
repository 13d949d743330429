"""Text of index expressions, for C and for CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from polydyn.schedules.index import Atom, Index
from polydyn.schedules.ranges import is_nonnegative


@dataclass(frozen=True)
class IndexText:
    """The syntax of one language for index expressions; ``{0}`` and ``{1}`` are the operands.

    ``floordiv`` is only used if the dividend may be negative; otherwise C division is floor division. ``fetch``:
    ``{0}`` is the buffer, ``{1}`` the subscript.
    """

    floordiv: str
    minimum: str
    maximum: str
    fetch: str

    @lru_cache(maxsize=65536)  # noqa: B019 (the few instances live as long as the program)
    def __call__(self, i: Index) -> str:
        """Return an expression that may occur anywhere (in parentheses if it has several parts)."""
        if not i.terms:
            return "0"
        parts = []
        for m, c in sorted(i.terms.items(), key=lambda t: (-len(t[0]), str(t[0]))):
            factors = [a if isinstance(a, str) else self._atom(a) for a in m]
            if c != 1 or not m:
                factors.insert(0, str(c) if c >= 0 else f"({c})")
            parts.append("*".join(factors))
        return parts[0] if len(parts) == 1 and "*" not in parts[0] else "(" + " + ".join(parts) + ")"

    def _atom(self, a: Atom) -> str:
        args = [self(x) for x in a.args]
        if a.kind == "floordiv":
            if all(is_nonnegative(x) for x in a.args):
                return f"({args[0]}/{args[1]})"
            return self.floordiv.format(*args)
        if a.kind == "fetch":
            return self.fetch.format(a.name, args[0])
        out = args[0]
        for x in args[1:]:
            out = (self.minimum if a.kind == "min" else self.maximum).format(out, x)
        return out

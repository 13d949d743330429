"""Which tiles of keys the kernel of an attention walks over."""

from __future__ import annotations

from polydyn.codegen.ir import Body, For, If, walk
from polydyn.codegen.pipeline import loops
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.laws.masks import Logits
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.tree.names import b


def loops_over_keys(name: str, proven: Proven, live: tuple[Condition, ...], logits: Logits) -> Body:
    """The loops over the tiles of keys that satisfy ``live``, or over all tiles where these are not one loop.

    LegalityError: a tile is left out that has a visible key.
    """
    if live:
        body = loops(name, proven.without_hidden(live, logits))
        if _walks(body):
            return body
    return loops(name, proven)


def _walks(body: Body) -> bool:
    """Whether one loop walks over the keys in every block: not so where masks leave one tile, or nothing of a head."""
    found = [n for n in walk(body) if isinstance(n, For) and n.var == b("l")]
    behind_if = any(m is x for n in walk(body) if isinstance(n, If) for m in walk((n,)) for x in found)
    return len(found) == 1 and not behind_if

"""Which tiles of keys the kernel of an attention walks over."""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.ir import Body, For, If, walk
from polydyn.codegen.pipeline import loops
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.laws.masks import Logits, check_conditions
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tiling import TiledGroup
from polydyn.schedules.tree.names import b
from polydyn.schedules.tree.scheduled import Scheduled


def loops_over_keys(name: str, schedule: Scheduled, live: tuple[Condition, ...], logits: Logits) -> Body:
    """The loops of a proven tree over the tiles that satisfy ``live``, or over all where these are not one loop.

    LegalityError: the tree does not compute its group, or a tile is left out that has a visible key.
    """
    prove(schedule)
    if live:
        check_conditions(logits, live, logits.hidden())
        body = loops(name, without_hidden(schedule.tiled(), live))
        if _walks(body):
            return body
    return loops(name, schedule.tiled())


def without_hidden(tiled: TiledGroup, live: tuple[Condition, ...]) -> TiledGroup:
    """The tree without the tiles of keys for which ``live`` does not hold: those that a mask hides."""
    statements = tuple(
        replace(s, conditions=(*s.conditions, *live)) if b("l") in s.coords else s for s in tiled.statements
    )
    coords = {k for s in tiled.statements for k in s.coords}
    symbols = dict.fromkeys(x for c in live for x in sorted(c.expr.symbols() - coords))
    params = dict.fromkeys((*tiled.params, *symbols))
    return replace(tiled, statements=statements, params=tuple(params))


def _walks(body: Body) -> bool:
    """Whether one loop walks over the keys in every block: not so where masks leave one tile, or nothing of a head."""
    found = [n for n in walk(body) if isinstance(n, For) and n.var == b("l")]
    behind_if = any(m is x for n in walk(body) if isinstance(n, If) for m in walk((n,)) for x in found)
    return len(found) == 1 and not behind_if

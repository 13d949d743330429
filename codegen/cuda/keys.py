"""The loops over tiles of keys of an attention kernel."""

from __future__ import annotations

from polydyn.codegen.ir import Body, For, If, walk
from polydyn.codegen.pipeline import loops
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.laws.masks import Logits
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.tree.names import b


def loops_over_keys(name: str, proven: Proven, live: tuple[Condition, ...], logits: Logits) -> Body:
    """Return the loops over the tiles of keys that satisfy ``live``, or over all tiles if these are not one loop.

    LegalityError: a tile with a visible key is skipped.
    """
    if live:
        body = loops(name, proven.without_hidden(live, logits))
        if _is_one_loop(body):
            return body
    return loops(name, proven)


def _is_one_loop(body: Body) -> bool:
    """Whether one loop visits the keys in every block. Masks that leave one tile, or nothing of a head, prevent it."""
    key_loops = [n for n in walk(body) if isinstance(n, For) and n.var == b("l")]
    behind_if = any(m is x for n in walk(body) if isinstance(n, If) for m in walk((n,)) for x in key_loops)
    return len(key_loops) == 1 and not behind_if

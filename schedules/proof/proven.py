"""A schedule together with its proof: only a proven schedule becomes loops.

``codegen.pipeline.loops`` takes a ``Proven`` and nothing else, so an unproven kernel cannot be printed. A method of
``Proven`` that changes the schedule also checks the change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NoReturn, final

from polydyn.clock import timed
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.laws.masks import Logits, check_conditions
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tiling import TiledGroup
from polydyn.schedules.tree.names import b
from polydyn.schedules.tree.scheduled import Scheduled

Obligation = Callable[[Scheduled], None]
"""A condition of a kernel in addition to ``prove``, for example that loops may run as vectors. LegalityError: it
fails."""


@final
class Proven:
    """A schedule that computes its group. Proving is the only way to build one.

    ``tiled``: the tree for code generation.
    """

    __slots__ = ("tiled",)
    tiled: TiledGroup

    @timed("proofs")
    def __init__(self, schedule: Scheduled, *obligations: Obligation, free: Collection[str] = ()) -> None:
        """Prove ``schedule`` (``prove``), then each obligation.

        ``free``: parameters for the trip counts that the kernel chooses, like tile sizes. LegalityError with a witness:
        the proof or an obligation fails. ScheduleError: no proof can be made.
        """
        prove(schedule)
        for obligation in obligations:
            obligation(schedule)
        tiled = schedule.tiled()
        self._set(replace(tiled, extents={n: e for n, e in tiled.extents.items() if n not in free}))

    def without_hidden(self, live: tuple[Condition, ...], logits: Logits) -> Proven:
        """Return the schedule without the tiles of keys that a mask hides, which are those outside ``live``.

        LegalityError: a tile outside ``live`` has a visible key.
        """
        check_conditions(logits, live, logits.hidden())
        t = self.tiled
        statements = tuple(
            replace(s, conditions=(*s.conditions, *live)) if b("l") in s.coords else s for s in t.statements
        )
        coords = {k for s in t.statements for k in s.coords}
        symbols = dict.fromkeys(x for c in live for x in sorted(c.expr.symbols() - coords))
        params = tuple(dict.fromkeys((*t.params, *symbols)))
        smaller = object.__new__(Proven)
        smaller._set(replace(t, statements=statements, params=params))
        return smaller

    def _set(self, tiled: TiledGroup) -> None:
        object.__setattr__(self, "tiled", tiled)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a proven schedule does not change")

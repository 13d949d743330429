"""Proofs of the trees of CPU kernels, made once for all groups with the same skeleton, as their schedules are.

Where a skeleton's proof fails the group is proven as it is.
"""

from __future__ import annotations

from functools import lru_cache

from polydyn.schedules.group.skeleton import Form
from polydyn.schedules.proof.boxes import ContractTiles, check_fill_box, check_panel_box
from polydyn.schedules.proof.footprints import check_strip
from polydyn.schedules.proof.parts import check_lanes
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.solution.reuse import Facts, Solver, attempt, dependences_of
from polydyn.schedules.tree.scheduled import Scheduled


class Proofs(Solver):
    """The schedule of one group and the proof of its tree."""

    def prove_contract(self, t: Scheduled, tiles: ContractTiles) -> None:
        """The schedule of a product computes it (``prove.prove``), and its buffers are large enough."""
        prove(t)
        if tiles.promote:
            check_panel_box(tiles)
        if tiles.strip:
            check_strip(t, tiles.strip)
        elif tiles.fill:
            check_fill_box(tiles)

    def prove_nest(self, t: Scheduled, band: tuple[str, ...], phases: dict[str, int]) -> None:
        """The schedule of an element-wise or stitch group computes it, and its vector loops carry nothing."""
        prove(t)
        s = self.skeleton
        if t.map.origins:  # vectors run along the tile, whose points are at once
            return
        if s and _lanes_hold(s.form, s.facts, band, tuple(phases.items())):
            self.reused += 1
        else:
            check_lanes(self.group, self.dependences, band, phases)


@lru_cache(maxsize=512)
def _lanes_hold(form: Form, facts: Facts, band: tuple[str, ...], phases: tuple[tuple[str, int], ...]) -> bool:
    def f() -> bool:
        check_lanes(form.group(), dependences_of(form, facts), band, dict(phases))
        return True

    return bool(attempt(f))

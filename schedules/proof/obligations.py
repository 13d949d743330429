"""Further obligations of kernels besides the proof of the schedule: buffer sizes, vector loops, row blocks.

Vector loops are checked once for all groups with the same skeleton, like schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.skeleton import Form, check_instance, skeleton
from polydyn.schedules.model import Group
from polydyn.schedules.proof.boxes import ContractTiles, check_fill_box, check_panel_box
from polydyn.schedules.proof.footprints import check_strip
from polydyn.schedules.proof.parts import check_band, check_lanes, check_rows
from polydyn.schedules.proof.proven import Obligation
from polydyn.schedules.solution.reuse import Facts, dependences_of
from polydyn.schedules.tiling import AttentionParts, unfold
from polydyn.schedules.tree.scheduled import Scheduled


def boxes(tiles: ContractTiles) -> Obligation:
    """Return the check that the buffers of a product are large enough for their copies."""

    def check(t: Scheduled) -> None:
        if tiles.promote:
            check_panel_box(tiles)
        if tiles.strip:
            check_strip(t, tiles.strip)
        elif tiles.fill:
            check_fill_box(tiles)

    return check


def vectors_inside(group: Group, band: tuple[str, ...], phases: Mapping[str, int]) -> Obligation:
    """Return the check that the innermost loops of an element-wise or stitch group may run as vectors.

    A schedule with tiles along the band has its vectors there: points of a tile are tasks, which ``prove`` covers.
    """

    def check(t: Scheduled) -> None:
        if t.map.origins:
            return
        s = skeleton(group)
        if s is not None:
            check_instance(s, group)
        if s is None or not _lanes_hold(s.form, s.facts, band, tuple(phases.items())):
            check_lanes(group, analyse(group, positive=False), band, dict(phases))

    return check


@lru_cache(maxsize=512)
def _lanes_hold(form: Form, facts: Facts, band: tuple[str, ...], phases: tuple[tuple[str, int], ...]) -> bool:
    """Whether the check succeeds for the skeleton. If it does not, a single group may still pass it."""
    try:
        check_lanes(form.group(), dependences_of(form, facts), band, dict(phases))
    except (LegalityError, ScheduleError):
        return False
    return True


def vectors_in_rows(parts: AttentionParts) -> Obligation:
    """Return the check that the loops inside the rows of an attention may run as vectors."""

    def check(t: Scheduled) -> None:
        rows = unfold(parts.rows, parts.score_roles.batch)
        check_lanes(rows, analyse(rows, positive=False), parts.row_prefix, parts.phases)

    return check


def check_row_blocks(group: Group, parts: AttentionParts) -> None:
    """Check that any partition of an attention's rows into blocks is legal.

    LegalityError: a dependence moves along the rows, or a statement reads another row.
    """
    batch, rows = parts.score_roles.batch, parts.row_prefix
    whole = unfold(group, batch, "local")
    check_band(whole, analyse(whole, positive=False), rows)
    check_rows(unfold(parts.rows, batch, "local"), rows)

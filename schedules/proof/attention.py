"""What an attention needs besides the proof of its schedule: vector loops inside rows, blocks of rows."""

from __future__ import annotations

from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.model import Group
from polydyn.schedules.proof.parts import check_band, check_lanes, check_rows
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tiling import AttentionParts, unfold
from polydyn.schedules.tree.scheduled import Scheduled


def prove_attention(t: Scheduled, parts: AttentionParts) -> None:
    """The schedule of an attention computes it, and loops inside its rows may run as vectors."""
    prove(t)
    stitch = unfold(parts.rows, parts.score_roles.batch)
    check_lanes(stitch, analyse(stitch, positive=False), parts.row_prefix, parts.phases)


def prove_row_blocks(group: Group, parts: AttentionParts) -> None:
    """Any partition of the rows into blocks is legal: no dependence moves along them, no statement reads other rows."""
    batch, rows = parts.score_roles.batch, parts.row_prefix
    whole = unfold(group, batch, "local")
    check_band(whole, analyse(whole, positive=False), rows)
    check_rows(unfold(parts.rows, batch, "local"), rows)

"""From the solved schedule matrix to the input of the trees: the shared band, phases, the steps of sunk statements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.group.dependence import Dependences, analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.model import Group
from polydyn.schedules.solution.patterns import Choice, choose
from polydyn.schedules.tiling import AttentionParts, Roles, unfold


@dataclass(frozen=True, eq=False)
class NestSchedule:
    """``band``: the iterators that all statements share, outermost; ``phases``: statement -> phase below the band."""

    band: tuple[str, ...]
    phases: dict[str, int]
    choice: Choice

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: that nothing could be fused, and why."""
        if self.band or self.choice.pattern.name != "total" or len(self.phases) == 1:
            return ()
        why = "; ".join(f"{n}: {reason}" for n, reason in self.choice.declined)
        return (f"one loop nest per statement, in the original order ({why})",)


def schedule_nest(group: Group, deps: Dependences) -> NestSchedule:
    """Return the schedule of an element-wise or stitch group.

    The band is the longest prefix of the pattern's common loops that leads the iterators of every statement. The phase
    is the matrix's phase row. ``deps`` must be those under parameters >= 1.
    """
    choice = choose(group, deps, ("stitch", "total"))
    pattern, rows = choice.pattern, {s.name: choice.solved.exprs(s.name) for s in group.statements}
    size = 0
    while size < pattern.band and all(
        s.iterators[size : size + 1] == (pattern.dims[size],) and rows[s.name][size] == Index.of(pattern.dims[size])
        for s in group.statements
    ):
        size += 1
    if "" not in pattern.dims:
        return NestSchedule(pattern.dims[:size], dict.fromkeys(rows, 0), choice)
    phase = pattern.dims.index("")
    return NestSchedule(pattern.dims[:size], {n: int(r[phase]) for n, r in rows.items()}, choice)


def schedule_contract(group: Group, roles: Roles, deps: Dependences) -> tuple[Roles, Choice]:
    """Return the roles with ``sunk`` from the solved matrix: 0 is the first step of every reduction, K-1 the last.

    ScheduleError: the group is not a contraction, the roles are not its loops, or a statement belongs to another step.
    """
    choice = choose(group, deps, ("contraction",))
    acc = next(s for s in group.statements if s.reduce)
    extents = dict(acc.iters)
    parallel = choice.pattern.dims[: choice.pattern.band]
    reduced = choice.pattern.dims[choice.pattern.band :]
    if {*roles.batch, roles.row, roles.col} != set(parallel) or (roles.block, *roles.inner) != reduced:
        raise ScheduleError(f"roles {roles} are not the loops {choice.pattern.dims} of {acc.name}", node=acc.name)
    where = group.statements.index(acc)
    sunk = []
    for n, s in enumerate(group.statements):
        if s is acc:
            continue
        steps = dict(zip(reduced, choice.solved.exprs(s.name)[choice.pattern.band :], strict=True))
        side = "first" if n < where else "last"
        if any(v != (Index.of(0) if side == "first" else extents[x] - ONE) for x, v in steps.items()):
            raise ScheduleError(f"{s.name} runs at {steps}, not at the {side} step of {acc.name}", node=s.name)
        sunk.append((s.name, side))
    return replace(roles, sunk=tuple(sunk)), choice


def attention_groups(parts: AttentionParts) -> tuple[Group, Group, Group]:
    """Return scores, rows and values as groups of their own, over all rows of all batches."""
    batch = parts.score_roles.batch
    return unfold(parts.scores, batch), unfold(parts.rows, batch), unfold(parts.values, batch)


def schedule_attention(parts: AttentionParts) -> AttentionParts:
    """Return the parts with the phases of the rows' solved matrix, and check both contractions.

    The matrix' band must be the rows. ScheduleError: a part has another schedule than an attention needs.
    """
    groups = attention_groups(parts)
    deps = [analyse(g, positive=False).under(context(g)) for g in groups]
    scores, _ = schedule_contract(groups[0], parts.score_roles, deps[0])
    values, _ = schedule_contract(groups[2], parts.value_roles, deps[2])
    rows = schedule_nest(groups[1], deps[1])
    if rows.band[: len(parts.row_prefix)] != parts.row_prefix:
        raise ScheduleError(f"the rows of an attention share {rows.band}, not {parts.row_prefix}", node=parts.rows.name)
    return replace(parts, phases=rows.phases, score_roles=scores, value_roles=values)

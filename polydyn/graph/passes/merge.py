"""GEMM merging (BladeDISC 4.3, TSCompiler 4.2 horizontal groups): contractions that share an operand become one.

``A*B, A*C`` is ``A*[B C]`` and ``A*C, B*C`` is ``[A; B]*C``, along any output axis along which the shared operand does
not run. It is read once and one kernel runs, so traffic falls by the shared operand for every member but one.
Contractions are merged only if nothing must be copied and no epilogue is lost (``join.py``). Reasons go to the graph's
notes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from polydyn.graph.ir import Compute, Graph, dim_name
from polydyn.graph.passes.join import Along, Different, Form, GraphEditor, Join, Refusal, as_contraction
from polydyn.schedules.expr import Op, loads, symbols_of

MERGED = "merged into one contraction (they share the operand {operand})"


def merge_contractions(graph: Graph) -> Graph:
    """Merge the contractions of a graph that share an operand."""
    sharing: dict[Hashable, list[Compute]] = {}
    for n in map(as_contraction, graph.nodes):
        if n is not None:
            for body in (_product(n), _flipped(n)):
                key = (body.args[0], n.reduction, len(graph.tensors[n.output].shape))
                sharing.setdefault(key, []).append(replace(n, body=body))
    editor = GraphEditor(graph)
    for members in sharing.values():
        rank = len(graph.tensors[members[0].output].shape)
        shared = _product(members[0]).args[0]
        run = symbols_of(shared)
        forms = [Along(a) for a in reversed(range(rank)) if dim_name(a) not in run]
        join_members(editor, members, forms, MERGED.format(operand=loads(shared)[0].buffer))
    return editor.finish()


def join_members(editor: GraphEditor, members: Sequence[Compute], forms: Iterable[Form], done: str) -> None:
    """Join the members that can be joined, in groups as large as possible. Note ``done``, or the reason against it."""
    refused: dict[str, dict[str, None]] = {}
    rest = [m for m in members if m.output not in editor.joined]
    while len(rest) > 1:
        best: tuple[list[Compute], Join] | None = None
        for form in forms:
            grown = _grown(editor, rest, form, refused)
            if grown is not None and (best is None or len(grown[0]) > len(best[0])):
                best = grown
        if best is not None:
            best[1].commit()
            editor.notes.append(f"{_names(m.output for m in best[0])}: {done}")
        rest = [m for m in rest[1:] if m.output not in editor.joined]
    for why, names in refused.items():
        apart = [t for t in names if t not in editor.joined]
        if apart:
            editor.notes.append(f"{_names(names)}: not merged: {why}")


def _grown(
    editor: GraphEditor, rest: Sequence[Compute], form: Form, refused: dict[str, dict[str, None]]
) -> tuple[list[Compute], Join] | None:
    """Return the first node with all others that can be joined with it."""
    group, join = [rest[0]], None
    for m in rest[1:]:
        try:
            join = Join(editor, [*group, m], form)
            group.append(m)
        except Different:
            continue
        except Refusal as e:
            refused.setdefault(str(e), {}).update({group[0].output: None, m.output: None})
    return None if join is None else (group, join)


def _product(n: Compute) -> Op:
    assert isinstance(n.body, Op)
    return n.body


def _flipped(n: Compute) -> Op:
    return replace(_product(n), args=_product(n).args[::-1])


def _names(names: Iterable[str]) -> str:
    """Return up to four names and the number of others, as text."""
    every = list(names)
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")

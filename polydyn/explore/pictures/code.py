"""The generated text next to its tree, with the statement that each line computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from polydyn.codegen.cpu.scheduled import ScheduledKernel
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.explore.pictures.sheet import Picture
from polydyn.explore.pictures.trees import Line, beside
from polydyn.schedules.expr import Op
from polydyn.schedules.model import Group
from polydyn.schedules.tree.names import Meets
from polydyn.schedules.tree.scheduled import Scheduled

DEVICE = (
    ("FRAG_A", r"\ba_frag[ \[].*=|pd_ldmatrix\w*\(a_frag"), ("FRAG_B", r"\bb_frag[ \[].*=|pd_ldmatrix\w*\(b_frag"),
    ("ACC", r"pd_(mma|wgmma)_m\w+\(|\bacc\[.*\] = .*\bacc\["), ("INIT", r"\bacc\[.*\] = "),
    ("STAGE", r"pd_sts_"), ("DONE0", r"\bout\d\[|pd_stg_|pd_ldg_"),
)  # fmt: skip
"""Maps a statement to the pattern of its lines in a CUDA product (``schedules/tree/gpu.py`` names the statements)."""


def code(t: Scheduled, target: CpuTarget, sizes: Mapping[str, int] | None = None, title: str = "") -> Picture:
    """Draw the C text of a schedule next to its tree, in the colours of statements.

    To find the statement of a line, one statement is changed at a time; its lines are those that change. Raises the
    errors of ``ScheduledKernel``.
    """
    text = ScheduledKernel("kernel", t, target, sizes).build().text
    owners = [""] * len(text.splitlines())
    for s in t.group.statements:
        other = ScheduledKernel("kernel", replace(t, group=_negated(t.group, s.name)), target, sizes).build().text
        for tag, a, b, _, _ in SequenceMatcher(None, text.splitlines(), other.splitlines(), False).get_opcodes():
            if tag != "equal":
                owners[a:b] = [s.name] * (b - a)
    for f in t.flow:  # transformations added these copies, each into its own buffer
        if f.meets is Meets.WRITES and f.statement not in {s.name for s in t.group.statements}:
            stores = re.compile(rf"\b(vstorem?\w*|PD_AT)\({re.escape(f.buffer)}, .*|\b{re.escape(f.buffer)}\[.*\] = ")
            lines = zip(owners, text.splitlines(), strict=True)
            owners = [o or (f.statement if stores.search(x) else "") for o, x in lines]
    return beside(t, _lines(text, owners), title or f"the tree and its C for {target.name}")


def listing(t: Scheduled, text: str, rules: Sequence[tuple[str, str]] = DEVICE, title: str = "") -> Picture:
    """Draw a given text next to a tree. The first rule (statement, pattern) that matches a line gives its statement.
    Copies from memory need no rule: they are the lines that copy the array of their buffer.
    """
    original, compiled = {s.name for s in t.group.statements}, [(n, re.compile(p)) for n, p in rules]
    for f in t.flow:
        if f.meets is Meets.WRITES and f.statement not in original:
            array = re.escape(t.buffer(f.buffer).array)
            compiled.append((f.statement, re.compile(rf"pd_(cp_async\w*<\d+>|tma_load\w*)\(.*\b{array}\b")))
    owners = [next((n for n, p in compiled if p.search(x)), "") for x in text.splitlines()]
    return beside(t, _lines(text, owners), title or "the tree and its text", "lines are recognised by what they call")


def _negated(group: Group, name: str) -> Group:
    """Return the group with a different value of one statement."""
    statements = tuple(
        replace(s, value=Op(s.value.dtype, "neg", (s.value,))) if s.name == name else s for s in group.statements
    )
    return replace(group, statements=statements)


def _lines(text: str, owners: Sequence[str]) -> list[Line]:
    """Return the lines with their depth, without trivial ones."""
    lines = []
    for raw, owner in zip(text.splitlines(), owners, strict=True):
        line = raw.strip()
        if line and line not in ("{", "}", "}}", "PD_UNROLL") and not line.startswith(("(void)", "//", "#")):
            lines.append(Line((len(raw) - len(raw.lstrip())) // 2, line, owner))
    return lines

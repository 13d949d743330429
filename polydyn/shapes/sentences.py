"""Conditions on sizes in words."""

from __future__ import annotations

from polydyn.schedules.index import Index

RELATIONS = {"==": "equals", "<=": "is at most", "%==": "is a multiple of"}


def bare(x: Index) -> str:
    """An expression without the parentheses around all of it."""
    text = str(x)
    return text[1:-1] if len(x.terms) > 1 and text.startswith("(") else text


def sentence(left: Index, relation: str, right: Index, words: str = "") -> str:
    """``H is a multiple of 32``; ``words``: what comes first, where the sizes have a simpler rule."""
    text = f"{bare(left)} {RELATIONS[relation]} {bare(right)}"
    return f"{words}: {text}" if words else text

"""Conditions on sizes as sentences."""

from __future__ import annotations

from polydyn.schedules.index import Index

RELATIONS = {"==": "equals", "<=": "is at most", "%==": "is a multiple of"}


def bare(x: Index) -> str:
    """Return an expression without parentheses around the whole."""
    text = str(x)
    return text[1:-1] if len(x.terms) > 1 and text.startswith("(") else text


def sentence(left: Index, relation: str, right: Index, words: str = "") -> str:
    """Return a sentence such as ``H is a multiple of 32``. ``words``: a simpler rule for the sizes, which precedes
    it.
    """
    text = f"{bare(left)} {RELATIONS[relation]} {bare(right)}"
    return f"{words}: {text}" if words else text

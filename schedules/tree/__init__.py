"""Schedule trees, the tile map, and the transformations of both.

``nodes`` has the trees. ``tilemap`` maps coordinates to elements of the group. ``scheduled`` is the pair of both that
the transformations in ``loops``, ``buffers`` and ``limits`` take and return. ``strategies`` has the schedules of
kernels, as compositions.
"""

from polydyn.schedules.tree.nodes import (
    Band,
    Leaf,
    Mark,
    Sequence,
    TileStatement,
    Tree,
    bind_statement,
    build_ast,
    domain,
    partial_schedule,
    sequence,
    show,
    to_isl,
    verify_tree,
)

__all__ = [
    "Band",
    "Leaf",
    "Mark",
    "Sequence",
    "TileStatement",
    "Tree",
    "bind_statement",
    "build_ast",
    "domain",
    "partial_schedule",
    "sequence",
    "show",
    "to_isl",
    "verify_tree",
]

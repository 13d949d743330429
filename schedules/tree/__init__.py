"""Schedule trees, the tile map, and the transformations of both.

``nodes`` are the trees; ``tilemap`` says which element of the group a coordinate stands for; ``scheduled`` is the value
of both that the transformations in ``loops``, ``buffers`` and ``limits`` take and return; ``strategies`` are the
schedules of kernels, as compositions.
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

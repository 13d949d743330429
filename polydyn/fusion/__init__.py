"""Fusion: from a graph of primitives to groups, each decision with its reason."""

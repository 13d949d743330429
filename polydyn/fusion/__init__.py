"""Fusion: turn a graph of primitives into groups and record the reason for each decision."""

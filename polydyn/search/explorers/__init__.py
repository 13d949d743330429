"""Explorers, which choose the next tiles to try."""

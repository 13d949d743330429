"""Tuning: hardware descriptions, records, search spaces, explorers, cost models, selecting kernels."""

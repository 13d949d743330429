"""Tuning: hardware descriptions, records, search spaces, explorers, cost models, choosing the kernels to keep."""

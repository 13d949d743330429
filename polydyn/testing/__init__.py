"""Tools that check polydyn: random graphs and models, inputs and references for models, simulated machines.

Tests and benchmarks share them, and users may check their own models and changes with them. They need the extra
``test``.
"""

"""What checks polydyn: random graphs and models, inputs and references for models, simulated machines.

Tests and benchmarks share it, and users may check their own models and changes with it. It needs the extra ``test``.
"""

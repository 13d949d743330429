"""Schedules: statements, dependences, schedule matrices, tile space, proofs. Knows nothing of ONNX or CUDA.

Imported as ``polydyn.schedules`` only: under a second name every class would exist twice.
"""

if __name__ != "polydyn.schedules":
    raise ImportError("import polydyn.schedules, not schedules: under a second name every class would exist twice")

"""Schedules: statements, dependences, schedule matrices, tile space and proofs. They depend on neither ONNX nor CUDA.

Import this package as ``polydyn.schedules`` only: under a second name every class would exist twice.
"""

if __name__ != "polydyn.schedules":
    raise ImportError("import polydyn.schedules, not schedules: under a second name every class would exist twice")

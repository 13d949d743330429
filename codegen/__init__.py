"""Code generation: loop IR, mark-directed passes, printers. It does not depend on graphs.

Import this package as ``polydyn.codegen`` only: under a second name every class would exist twice.
"""

if __name__ != "polydyn.codegen":
    raise ImportError("import polydyn.codegen, not codegen: under a second name every class would exist twice")

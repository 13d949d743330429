"""Recompute decisions of the compiler by other means: sympy for sizes, networkx for order (``POLYDYN_VERIFY=2``).

Nothing here calls a function that it checks. An expression is read from its terms, a body from its loads.
"""

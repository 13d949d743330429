"""Kernels by hand that hold the primitives of ``codegen/device`` to numpy, emulated and on a GPU."""

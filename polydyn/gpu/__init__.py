"""Compiling for a GPU or emulating one: compilers, emulator, hardware descriptions, timing.

Importing this package requires neither a GPU nor pycuda; ``polydyn.runtime.cuda`` opens devices.
"""

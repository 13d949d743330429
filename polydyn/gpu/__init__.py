"""What compiles for a GPU or stands in for one: compilers, emulator, hardware descriptions, timing.

Importing it needs neither a GPU nor pycuda; ``polydyn.runtime.cuda`` opens devices.
"""

"""Everything that touches a GPU or stands in for one: compiler, driver, emulator, hardware descriptions.

Nothing here is imported by a CPU program, and importing it needs neither a GPU nor pycuda.
"""

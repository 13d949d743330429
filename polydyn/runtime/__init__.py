"""The run time of compiled programs: artifact, native library, calls. It imports numpy and the standard library, no
isl.
"""

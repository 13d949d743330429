"""Tuning real kernels: the bench of this machine, its calibration, and ``polydyn.tune``."""

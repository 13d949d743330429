"""Kernels for CPUs: builders of each family, from schedules to C."""

"""Kernels for CUDA: builders of each family, from schedules to CUDA text."""

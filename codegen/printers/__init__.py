"""Printers: loop IR to C and CUDA."""

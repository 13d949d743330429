"""The run time for a CUDA device: drivers, sessions, arrays, calls."""

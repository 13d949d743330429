"""What runs a program on a CUDA device: drivers, sessions, arrays, calls."""

"""Proofs of schedules: order, storage, sizes, and further obligations of kernels. ``Proven`` is their result."""

"""Proofs of schedules: order, storage, sizes, and what kernels need besides. ``Proven`` is their result."""

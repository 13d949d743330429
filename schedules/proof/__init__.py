"""Proofs: order, storage, sizes, and the families that are not yet proven in digit space."""

"""Lowering: from a fused group to polyhedral statements, then to kernels."""

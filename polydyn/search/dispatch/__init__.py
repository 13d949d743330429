"""The decision that the host program makes, derived from measured kernels."""

"""From measured kernels to the decision that the host program makes."""

"""Rewrites that hold by algebra: online softmax, masks."""

"""What chooses the next tuples to try."""

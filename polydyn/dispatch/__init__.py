"""Dispatch: which selected kernel a shape launches, as plain data that the host program is generated from."""

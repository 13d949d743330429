"""Dispatch: which kept kernel a shape launches, as plain data that the host program is generated from."""

"""The plan of a program: buffers, launches, decisions, the host program. ``polydyn.runtime`` runs it."""

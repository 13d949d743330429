"""Programs: host program, artifact, running."""

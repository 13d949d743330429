"""Search for tiles without a machine: spaces, explorers, cost models, strategies, records, dispatch."""

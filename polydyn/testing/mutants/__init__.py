"""Mutation score: how many generated mistakes the checks of tile maps, loop IR, plans and guards detect."""

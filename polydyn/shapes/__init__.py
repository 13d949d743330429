"""Symbolic shapes: facts about dims, ShapeContext, guards."""

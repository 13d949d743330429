"""Schedule matrices: patterns, the unknown shifts and their solution, as schedules of isl."""

"""Tables and figures of the five papers that need no GPU, measured here next to the numbers of the papers."""

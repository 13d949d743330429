"""Tables and figures of the five papers that need no GPU: measured here, beside what the paper states."""

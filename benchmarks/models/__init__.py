"""Models for benchmarks and tests: real architectures with random weights, their inputs and the shapes they run at."""

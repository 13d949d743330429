"""Groups of a model as things to tune, on a CPU and on a CUDA device."""

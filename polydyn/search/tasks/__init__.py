"""Groups of a model as tuning tasks, for a CPU and for a CUDA device."""

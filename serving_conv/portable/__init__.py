"""The `triton` backend: the same operator from Triton's compiler, for GPUs that cuda-python does not reach."""

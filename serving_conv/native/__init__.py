"""The compiled kernels: one parameter block, one variant record, one launch choice, for the CUDA and host backends."""

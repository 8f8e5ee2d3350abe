"""The training path: the differentiable convolution on one device, and on a sequence that is cut over many."""

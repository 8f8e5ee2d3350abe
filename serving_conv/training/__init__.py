"""The training path: the differentiable convolution on one device, and on a sequence that is cut over many."""

from serving_conv.training.autograd import causal_conv1d
from serving_conv.training.context_parallel import causal_conv1d_cp
from serving_conv.training.determinism import assert_causal_conv1d_deterministic

__all__ = ["assert_causal_conv1d_deterministic", "causal_conv1d", "causal_conv1d_cp"]

"""Owns the replay of request traces through the operator and the state pool: a test instrument and a sizing tool."""

from serving_conv.replay.options import ReplayOptions
from serving_conv.replay.report import Mismatch, ReplayReport
from serving_conv.replay.runner import replay_trace
from serving_conv.replay.trace import DEFAULT_TRACE, Request, Trace, read_trace

__all__ = [
    "DEFAULT_TRACE",
    "Mismatch",
    "ReplayOptions",
    "ReplayReport",
    "Request",
    "Trace",
    "read_trace",
    "replay_trace",
]

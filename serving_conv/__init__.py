"""Causal depthwise conv1d for inference engines: packed prefill, decode and speculative steps, and the state pool."""

from importlib.metadata import PackageNotFoundError, version

from serving_conv.backends import backend_for
from serving_conv.contract import prefill_workspace_size, state_positions
from serving_conv.engine_report import EngineReport, engine_report
from serving_conv.errors import BackendError, CaptureError, CommunicationError, ContractError, ServingConvError
from serving_conv.faults import DeviceFault, clear_device_fault, device_fault
from serving_conv.graphs import Bucket, StepGraphs
from serving_conv.ops import causal_conv1d_fn, causal_conv1d_step, causal_conv1d_update
from serving_conv.pool import (
    ChannelPart,
    LayerState,
    Slot,
    SlotCounts,
    SlotMove,
    SlotPackage,
    StatePool,
    cut_package,
    join_packages,
)
from serving_conv.step import Checkpoint, StepArguments, StepMetadata
from serving_conv.training import assert_causal_conv1d_deterministic, causal_conv1d, causal_conv1d_cp
from serving_conv.warmup import warmup

try:
    __version__ = version("serving-conv")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+unknown"

__all__ = [
    "BackendError",
    "Bucket",
    "CaptureError",
    "ChannelPart",
    "Checkpoint",
    "CommunicationError",
    "ContractError",
    "DeviceFault",
    "EngineReport",
    "LayerState",
    "ServingConvError",
    "Slot",
    "SlotCounts",
    "SlotMove",
    "SlotPackage",
    "StatePool",
    "StepArguments",
    "StepGraphs",
    "StepMetadata",
    "assert_causal_conv1d_deterministic",
    "backend_for",
    "causal_conv1d",
    "causal_conv1d_cp",
    "causal_conv1d_fn",
    "causal_conv1d_step",
    "causal_conv1d_update",
    "clear_device_fault",
    "cut_package",
    "device_fault",
    "engine_report",
    "join_packages",
    "prefill_workspace_size",
    "state_positions",
    "warmup",
]

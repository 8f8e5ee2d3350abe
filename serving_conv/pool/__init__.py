"""Owns the public names of the state pool."""

from serving_conv.pool.copies import SlotMove
from serving_conv.pool.layout import ChannelPart, LayerState, PoolLayout, pool_positions, slot_bytes
from serving_conv.pool.ledger import Slot, SlotCounts
from serving_conv.pool.package import SlotPackage, cut_package, join_packages
from serving_conv.pool.prefix import PrefixKey, PrefixStatistics
from serving_conv.pool.state_pool import StatePool

__all__ = [
    "ChannelPart",
    "LayerState",
    "PoolLayout",
    "PrefixKey",
    "PrefixStatistics",
    "Slot",
    "SlotCounts",
    "SlotMove",
    "SlotPackage",
    "StatePool",
    "cut_package",
    "join_packages",
    "pool_positions",
    "slot_bytes",
]

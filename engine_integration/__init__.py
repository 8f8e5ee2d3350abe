"""Adapters between engines and the operator; installed as `serving_conv.engine_integration`."""

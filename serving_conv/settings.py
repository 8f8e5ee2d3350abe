"""Owns the environment: the only file of the package that reads it, all but the last variable once, at import.

| variable | values | meaning |
|---|---|---|
| `SERVING_CONV_BACKEND` | a backend name | run this backend for every device instead of the device's own |
| `SERVING_CONV_DEBUG` | `1` / `0` | check device values on the host: one synchronisation a call |
| `SERVING_CONV_CACHE` | a folder | keeps compiled kernels; unset: `serving_conv` in the user's cache folder |
| `SERVING_CONV_VLLM` | `1` / `0` | 0: the vLLM plugin replaces nothing |
| `SERVING_CONV_REPORT` | a folder | each engine worker keeps its counts there as JSON |
| `SERVING_CONV_DEPENDENT_LAUNCH` | `1` / `0` | 0: a kernel starts when the one before has ended (sm_90 and up) |
| `SERVING_CONV_HOST_FLAGS` | g++ flags | added when the `host` backend compiles, e.g. `-fsanitize=address` |
| `CAUSAL_CONV1D_DETERMINISTIC` | a leading `1` / `0` | ordered sums in the training path; else torch decides |

The last is causal-conv1d's own switch, which that library and Megatron-Core read at every call; so does this one.
`serving_conv_vllm.py`, beside the package, looks at `SERVING_CONV_VLLM` by itself, since it must import nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving_conv.errors import ContractError

__all__ = ["SETTINGS", "Settings", "deterministic_switch", "read_settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Process-wide settings.

    Attributes:
        backend: backend name forced for every device, or None to choose by device.
        debug: check values that live on the device, on the host, at the price of a synchronisation.
        cache_directory: where compiled kernels are kept.
        host_flags: more flags for the `host` backend's compiler.
        vllm: whether the vLLM plugin replaces anything.
        report_directory: where engine processes leave their counts, or None.
        dependent_launch: kernels take part in programmatic dependent launch where the device has it.
    """

    backend: str | None = None
    debug: bool = False
    cache_directory: Path = Path()
    host_flags: tuple[str, ...] = ()
    vllm: bool = True
    report_directory: Path | None = None
    dependent_launch: bool = True


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings from a mapping like `os.environ`.

    Raises:
        ContractError: a switch (one with the values `1` / `0`) is neither of them nor empty.
    """

    def switch(name: str, default: bool) -> bool:
        value = environment.get(name, "")
        if value not in ("", "0", "1"):
            raise ContractError(name, got=repr(value), wanted="1 or 0", remedy="unset it")
        return value == "1" if value else default

    report = environment.get("SERVING_CONV_REPORT")
    user_cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", "/tmp"), ".cache")
    return Settings(
        backend=environment.get("SERVING_CONV_BACKEND") or None,
        debug=switch("SERVING_CONV_DEBUG", False),
        cache_directory=Path(environment.get("SERVING_CONV_CACHE") or os.path.join(user_cache, "serving_conv")),
        host_flags=tuple(shlex.split(environment.get("SERVING_CONV_HOST_FLAGS", ""))),
        vllm=switch("SERVING_CONV_VLLM", True),
        report_directory=Path(report) if report else None,
        dependent_launch=switch("SERVING_CONV_DEPENDENT_LAUNCH", True),
    )


SETTINGS = read_settings(os.environ)


def deterministic_switch() -> bool | None:
    """`CAUSAL_CONV1D_DETERMINISTIC` now: true or false by its first character, None if that is neither 1 nor 0."""
    return {"1": True, "0": False}.get(os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "")[:1])

"""Owns what a figure cannot be read without: the GPU, its clocks, the driver, the versions, the commit, the date."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe", "record_clocks"]

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy")
_CLOCKS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def describe(commit: str | None = None) -> dict[str, Any]:
    """Everything but the clocks.

    Args:
        commit: used where the tree has no version control beside it.
    """
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _git_commit() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": packages,
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found.update(
            gpu=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            memory_bytes=properties.total_memory,
        )
    return found


def _git_commit() -> str | None:
    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def record_clocks(device: torch.device) -> dict[str, str]:
    """Driver and clocks as nvidia-smi reads them while the GPU is busy; empty if it cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return {}
    busy = torch.zeros(1 << 27, device=device)
    for _ in range(4000):  # about a second of queued work, so that no idle clock is read
        busy.add_(1.0)
    command = ["nvidia-smi", "--query-gpu=" + ",".join(_CLOCKS), "--format=csv,noheader,nounits", "--id=0"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    finally:
        torch.cuda.synchronize()
    if result.returncode != 0:
        return {}
    return dict(zip(_CLOCKS, (value.strip() for value in result.stdout.split(",")), strict=False))

"""Owns what the engine tests share: the adapters' import path, and the real engine where one is installed."""

from __future__ import annotations

from pathlib import Path

import serving_conv

ROOT = Path(__file__).resolve().parents[2]

# Installed, the adapters are serving_conv.engine_integration; in a plain source tree they lie beside the package.
if not (Path(serving_conv.__file__).parent / "engine_integration").exists():
    serving_conv.__path__.append(str(ROOT))

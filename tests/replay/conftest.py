"""Owns what the replay tests share: small traces, and a quick way to play them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from serving_conv.replay import DEFAULT_TRACE, ReplayOptions, ReplayReport, Request, Trace, read_trace, replay_trace


@pytest.fixture(scope="session")
def excerpt() -> Trace:
    """A few shipped requests, cut short: prefix hits, and a load that small pools cannot take."""
    return read_trace(DEFAULT_TRACE, requests=40, max_context=700, max_generated=60)


@pytest.fixture
def play() -> Callable[..., ReplayReport]:
    """Play requests, or a trace, with options that make everything happen on small traces."""

    def play(trace: Trace | list[Request], **options: object) -> ReplayReport:
        if isinstance(trace, list):
            trace = Trace("test", tuple(trace))
        given = {"channels": 3, "slots": 8, "max_step_tokens": 512, "patience": 0.1, **options}
        return replay_trace(trace, ReplayOptions(**given))  # type: ignore[arg-type]

    return play


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Write a trace file, bytes as they are."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "some.trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write

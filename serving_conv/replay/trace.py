"""Owns the reading of request traces: Azure LLM inference CSV and Mooncake jsonl, told apart by their first line.

A file is read and checked whole before anything is made of it, whatever part of it is wanted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from serving_conv.contract import INT32_LIMIT
from serving_conv.errors import ContractError, TraceError

__all__ = ["BLOCK_TOKENS", "DEFAULT_TRACE", "Request", "Trace", "read_trace"]

BLOCK_TOKENS = 512  # tokens that one block hash of a Mooncake trace stands for
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
DEFAULT_TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_excerpt.jsonl"


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        index: place in the trace, from 0.
        arrival: seconds since the first request.
        prompt: tokens of the prompt, 1 or more.
        generated: tokens that follow it.
        blocks: hash of each block of 512 prompt tokens, the last one partial; empty if the trace has none.
    """

    index: int
    arrival: float
    prompt: int
    generated: int
    blocks: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and the name of the file they came from."""

    name: str
    requests: tuple[Request, ...]


def read_trace(
    path: Path,
    *,
    requests: int | None = None,
    max_context: int | None = None,
    max_generated: int | None = None,
) -> Trace:
    """Read a trace, check all of it, and keep what is wanted.

    Args:
        path: the file.
        requests: keep the first so many; all if None.
        max_context: cut prompts, and their block hashes, to so many tokens.
        max_generated: cut generated tokens to so many.

    Raises:
        TraceError: the file cannot be read, or a line of it is malformed; says which line and why.
        ContractError: a limit out of range.
    """
    for name, value, least in (
        ("requests", requests, 1),
        ("max_context", max_context, 1),
        ("max_generated", max_generated, 0),
    ):
        if value is not None and value < least:
            raise ContractError(name, got=value, wanted=f"{least} or more")
    lines = _lines(path)
    if lines[0] == AZURE_HEADER:
        parse, first = _azure, 1
    elif lines[0].lstrip().startswith("{"):
        parse, first = _mooncake, 0
    else:
        raise TraceError(
            f"{path}:1",
            got=_shown(lines[0]),
            wanted=f"the header {AZURE_HEADER} (Azure) or a JSON object (Mooncake)",
        )
    read = list(_parse(path, lines, first, parse))
    if not read:
        raise TraceError(f"{path}:{len(lines)}", got="no requests", wanted="1 or more")
    kept = read[:requests]
    return Trace(path.name, tuple(_capped(request, max_context, max_generated) for request in kept))


def _lines(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TraceError(str(path), got=error.strerror or str(error), wanted="a readable file") from None
    if not raw.strip():
        raise TraceError(f"{path}:1", got="an empty file", wanted="1 request or more")
    lines = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), 1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise TraceError(
                f"{path}:{number}", got=f"bytes that are not UTF-8 ({error.reason})", wanted="text"
            ) from None
    return lines


def _parse(path: Path, lines: list[str], first: int, parse: Callable[[str], Request]) -> Iterator[Request]:
    start = before = None
    for number, line in enumerate(lines[first:], first + 1):
        try:
            request = parse(line)
            if before is not None and request.arrival < before:
                raise _Malformed(f"a timestamp {before - request.arrival:g} s before the last one", "order of arrival")
        except _Malformed as reason:
            got, wanted = reason.args
            raise TraceError(f"{path}:{number}", got=got, wanted=wanted) from None
        before = request.arrival
        start = before if start is None else start
        yield replace(request, index=number - first - 1, arrival=before - start)


def _capped(request: Request, max_context: int | None, max_generated: int | None) -> Request:
    prompt = min(request.prompt, max_context or request.prompt)
    generated = request.generated if max_generated is None else min(request.generated, max_generated)
    return replace(request, prompt=prompt, generated=generated, blocks=request.blocks[: _block_count(prompt)])


def _block_count(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class _Malformed(Exception):
    """What came and what is wanted; `_parse` adds where."""


def _azure(line: str) -> Request:
    fields = line.split(",")
    if len(fields) != 3:
        raise _Malformed(f"{len(fields)} columns in {_shown(line)}", f"3: {AZURE_HEADER}")
    stamp, context, generated = fields
    try:
        time = datetime.fromisoformat(stamp)
    except ValueError:
        raise _Malformed(f"TIMESTAMP {_shown(stamp)}", "a date and time, like 2023-11-16 18:15:46.6805900") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return Request(0, time.timestamp(), _count("ContextTokens", context, 1), _count("GeneratedTokens", generated, 0))


def _mooncake(line: str) -> Request:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"{_shown(line)} ({error})", "a JSON object") from None
    if not isinstance(fields, dict):
        raise _Malformed(_shown(line), "a JSON object")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise _Malformed(f"no {name}", "timestamp, input_length, output_length and hash_ids")
    time, blocks = fields["timestamp"], fields["hash_ids"]
    if type(time) not in (int, float) or not 0 <= time < math.inf:
        raise _Malformed(f"timestamp {_shown(time)}", "milliseconds, 0 or more")
    prompt = _count("input_length", fields["input_length"], 1)
    generated = _count("output_length", fields["output_length"], 0)
    if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise _Malformed(f"hash_ids {_shown(blocks)}", "a list of integers, 0 or more each")
    if len(blocks) != _block_count(prompt):
        raise _Malformed(
            f"{len(blocks)} hash_ids for {prompt} tokens",
            f"{_block_count(prompt)}, one for each {BLOCK_TOKENS} tokens",
        )
    return Request(0, time / 1000, prompt, generated, tuple(blocks))


def _count(name: str, value: object, least: int) -> int:
    """A number of tokens, from CSV text or a JSON number; nothing else that `int` would take."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(INT32_LIMIT)):
        value = int(value)
    if type(value) is not int or not least <= value <= INT32_LIMIT:
        raise _Malformed(f"{name} {_shown(value)}", f"a number of tokens, {least} to {INT32_LIMIT}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Reading traces: what the two formats mean, and one error for each way a line can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serving_conv.errors import ContractError, TraceError
from serving_conv.replay import DEFAULT_TRACE, Request, read_trace

Write = Callable[[str | bytes], Path]

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
AZURE_LINE = "2023-11-16 18:15:46.6805900,374,44\r\n"
MOONCAKE_LINE = {"timestamp": 500, "input_length": 1025, "output_length": 7, "hash_ids": [0, 5, 6]}


def mooncake(**changes: object) -> str:
    return json.dumps({**MOONCAKE_LINE, **changes}) + "\n"


def test_azure(write: Write) -> None:
    path = write(AZURE + AZURE_LINE + "2023-11-16 18:16:46.9305900,1,0\r\n")
    trace = read_trace(path)
    assert trace.name == "some.trace"
    assert trace.requests == (Request(0, 0.0, 374, 44), Request(1, 60.25, 1, 0))


@pytest.mark.parametrize("text", ["{header}\n{line}\n{line}", "\ufeff{header}\r\n{line}\r\n{line}\r\n"])
def test_azure_line_ends_and_byte_order_mark(write: Write, text: str) -> None:
    path = write(text.format(header=AZURE.strip(), line=AZURE_LINE.strip()))
    assert [(request.prompt, request.generated) for request in read_trace(path).requests] == [(374, 44)] * 2


def test_azure_2024_has_time_zones(write: Write) -> None:
    path = write(AZURE + "2024-05-10 00:00:00+00:00,5,6\n2024-05-10 01:00:01+01:00,7,8\n")
    assert read_trace(path).requests[1].arrival == 1.0


def test_mooncake(write: Write) -> None:
    path = write(mooncake() + mooncake(timestamp=2750, input_length=512, hash_ids=[3], output_length=0, extra="x"))
    assert read_trace(path).requests == (
        Request(0, 0.0, 1025, 7, (0, 5, 6)),
        Request(1, 2.25, 512, 0, (3,)),
    )


def test_limits_cut_requests_prompts_blocks_and_generated_tokens(write: Write) -> None:
    path = write(mooncake() * 3)
    trace = read_trace(path, requests=2, max_context=600, max_generated=3)
    assert trace.requests == tuple(Request(index, 0.0, 600, 3, (0, 5)) for index in range(2))
    assert read_trace(path, max_context=512, max_generated=0).requests[2] == Request(2, 0.0, 512, 0, (0,))


@pytest.mark.parametrize(
    ("limits", "argument"),
    [({"requests": 0}, "requests"), ({"max_context": 0}, "max_context"), ({"max_generated": -1}, "max_generated")],
)
def test_bad_limits(write: Write, limits: dict[str, int], argument: str) -> None:
    with pytest.raises(ContractError) as caught:
        read_trace(write(mooncake()), **limits)
    assert caught.value.argument == argument


BAD_AZURE = {
    "two columns": ("2023-11-16 18:15:47,374", "2 columns"),
    "four columns": ("2023-11-16 18:15:47,374,44,1", "4 columns"),
    "blank": ("", "1 columns"),
    "no number": ("2023-11-16 18:15:47,x,44", "ContextTokens 'x'"),
    "fraction": ("2023-11-16 18:15:47,3.5,44", "ContextTokens '3.5'"),
    "space": ("2023-11-16 18:15:47, 3,44", "ContextTokens ' 3'"),
    "underscore": ("2023-11-16 18:15:47,3_0,44", "ContextTokens '3_0'"),
    "other digits": ("2023-11-16 18:15:47,٣,44", "ContextTokens"),
    "empty": ("2023-11-16 18:15:47,374,", "GeneratedTokens ''"),
    "negative": ("2023-11-16 18:15:47,374,-1", "GeneratedTokens '-1'"),
    "no prompt": ("2023-11-16 18:15:47,0,44", "ContextTokens 0"),
    "too large": ("2023-11-16 18:15:47,2147483648,44", "ContextTokens 2147483648"),
    "far too large": (f"2023-11-16 18:15:47,{'9' * 5000},44", "ContextTokens '999"),
    "no time": ("yesterday,374,44", "TIMESTAMP 'yesterday'"),
    "no such day": ("2023-11-31 18:15:47,374,44", "TIMESTAMP"),
    "backwards": ("2023-11-16 18:15:46.1805900,374,44", "0.5 s before the last one"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_AZURE.values(), ids=BAD_AZURE)
def test_bad_azure_line(write: Write, line: str, reason: str) -> None:
    path = write(f"{AZURE}{AZURE_LINE}{line}\r\n{AZURE_LINE}")
    with pytest.raises(TraceError) as caught:
        read_trace(path, requests=1)  # what is not wanted is checked too
    assert caught.value.argument == f"{path}:3"
    assert reason in caught.value.got
    assert caught.value.wanted


BAD_MOONCAKE = {
    "cut off": ('{"timestamp": 500, "input_le', "{"),
    "blank": ("", "''"),
    "list": ("[1, 2]", "'[1, 2]'"),
    "deep": ("[" * 100_000, "[["),
    **{f"no {name}": (json.dumps({k: v for k, v in MOONCAKE_LINE.items() if k != name}), f"no {name}")
       for name in MOONCAKE_LINE},
    "text for a number": (mooncake(input_length="x"), "input_length 'x'"),
    "fraction": (mooncake(output_length=1.5), "output_length 1.5"),
    "true": (mooncake(output_length=True), "output_length True"),
    "null": (mooncake(output_length=None), "output_length None"),
    "negative": (mooncake(output_length=-1), "output_length -1"),
    "no prompt": (mooncake(input_length=0, hash_ids=[]), "input_length 0"),
    "negative time": (mooncake(timestamp=-1), "timestamp -1"),
    "time is text": (mooncake(timestamp="1"), "timestamp '1'"),
    "no time": (mooncake(timestamp=float("nan")), "timestamp nan"),
    "never": (mooncake(timestamp=float("inf")), "timestamp inf"),
    "backwards": (mooncake(timestamp=499), "0.001 s before the last one"),
    "too few hashes": (mooncake(hash_ids=[0, 5]), "2 hash_ids for 1025 tokens"),
    "too many hashes": (mooncake(hash_ids=[0, 5, 6, 7]), "4 hash_ids for 1025 tokens"),
    "hash is text": (mooncake(hash_ids=[0, "5", 6]), "hash_ids"),
    "negative hash": (mooncake(hash_ids=[0, -5, 6]), "hash_ids"),
    "hashes are no list": (mooncake(hash_ids=3), "hash_ids 3"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), BAD_MOONCAKE.values(), ids=BAD_MOONCAKE)
def test_bad_mooncake_line(write: Write, line: str, reason: str) -> None:
    path = write(mooncake() + line.rstrip("\n") + "\n" + mooncake())
    with pytest.raises(TraceError) as caught:
        read_trace(path, requests=1)
    assert caught.value.argument == f"{path}:2"
    assert reason in caught.value.got
    assert caught.value.wanted


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (b"", 1, "empty file"),
        (b"\r\n\n", 1, "empty file"),
        (b"when,what\r\n1,2\r\n", 1, "when,what"),
        (b"TIMESTAMP,GeneratedTokens,ContextTokens\r\n", 1, "TIMESTAMP,Gen"),
        (AZURE.encode(), 1, "no requests"),
        (AZURE.encode() + AZURE_LINE.encode() + b"\xff\xfe\r\n", 3, "not UTF-8"),
        (b"\x00\x01\x02", 1, "x00"),
    ],
)
def test_bad_file(write: Write, text: bytes, line: int, reason: str) -> None:
    path = write(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.argument == f"{path}:{line}"
    assert reason in caught.value.got


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.csv", tmp_path):
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert caught.value.argument == str(path)


def test_the_shipped_excerpt() -> None:
    trace = read_trace(DEFAULT_TRACE)
    assert len(trace.requests) == 400
    assert all(request.blocks for request in trace.requests)
    notice = (DEFAULT_TRACE.parent / "NOTICE.md").read_text()
    assert DEFAULT_TRACE.name in notice
    assert "Apache License 2.0" in notice

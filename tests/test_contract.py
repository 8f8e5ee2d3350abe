"""Signatures, schemas and docstrings say what the records say, and the records say what the contract says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from support.calls import ENTRY_IDS

import serving_conv
from serving_conv.contract import (
    ENTRIES,
    PREFILL,
    UPDATE,
    Entry,
    Layout,
    Option,
    TensorArgument,
    accepted_limit,
    prefill_workspace_size,
    state_positions,
)
from serving_conv.signatures import markdown_tables, schema

both = pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)


@both
def test_signature_is_the_record(entry: Entry) -> None:
    parameters = list(inspect.signature(getattr(serving_conv, entry.name)).parameters.values())
    assert [p.name for p in parameters] == [a.name for a in entry.arguments]
    for parameter, argument in zip(parameters, entry.arguments, strict=True):
        keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword == argument.keyword, argument.name
        assert keyword or parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if isinstance(argument, Option):
            assert parameter.default == argument.default
        elif argument.optional:
            assert parameter.default is None
        else:
            assert parameter.default is inspect.Parameter.empty


def test_signatures_are_the_contracts() -> None:
    # The text of the contract, word for word: the positional order is FlashInfer's.
    expected = {
        "causal_conv1d_fn": (
            "(x, weight, conv_state, cu_seqlens, cache_indices, has_initial_state=None, *, bias=None, "
            "activation='silu', num_accepted_tokens=None, out=None, workspace=None, pad_slot_id=-1)"
        ),
        "causal_conv1d_update": (
            "(x, weight, conv_state, state_indices, *, cu_seqlens=None, num_accepted_tokens=None, "
            "has_initial_state=None, bias=None, activation='silu', out=None, pad_slot_id=-1)"
        ),
    }
    for name, text in expected.items():
        signature = inspect.signature(getattr(serving_conv, name))
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == text


@both
@pytest.mark.parametrize("out", [False, True])
def test_schema_is_the_registered_one(entry: Entry, out: bool) -> None:
    packet = getattr(torch.ops.serving_conv, entry.name)
    registered = str((packet.out if out else packet.default)._schema)
    assert registered == f"serving_conv::{schema(entry, out=out)}"
    assert packet.overloads() == ["default", "out"]


@both
@pytest.mark.parametrize("out", [False, True])
def test_schema_says_exactly_what_is_written(entry: Entry, out: bool) -> None:
    packet = getattr(torch.ops.serving_conv, entry.name)
    arguments = (packet.out if out else packet.default)._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {a.name for a in entry.tensors if a.mutated} - (set() if out else {"out"})


@both
def test_docstring_holds_every_argument(entry: Entry) -> None:
    text = inspect.getdoc(getattr(serving_conv, entry.name)) or ""
    block = text.split("Args:")[1].split("Returns:")[0]
    names = re.findall(r"^\s+(\w+)(?: \([^)]*\))?: ", block, flags=re.MULTILINE)
    assert names == [a.name for a in entry.arguments]
    for argument in entry.arguments:
        assert argument.meaning in block
    assert "Raises:" in text
    assert entry.returns in text


@both
def test_table_holds_every_argument(entry: Entry) -> None:
    lines = markdown_tables((entry,)).splitlines()
    names = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert names == [a.name for a in entry.arguments]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_public_names() -> None:
    for name in serving_conv.__all__:
        assert hasattr(serving_conv, name)
    wanted = {"causal_conv1d_fn", "causal_conv1d_update", "prefill_workspace_size", "backend_for", "ContractError"}
    assert wanted <= set(serving_conv.__all__)


def test_records_hold_the_contracts_types() -> None:
    floats = {"bfloat16", "float16", "float32"}
    for entry in ENTRIES:
        for name in ("x", "weight", "conv_state", "bias"):
            argument = entry[name]
            assert isinstance(argument, TensorArgument)
            assert set(argument.dtypes) == floats
        flags = entry["has_initial_state"]
        assert isinstance(flags, TensorArgument)
        assert flags.dtypes == ("bool",)
        slots = entry["state_indices" if entry is UPDATE else "cache_indices"]
        assert isinstance(slots, TensorArgument)
        assert slots.dtypes == ("int32",)
        assert slots.layout is Layout.ANY
    out = UPDATE["out"]
    assert isinstance(out, TensorArgument)
    assert out.may_be == "x"


def test_records_refuse_unknown_names() -> None:
    with pytest.raises(KeyError):
        PREFILL["nothing"]


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("drafts", range(5))
def test_positions_and_the_accepted_limit_agree(width: int, drafts: int) -> None:
    positions = state_positions(width, drafts)
    assert positions == width - 1 + drafts
    assert accepted_limit(width, positions) == drafts + 1, "a verify step of drafts + 1 tokens just fits"


@pytest.mark.parametrize(
    ("rows", "sequences", "size"),
    [
        (0, 0, 0),
        (0, 100, 0),
        (1000, 32, 0),
        (33, 33, 1 + 2 * 33),  # R is less than blocks + N
        (100, 33, 1 + 2 * (13 + 33)),  # R < 64 N: blocks of 8
        (64 * 33 - 1, 33, 1 + 2 * (264 + 33)),
        (64 * 33, 33, 1 + 2 * (132 + 33)),  # R = 64 N: blocks of 16
        (8192, 64, 1 + 2 * (512 + 64)),
        (65_536, 65_536, 1 + 2 * 65_536),
    ],
)
def test_workspace_size(rows: int, sequences: int, size: int) -> None:
    assert prefill_workspace_size(rows, sequences) == size


def test_records_meanings_are_one_sentence_of_plain_text() -> None:
    for entry in ENTRIES:
        for argument in entry.arguments:
            assert argument.meaning
            assert "|" not in argument.meaning, "it would break the table"
            assert not argument.meaning.endswith(".")


def test_contract_module_needs_no_torch() -> None:
    source = Path(serving_conv.contract.__file__).read_text()
    assert "torch" not in re.sub(r'"""(.|\n)*?"""', "", source)

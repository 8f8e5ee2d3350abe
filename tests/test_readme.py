"""The README: its tables are the contract's records, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.process import python

from serving_conv.contract import ENTRIES
from serving_conv.signatures import markdown_tables

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_contract_tables_are_the_records() -> None:
    text = README.read_text()
    inside = text.split("<!-- contract -->")[1].split("<!-- /contract -->")[0]
    assert inside.strip() == markdown_tables(ENTRIES).strip()


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One after another in one interpreter, as a reader types them.
    monkeypatch.chdir(tmp_path)
    result = python("\n".join(blocks("python")))
    assert result.returncode == 0, result.stderr


def test_there_is_an_example_of_each_entry() -> None:
    code = "\n".join(blocks("python"))
    assert all(f"{entry.name}(" in code for entry in ENTRIES)

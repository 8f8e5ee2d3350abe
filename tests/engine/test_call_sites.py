"""The table of vLLM's call sites: complete for every vLLM at hand, and in the README; signatures are understood."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest
from serving_conv.engine_integration.call_sites import CALL_SITES, find_call_sites, markdown_table
from serving_conv.engine_integration.vllm_adapter import prefill_adapter, update_adapter

ROOT = Path(__file__).resolve().parents[2]


def vllm_folders() -> list[Path]:
    """The installed vLLM, and those that VLLM_FOLDERS lists (unpacked wheels of other versions)."""
    spec = importlib.util.find_spec("vllm")
    installed = list(spec.submodule_search_locations or ()) if spec else []
    return [Path(p) for p in (*installed, *filter(None, os.environ.get("VLLM_FOLDERS", "").split(os.pathsep)))]


@pytest.mark.parametrize("folder", vllm_folders() or [None])
def test_every_call_site_of_vllm_has_a_row(folder: Path | None) -> None:
    if folder is None:
        pytest.skip("no vLLM is installed here, and VLLM_FOLDERS names none")
    found = set(find_call_sites(folder))
    assert len(found) > 10, "the search finds nothing: has vLLM moved its layers?"
    missing = found - {(site.module, site.function) for site in CALL_SITES}
    assert not missing, f"call sites without a row in CALL_SITES: {sorted(missing)}"


@pytest.mark.parametrize("folder", vllm_folders() or [None])
def test_the_adapters_understand_vllms_signatures(folder: Path | None) -> None:
    if folder is None:
        pytest.skip("no vLLM is installed here, and VLLM_FOLDERS names none")
    module = ast.parse((folder / "model_executor/layers/mamba/ops/causal_conv1d.py").read_text())
    names = {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1}  # what their defaults are
    for adapt, name in ((prefill_adapter, "causal_conv1d_fn"), (update_adapter, "causal_conv1d_update")):
        (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
        function.body, function.decorator_list = [ast.Pass()], []
        exec("from __future__ import annotations\n" + ast.unparse(function), names)
        adapt(names[name], name)


def test_the_search_sees_aliases_attributes_and_inner_imports(tmp_path: Path) -> None:
    layers = tmp_path / "model_executor" / "layers"
    layers.mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (layers / "new.py").write_text(
        "def f():\n"
        "    from vllm.ops import causal_conv1d_fn_cpu as conv\n"
        "    conv(1)\n"
        "    ops.causal_conv1d_update_cpu(1)\n"
        "    causal_conv1d_update(1)\n"
        "    compute_causal_conv1d_metadata(1)\n"
        "    F.conv1d(1)\n"
    )
    assert {name for _, name in find_call_sites(tmp_path)} == {
        "causal_conv1d_fn_cpu",
        "ops.causal_conv1d_update_cpu",
        "causal_conv1d_update",
        "F.conv1d",
    }


def test_no_row_twice() -> None:
    keys = [(site.module, site.function) for site in CALL_SITES]
    assert len(keys) == len(set(keys))


def test_the_readme_shows_the_table() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.split("<!-- call sites -->")[1].split("<!-- /call sites -->")[0].strip() == markdown_table()

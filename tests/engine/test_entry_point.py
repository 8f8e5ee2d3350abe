"""The entry point: free where it is off or nothing convolves, in place as soon as something does, never in the way."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest
from support.process import python

ROOT = Path(__file__).resolve().parents[2]
# Measured on two cores: 0.1 ms to register; 0.25 s of processor time for the replacement, 0.2 s of it imports.
REGISTER_WITHIN = 0.05
REPLACE_WITHIN = 1.0

FIND = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})  # for a source tree that is not installed
"""
OURS = """
def ours():
    return sorted(name for name in sys.modules if name.split(".")[0].startswith("serving_conv"))
"""
# Installed, the adapters are serving_conv.engine_integration; in a plain source tree they lie beside the package.
PLAIN_TREE = f"""
import importlib.util, serving_conv
if importlib.util.find_spec("serving_conv.engine_integration") is None:
    serving_conv.__path__.append({str(ROOT)!r})
"""


def run(code: str, **environment: str) -> str:
    result = python(FIND + OURS + textwrap.dedent(code), **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_process_without_such_layers_imports_nothing(switch: str) -> None:
    run(
        f"""
        before, finders = set(sys.modules), list(sys.meta_path)
        import time
        import serving_conv_vllm
        started = time.process_time()
        serving_conv_vllm.register()
        serving_conv_vllm.register()
        assert time.process_time() - started < {REGISTER_WITHIN}
        assert ours() == ["serving_conv_vllm"], ours()
        assert not {{"torch", "numpy", "typer", "rich"}} & (set(sys.modules) - before)
        added = len(sys.meta_path) - len(finders)
        assert added == {int(switch)}, "off: no finder; on: one, however often it is called"
        import torch
        assert not hasattr(torch.ops.serving_conv, "conv1d_forward"), "an operator is registered"
        """,
        SERVING_CONV_VLLM=switch,
    )


def vllm(folder: Path, *, without: str = "nothing") -> Path:
    """A package with the modules of vLLM that the plugin touches, and a layer that imports its functions by name."""
    ops = "vllm/model_executor/layers/mamba/ops"
    files = {
        f"{ops}/causal_conv1d.py": """
            def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None, metadata=None):
                return "vLLM's"
            def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None):
                return "vLLM's"
            """,
        "vllm/model_executor/layers/mamba/mixer.py": """
            from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
            """,
        "vllm/platforms/__init__.py": """
            class current_platform:
                is_cpu = staticmethod(lambda: False)
            """,
        "vllm/v1/attention/backends/utils.py": """
            def compute_causal_conv1d_metadata(offsets, *, device): ...
            """,
        "vllm/v1/worker/worker_base.py": """
            class WorkerWrapperBase:
                def initialize_from_config(self, configs): ...
            """,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace(without, "something_else"))
    for directory in (d for d in folder.rglob("*") if d.is_dir() and not (d / "__init__.py").exists()):
        (directory / "__init__.py").touch()
    return folder


def test_the_first_layer_that_is_imported_gets_ours(tmp_path: Path) -> None:
    run(
        f"sys.path.insert(0, {str(vllm(tmp_path))!r})"
        + """
import serving_conv_vllm
serving_conv_vllm.register()
import vllm.platforms
assert ours() == ["serving_conv_vllm"]
"""
        + PLAIN_TREE
        + """
from vllm.model_executor.layers.mamba import mixer
assert mixer.causal_conv1d_fn.serving_conv_original.__name__ == "causal_conv1d_fn"
assert mixer.causal_conv1d_update.serving_conv_original(1, 2, 3) == "vLLM's"
from vllm.v1.worker.worker_base import WorkerWrapperBase
assert hasattr(WorkerWrapperBase.initialize_from_config, "serving_conv_original")
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "serving_conv_vllm"]
adapted = mixer.causal_conv1d_fn
serving_conv_vllm.register()
assert mixer.causal_conv1d_fn is adapted
"""
    )


def test_a_layer_that_was_imported_before_gets_ours_too(tmp_path: Path) -> None:
    run(
        f"sys.path.insert(0, {str(vllm(tmp_path))!r})"
        + PLAIN_TREE
        + """
from vllm.model_executor.layers.mamba import mixer
import serving_conv_vllm
serving_conv_vllm.register()
assert hasattr(mixer.causal_conv1d_fn, "serving_conv_original")
"""
    )


LOGGED = """
import logging
logging.basicConfig(stream=sys.stdout)
import serving_conv_vllm
serving_conv_vllm.register()
"""


def test_a_switch_that_cannot_be_read_is_logged_and_stops_nothing(tmp_path: Path) -> None:
    out = run(
        f"sys.path.insert(0, {str(vllm(tmp_path))!r})"
        + LOGGED
        + 'from vllm.model_executor.layers.mamba import mixer; assert mixer.causal_conv1d_fn(*range(5)) == "vLLM\'s"',
        SERVING_CONV_VLLM="perhaps",
    )
    assert "serving_conv: cannot be imported, vLLM runs its own functions" in out
    assert "SERVING_CONV_VLLM" in out


def test_what_a_vllm_does_not_have_is_left_out(tmp_path: Path) -> None:
    run(
        f"sys.path.insert(0, {str(vllm(tmp_path, without='compute_causal_conv1d_metadata'))!r})"
        + PLAIN_TREE
        + LOGGED
        + """
from vllm.model_executor.layers.mamba import mixer
assert hasattr(mixer.causal_conv1d_fn, "serving_conv_original")
assert serving_conv.engine_report().kept["compute_causal_conv1d_metadata"] == "not in this vLLM"
"""
    )


def test_a_failure_half_way_leaves_vllms_own(tmp_path: Path) -> None:
    out = run(
        f"sys.path.insert(0, {str(vllm(tmp_path))!r})"
        + PLAIN_TREE
        + LOGGED
        + """
from serving_conv.engine_integration import vllm_plugin
vllm_plugin._hook_worker = lambda: 1 / 0
from vllm.model_executor.layers.mamba import mixer
from vllm.v1.attention.backends import utils
for function in (mixer.causal_conv1d_fn, mixer.causal_conv1d_update, utils.compute_causal_conv1d_metadata):
    assert not hasattr(function, "serving_conv_original")
assert serving_conv.engine_report().functions == {}
"""
    )
    assert "serving_conv: nothing replaced, vLLM runs its own functions" in out


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_replacing_in_the_real_vllm_takes_a_fraction_of_a_second() -> None:
    # Processor time, since the machine may be busy. Everything that vLLM imports for the layer itself is left out.
    out = run(
        """
        import os, time
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        import vllm.v1.worker.worker_base
        import vllm.model_executor.layers.mamba.mamba_mixer2
        import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention
        import serving_conv_vllm
        before, started = set(sys.modules), time.process_time()
        serving_conv_vllm.register()
        print(time.process_time() - started)
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
        assert not [n for n in sys.modules if n.startswith(("serving_conv.replay", "serving_conv.cli"))]
        from vllm.model_executor.layers.mamba import mamba_mixer2
        assert hasattr(mamba_mixer2.causal_conv1d_fn, "serving_conv_original")
        """
    )
    seconds = float(out.splitlines()[-2])
    assert seconds < REPLACE_WITHIN, f"{seconds:.2f} s"
    assert not {"typer", "rich", "hypothesis", "matplotlib"} & set(out.splitlines()[-1].split())

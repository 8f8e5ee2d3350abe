"""The script that runs vLLM's own unit tests: what it changes in their text, and whose arguments are whose."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import pytest
from serving_conv.engine_integration import vllm_unit_tests

# As vLLM's files of several versions ask for a device and skip.
SOURCE = """
import torch
pytestmark = pytest.mark.skipif(not current_platform.is_cuda_alike(), reason="Triton kernels")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA required")
def test_of_everyone():
    x = torch.zeros(1, device="cuda").cuda()
    torch.cuda.empty_cache()
    torch.accelerator.empty_cache()
@pytest.mark.skipif(not current_platform.is_cuda_alike(), reason="vLLM's kernel alone")
def test_of_vllms_kernel(): ...
"""


def test_the_text_asks_for_the_cpu_and_skips_only_what_is_of_vllms_kernel() -> None:
    text = vllm_unit_tests.on_the_cpu(SOURCE)
    ast.parse(text)
    assert "cuda.is_available" not in text and 'device="cpu").cpu()' in text and "empty_cache" not in text
    assert "\npytestmark" not in text
    assert '@pytest.mark.skipif(not current_platform.is_cuda_alike(), reason="vLLM\'s kernel alone")' in text


def test_what_follows_two_dashes_is_pytests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / vllm_unit_tests.TESTS
    source.parent.mkdir(parents=True)
    source.write_text("from __future__ import annotations\n" + SOURCE)
    monkeypatch.setattr("sys.argv", ["tests", str(tmp_path), "--backend", "host", "--", "-k", "varlen", "-x"])
    with mock.patch.object(vllm_unit_tests.subprocess, "run") as run:
        run.return_value.returncode = 3
        assert vllm_unit_tests.main() == 3
    ((command,), options), *more = run.call_args_list
    assert not more
    assert command[-3:] == ["-k", "varlen", "-x"]
    assert options["env"]["SERVING_CONV_BACKEND"] == "host"


def test_a_folder_without_the_tests_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tests", str(tmp_path)])
    with pytest.raises(SystemExit):
        vllm_unit_tests.main()
    assert "give the path of a checkout of vLLM" in capsys.readouterr().err

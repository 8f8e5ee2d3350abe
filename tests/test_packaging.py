"""What is installed: the wheel's content, the editable install, the pins that must agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy of what git tracks, so that nothing lying about gets in and nothing is left behind.
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = target.glob("serving_conv-*.whl")
    return made


def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    # The second module is vLLM's entry point, which must not import the package.
    assert {name.split("/")[0] for name in names} == {"serving_conv", "serving_conv_vllm.py", names[-1].split("/")[0]}
    for wanted in (
        "serving_conv/py.typed",
        "serving_conv/kernels/conv_prefill.cu",
        "serving_conv/kernels/platform_host.h",
        "serving_conv/engine_integration/__init__.py",
        "serving_conv/data/NOTICE.md",
        "serving_conv/data/mooncake_conversation_excerpt.jsonl",
    ):
        assert wanted in names
    assert not [name for name in names if name.endswith("kernels/__init__.py")]


def test_the_wheel_finds_its_kernels(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = """
import serving_conv, importlib.util
from serving_conv.native.variant import kernel_directory
print(kernel_directory(), importlib.util.find_spec("kernels"), serving_conv.__version__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    version = PYPROJECT["project"]["version"]
    assert done.stdout.split() == [str(tmp_path / "serving_conv" / "kernels"), "None", version]


def test_an_editable_install_hides_no_other_package(tmp_path: Path) -> None:
    try:
        distribution("serving-conv")
    except PackageNotFoundError:
        pytest.skip("serving-conv is not installed here; the test command installs it in place")
    script = (
        'import importlib.util as u; print(u.find_spec("kernels"), u.find_spec("tests"), u.find_spec("benchmarks"))'
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None"] * 3


def test_pre_commit_and_the_dev_extra_pin_the_same_tools() -> None:
    pins = set(re.findall(r'"(ruff==[\d.]+)"', (ROOT / ".pre-commit-config.yaml").read_text()))
    wanted = {pin for pin in PYPROJECT["project"]["optional-dependencies"]["dev"] if pin.startswith("ruff==")}
    assert pins == wanted and len(pins) == 1
    assert any(pin.startswith("mypy==") for pin in PYPROJECT["project"]["optional-dependencies"]["dev"])

"""Rules about the source itself, each a script: which way imports point, who reads the environment, what is shipped."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.process import python

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "serving_conv"

# Each level may import the levels before it, never its own or a later one. A folder is one unit.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("settings", "contract"),
    ("signatures", "checks", "faults", "engine_report", "dispatch"),
    ("reference", "native"),
    ("portable",),
    ("backends",),
    ("ops",),
    ("warmup", "pool"),
    ("step", "graphs"),
    ("replay", "training", "warmup_command", "doctor"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
NO_TORCH = ("errors.py", "contract.py", "settings.py", "pool/ledger.py", "pool/prefix.py")


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)


def unit(path: Path) -> str:
    """Name of the module, or of the folder, directly below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a module imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            assert node.module
            # `from serving_conv import pool` names a module, `from serving_conv.pool import Slot` does not.
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_names(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", [p for p in modules() if unit(p) != "__init__"], ids=module_names)
def test_imports_point_one_way(path: Path) -> None:
    own = unit(path)
    if own in ("data", "engine_integration"):
        return
    assert own in LEVEL, f"{own} has no level: give it one here"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "serving_conv" or len(parts) < 2 or parts[1] == own:
            continue
        if parts[1] == "engine_integration":
            assert own == "cli", "only the command line knows the engines; they import the package"
        elif parts[1] in LEVEL:
            assert LEVEL[parts[1]] < LEVEL[own], f"{own} imports {parts[1]}, which is above or beside it"
        else:
            assert own in ("replay", "cli", "__main__"), f"{own} imports the name {parts[1]} from the package"


def test_the_pool_stands_alone() -> None:
    # The pool imports errors, the contract and the launch of its copies, and never the operator.
    copies = {"serving_conv.native.copy_plan", "serving_conv.native.copy_slots"}
    for path in modules():
        if unit(path) == "pool":
            names = {n for n in imports(path) if n.startswith("serving_conv.")}
            if path.name == "copies.py":
                names = {n for n in names if not n.startswith(tuple(copies))}
            used = {n.split(".")[1] for n in names}
            assert used <= {"pool", "errors", "contract"}, path.name


@pytest.mark.parametrize("name", NO_TORCH)
def test_no_torch(name: str) -> None:
    used = {module.split(".")[0] for module in imports(PACKAGE / name)}
    assert not used & {"torch", "numpy"}
    # Nor through a neighbour.
    for module in imports(PACKAGE / name):
        if module.startswith("serving_conv."):
            neighbour = "/".join(module.split(".")[1:]) + ".py"
            assert neighbour in NO_TORCH or not (PACKAGE / neighbour).exists(), f"{name} imports {neighbour}"


def test_only_settings_reads_the_environment() -> None:
    for path in modules():
        if path.name == "settings.py" or unit(path) == "data":
            continue
        text = path.read_text()
        assert not re.search(r"\bos\.(environ|getenv|putenv)\b|\bfrom os import\b.*\b(environ|getenv)\b", text), path


def test_environment_is_read_once_in_settings() -> None:
    tree = ast.parse((PACKAGE / "settings.py").read_text())
    inside = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    # One switch is causal-conv1d's, whose meaning is that it is read at every call.
    for function in (f for f in inside if f.name != "deterministic_switch"):
        for node in ast.walk(function):
            assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")), function.name


def test_import_makes_no_cuda_context_and_is_quiet() -> None:
    code = "import torch, serving_conv; assert serving_conv.__version__; assert not torch.cuda.is_initialized()"
    result = python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_package_has_no_module_that_nobody_documents() -> None:
    for path in modules():
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path.relative_to(ROOT)} does not say what it owns"


def test_no_bare_asserts_up_to_the_step() -> None:
    # python -O removes assertions: checks of arguments must raise.
    for path in modules():
        if LEVEL.get(unit(path), 0) > LEVEL["step"] and unit(path) != "training":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_kernels_is_no_python_package() -> None:
    # `kernels` is a name on PyPI too: a package here would hide it.
    assert not list((ROOT / "kernels").rglob("__init__.py"))
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert all(name.split(".")[0] == "serving_conv" for name in packages)


def test_every_package_folder_is_shipped() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in modules() if p.name == "__init__.py"}
    assert folders <= set(setuptools["packages"])
    assert "py.typed" in setuptools["package-data"]["serving_conv"]
    assert (PACKAGE / "py.typed").exists()


def tracked() -> list[Path]:
    """Files under version control or about to be; every file of an unpacked archive."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return [p for p in (ROOT / name for name in listed.stdout.splitlines()) if p.is_file()]
    return [p for p in ROOT.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts)]


TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cu", ".cuh", ".h", ".cpp", ".sh", ".cfg", ""}


def test_no_absolute_machine_paths() -> None:
    machine = re.compile(
        r"(?<![\w.])/(?:" + "|".join(("home/", "root/", "Users/", "work/main", "work/shared", "tmp/")) + r")"
    )
    for path in tracked():
        if path.suffix in TEXT and path != Path(__file__):
            found = [line for line in path.read_text(errors="replace").splitlines() if machine.search(line)]
            assert not found, f"{path.relative_to(ROOT)}: {found[0].strip()}"


def test_pins_agree() -> None:
    # The pre-commit hooks and the dev extra run the same ruff.
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    pins = {pin for pin in dev if "==" in pin}
    hooks = set(re.findall(r"\"?(ruff==[\w.]+)\"?", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert hooks
    assert hooks <= pins


def test_markers_are_registered(pytestconfig: pytest.Config) -> None:
    assert any(marker.startswith("gpu:") for marker in pytestconfig.getini("markers"))

"""Owns the making of the peers' folder from published packages; nothing of it belongs into version control.

Needs a package index, and for two peers a compiler: nvcc (causal-conv1d) and g++ with FlashInfer's own compiler,
nvidia-cutlass-dsl, which is downloaded for the length of the run. No GPU is needed; `--arch` says which one the
compiled peers are for, `--python` which interpreter will load them.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import flashinfer_module, kernel_key
from benchmarks.rows import ROWS, WIDTH, Row
from serving_conv import prefill_workspace_size

VERSIONS = {
    "vllm": "0.33.0",
    "flashinfer-python": "0.7.4",
    "causal-conv1d": "1.7.0",
    "fla-core": "0.6.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "einops": "0.8.2",
}
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]

# causal-conv1d's entry without torch: the kernels it would launch for bf16, four taps and channel-last tensors.
_DAO_ENTRY = """
#include "fwd.cu"
#include "update.cu"
using bf16 = at::BFloat16;
extern "C" int prefill(void *x, void *weight, void *bias, void *seq_idx, void *out, int dim, int seqlen,
                       long long x_row, long long out_row, void *stream) {
  ConvParamsBase p = {};
  p.batch = 1; p.dim = dim; p.seqlen = seqlen; p.width = 4; p.silu_activation = true;
  p.x_ptr = x; p.weight_ptr = weight; p.bias_ptr = bias; p.out_ptr = out; p.seq_idx_ptr = seq_idx;
  p.x_batch_stride = x_row * seqlen; p.x_c_stride = 1; p.x_l_stride = x_row;
  p.out_batch_stride = out_row * seqlen; p.out_c_stride = 1; p.out_l_stride = out_row;
  p.weight_c_stride = 4; p.weight_width_stride = 1;
  causal_conv1d_channellast_fwd_launch<128, 4, bf16, bf16>(p, (cudaStream_t)stream);
  return (int)cudaGetLastError();
}
extern "C" int update(void *x, void *weight, void *bias, void *out, void *state, void *indices, int batch, int dim,
                      int positions, long long x_row, long long out_row, long long slot, long long channel,
                      long long position, void *stream) {
  ConvParamsBase p = {};
  p.batch = batch; p.dim = dim; p.seqlen = 1; p.width = 4; p.silu_activation = true;
  p.x_ptr = x; p.weight_ptr = weight; p.bias_ptr = bias; p.out_ptr = out;
  p.x_batch_stride = x_row; p.x_c_stride = 1; p.x_l_stride = 1;
  p.out_batch_stride = out_row; p.out_c_stride = 1; p.out_l_stride = 1;
  p.weight_c_stride = 4; p.weight_width_stride = 1;
  p.conv_state_ptr = state; p.conv_state_len = positions; p.conv_state_indices_ptr = (int32_t *)indices;
  p.conv_state_batch_stride = slot; p.conv_state_c_stride = channel; p.conv_state_l_stride = position;
  causal_conv1d_update_launch<64, 4, bf16, bf16>(p, (cudaStream_t)stream);
  return (int)cudaGetLastError();
}
"""

# Its backward, likewise; a workspace makes it the ordered one. What its C++ entry zeroes and adds is the caller's.
_DAO_BACKWARD_ENTRY = """
#include "bwd.cu"
using bf16 = at::BFloat16;
extern "C" int backward(void *x, void *weight, void *bias, void *seq_idx, void *dout, void *dx, void *dweight,
                        void *dbias, void *dweight_workspace, void *dbias_workspace, int batch, int dim, int seqlen,
                        void *stream) {
  ConvParamsBwd p = {};
  p.batch = batch; p.dim = dim; p.seqlen = seqlen; p.width = 4; p.silu_activation = true;
  p.x_ptr = x; p.weight_ptr = weight; p.bias_ptr = bias; p.seq_idx_ptr = seq_idx;
  p.dout_ptr = dout; p.dx_ptr = dx; p.dweight_ptr = dweight; p.dbias_ptr = dbias;
  p.x_batch_stride = p.dout_batch_stride = p.dx_batch_stride = dim * seqlen;
  p.x_c_stride = p.dout_c_stride = p.dx_c_stride = 1;
  p.x_l_stride = p.dout_l_stride = p.dx_l_stride = dim;
  p.weight_c_stride = p.dweight_c_stride = 4;
  p.weight_width_stride = p.dweight_width_stride = 1;
  p.deterministic = dweight_workspace != nullptr;
  const int chunks = (seqlen + (seqlen <= 128 ? 63 : 127)) / (seqlen <= 128 ? 64 : 128);
  p.dweight_workspace_ptr = dweight_workspace; p.dbias_workspace_ptr = dbias_workspace;
  p.dweight_workspace_batch_stride = chunks * dim * 4;
  p.dweight_workspace_dim_stride = 4;
  p.dbias_workspace_batch_stride = chunks * dim;
  causal_conv1d_channellast_bwd_launch<128, 4, bf16, bf16>(p, (cudaStream_t)stream);
  return (int)cudaGetLastError();
}
"""


def _run(*command: str, **options: Any) -> None:
    result = subprocess.run(command, capture_output=True, text=True, **options)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:6])} ...: {(result.stdout + result.stderr)[-1500:]}")


def _download(package: str, folder: Path, python: str) -> Path:
    """The wheel of one package; what it depends on is not followed."""
    target = folder / package
    options = [f"--platform={name}" for name in _PLATFORMS]
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", python, "--implementation", "cp", *options),
        *("--abi", f"cp{python.replace('.', '')}", "--abi", "abi3", "--abi", "none"),
        *("--dest", str(target), f"{package}=={VERSIONS[package]}"),
    )
    (wheel,) = target.glob("*.whl")
    return wheel


def fetch_vllm(into: Path, work: Path, python: str, arch: str) -> None:
    """One file of a wheel of several hundred megabytes."""
    target = into / "vllm"
    target.mkdir(parents=True)
    with zipfile.ZipFile(_download("vllm", work, python)) as wheel:
        name = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
        (target / "causal_conv1d.py").write_bytes(wheel.read(name))


def fetch_fla(into: Path, work: Path, python: str, arch: str) -> None:
    """The convolution of fla-core and what it imports, with einops."""
    with zipfile.ZipFile(_download("fla-core", work, python)) as wheel:
        kept = ("fla/modules/causal_conv1d/", "fla/ops/utils/", "fla/utils/", "fla/backends")
        for name in wheel.namelist():
            if name.startswith(kept):
                wheel.extract(name, into)
    with zipfile.ZipFile(_download("einops", work, python)) as wheel:
        wheel.extractall(into / "site")


def fetch_dao(into: Path, work: Path, python: str, arch: str) -> None:
    """causal-conv1d's two forward kernels and its backward, compiled for one type and width."""
    if shutil.which("nvcc") is None:
        raise RuntimeError("nvcc is needed to compile it")
    # Its build script looks for CUDA even to name itself; this switch of its own stops that.
    environment = os.environ | {"CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--no-binary", "causal-conv1d", "--dest", str(work), f"causal-conv1d=={VERSIONS['causal-conv1d']}"),
        env=environment,
    )
    (archive,) = work.glob("causal_conv1d-*.tar.gz")
    source = work / "causal_conv1d"
    with tarfile.open(archive) as package:
        package.extractall(source, filter="data")
    (csrc,) = source.glob("*/csrc")
    build = work / "build"
    (build / "c10" / "cuda").mkdir(parents=True)
    for name in ("causal_conv1d.h", "causal_conv1d_common.h", "static_switch.h"):
        shutil.copy(csrc / name, build)
    for name in ("fwd", "update", "bwd"):
        text = (csrc / f"causal_conv1d_{name}.cu").read_text()
        (build / f"{name}.cu").write_text(re.sub(r"^template void .*;$", "", text, flags=re.MULTILINE))
    # The launch check is torch's; without it the library needs no torch.
    (build / "c10" / "cuda" / "CUDAException.h").write_text("#pragma once\n#define C10_CUDA_KERNEL_LAUNCH_CHECK()\n")
    (build / "entry.cu").write_text(_DAO_ENTRY)
    (build / "backward_entry.cu").write_text(_DAO_BACKWARD_ENTRY)
    target = into / "causal_conv1d"
    target.mkdir(parents=True)
    include = Path(torch.__file__).parent / "include"
    flags = ["-O3", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-std=c++20"]
    flags += ["-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"]
    flags += ["-U__CUDA_NO_BFLOAT16_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]
    for library, entry in (("libcausal_conv1d", "entry"), ("libcausal_conv1d_backward", "backward_entry")):
        _run(
            *("nvcc", "-shared", "-Xcompiler", "-fPIC", f"-arch={arch}", *flags, "-I", str(build), "-I", str(include)),
            *("-o", str(target / f"{library}.so"), str(build / f"{entry}.cu")),
        )


def fetch_flashinfer(into: Path, work: Path, python: str, arch: str) -> None:
    """FlashInfer's host file, and every kernel that the rows ask it for, compiled and linked."""
    if shutil.which("g++") is None:
        raise RuntimeError("g++ is needed to link its kernels")
    target = into / "flashinfer"
    target.mkdir(parents=True)
    with zipfile.ZipFile(_download("flashinfer-python", work, python)) as wheel:
        (target / "causal_conv1d.py").write_bytes(wheel.read("flashinfer/mamba/causal_conv1d.py"))
        (work / "kernels_of_flashinfer.py").write_bytes(wheel.read("flashinfer/cute_dsl/causal_conv1d.py"))
    wanted = flashinfer_kernels(target / "causal_conv1d.py", arch)
    dsl = work / "dsl"
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(dsl)),
        f"nvidia-cutlass-dsl[cu13]=={VERSIONS['nvidia-cutlass-dsl']}",
        f"apache-tvm-ffi=={VERSIONS['apache-tvm-ffi']}",
        "numpy",
    )
    (work / "wanted.json").write_text(json.dumps(wanted))
    (work / "compile_flashinfer.py").write_text(_COMPILE_FLASHINFER)
    paths = os.pathsep.join([str(dsl), str(dsl / "nvidia_cutlass_dsl" / "dsl_packages")])
    environment = os.environ | {"PYTHONPATH": paths, "CUTE_DSL_ARCH": f"{arch}a"}
    _run(sys.executable, "compile_flashinfer.py", cwd=work, env=environment)
    objects = sorted(str(path) for path in (work / "objects").glob("*.o"))
    _run("g++", "-shared", "-o", str(target / "kernels.so"), *objects)
    symbols = json.loads((work / "symbols.json").read_text())
    (target / "manifest.json").write_text(json.dumps({"arch": arch, "kernels": symbols}, indent=1))
    (runtime,) = (dsl / "nvidia_cutlass_dsl" / "cu13" / "lib").glob("libcute_dsl_runtime.so")
    (target / "libcute_dsl_runtime.so.xz").write_bytes(lzma.compress(runtime.read_bytes(), preset=6))
    with zipfile.ZipFile(_download("apache-tvm-ffi", work, python)) as wheel:
        for name in wheel.namelist():
            if not name.startswith(("tvm_ffi/3rdparty", "tvm_ffi/src", "tvm_ffi/include")):
                wheel.extract(name, into / "site")


def flashinfer_kernels(host_file: Path, arch: str) -> list[str]:
    """Keys of the kernels that FlashInfer asks for on all rows, found by calling its host file without kernels."""
    wanted: dict[str, None] = {}

    def record(name: str, *arguments: Any, **named: Any) -> Callable[..., None]:
        wanted[kernel_key(name, *arguments, **named)] = None
        return lambda *_: None

    digits = arch.removeprefix("sm_")
    module = flashinfer_module(host_file, record, (int(digits[:-1]), int(digits[-1])))
    with mock.patch.object(torch.cuda, "device", return_value=nullcontext()):
        for row in ROWS:
            _ask(module, row)
    return list(wanted)


def _ask(module: Any, row: Row) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    slots = row.sequences + 1
    state = (
        empty(slots, row.positions, row.channels).transpose(1, 2)
        if row.layout == "channels"
        else empty(slots, row.channels, row.positions)
    )
    module._run(
        empty(row.tokens, row.channels),
        empty(row.channels, WIDTH),
        state,
        None if row.kind == "decode" else empty(row.sequences + 1, dtype=torch.int32),
        empty(row.sequences, dtype=torch.int32),
        empty(row.sequences, dtype=torch.bool) if row.kind == "prefill" else None,
        empty(row.sequences, dtype=torch.int32) if row.kind == "speculative" else None,
        empty(row.channels),
        empty(row.tokens, row.channels),
        empty(prefill_workspace_size(row.tokens, row.sequences) or 1, dtype=torch.int32),
        row.kind == "prefill",
    )


# Runs where FlashInfer's compiler is on the path: its kernels' file, with its disk cache replaced by an export.
_COMPILE_FLASHINFER = r"""
import json, re, sys, types
from pathlib import Path

objects = Path("objects")
objects.mkdir(exist_ok=True)
last = []

def build(module, name, compile_kernel, extra_key_files=(), **options):
    symbol = re.sub(r"[^0-9a-zA-Z_]", "_", f"{module}_{name}")
    compile_kernel().export_to_c(str(objects / f"{symbol}.o"), function_name=symbol)
    last[:] = [symbol]

for name, content in (
    ("flashinfer", {"__path__": []}),
    ("flashinfer.jit", {"__path__": []}),
    ("flashinfer.jit.cute_dsl_core", {"build_and_load_cute_dsl_kernel": build}),
    ("flashinfer.cute_dsl", {"__path__": ["."]}),
):
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
import importlib.util
spec = importlib.util.spec_from_file_location("flashinfer.cute_dsl.kernels", "kernels_of_flashinfer.py")
kernels = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kernels
spec.loader.exec_module(kernels)

symbols = {}
for key in json.loads(Path("wanted.json").read_text()):
    name, arguments, named = json.loads(key)
    named = {k: tuple(v) if isinstance(v, list) else v for k, v in named}
    if name == "chunk_map":
        arch, block = arguments
        kernels.get_chunk_map_kernel(arch, 0, block)
    else:
        kernels.get_conv_kernel(*arguments[:7], 0, *arguments[7:], **named)
    symbols[key] = last[0]
Path("symbols.json").write_text(json.dumps(symbols))
"""

_FETCHERS: dict[str, Callable[[Path, Path, str, str], None]] = {
    "vllm": fetch_vllm,
    "flashinfer": fetch_flashinfer,
    "causal_conv1d": fetch_dao,
    "fla": fetch_fla,
}


def main(
    folder: Annotated[Path, typer.Argument(help="where the peers go; one that exists is replaced peer by peer")],
    only: Annotated[str, typer.Option(help="comma-separated: " + ", ".join(_FETCHERS))] = "",
    arch: Annotated[str, typer.Option(help="architecture of the compiled peers")] = "sm_90",
    python: Annotated[str, typer.Option(help="version of the interpreter that loads them")] = (
        f"{sys.version_info.major}.{sys.version_info.minor}"
    ),
) -> None:
    """Fetch the peers of the benchmarks from the package index into FOLDER."""
    console = Console()
    names = [name for name in only.split(",") if name] or list(_FETCHERS)
    failed = False
    for name in names:
        if name not in _FETCHERS:
            console.print(f"no peer {name!r}; there are: {', '.join(_FETCHERS)}")
            raise typer.Exit(2)
        shutil.rmtree(folder / name, ignore_errors=True)
        with tempfile.TemporaryDirectory() as work:
            try:
                _FETCHERS[name](folder, Path(work), python, arch)
            except (RuntimeError, OSError, KeyError, ValueError) as error:
                failed = True
                shutil.rmtree(folder / name, ignore_errors=True)
                console.print(f"{name}: not fetched: {error}", markup=False)
                continue
        console.print(f"{name}: fetched", markup=False)
    if folder.exists():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        (folder / "versions.json").write_text(json.dumps(VERSIONS | {"arch": arch, "python": python}, indent=1))
        console.print(f"{folder}: {size / 2**20:.1f} MiB", markup=False)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)

"""Owns the peers: each at its best behind one call shape, or absent with a stated reason. No peer code is kept here.

`fetch_peers.py` fills a folder with files of the published packages; the classes here load them from it, beside as
little of their packages as they need. What is changed, and why, is said at each class.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import lzma
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

if __package__ in (None, ""):  # run as a file
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import WIDTH, Row, Work
from benchmarks.timing import Call
from serving_conv import causal_conv1d_fn, causal_conv1d_update, prefill_workspace_size
from serving_conv.portable.backend import TritonBackend

__all__ = ["PEERS", "Ours", "OursTriton", "Peer", "PeerAbsent", "choose_peers"]


class PeerAbsent(Exception):
    """The peer cannot run here; the text says why."""


class Peer(Protocol):
    """One implementation.

    Attributes:
        name: as tables and `--peers` spell it.
        reads_pool: a prefill starts from the slots' windows; otherwise from zeros, and it is checked against that.
        writes_pool: the slots are left as ours leaves them.
    """

    name: str
    reads_pool: bool
    writes_pool: bool

    def refuses(self, row: Row) -> str | None:
        """Why this peer has no such call, or None."""

    def load(self, folder: Path) -> None:
        """Make the peer ready to be called.

        Raises:
            PeerAbsent: it cannot run here.
        """

    def calls(self, work: Work) -> list[Call]:
        """One call for each buffer of the rotation, with everything prepared that a serving engine prepares."""

    def compiles(self, row: Row) -> list[str]:
        """Names of what the first call of a row compiles, so that it can be compiled beforehand, in parallel."""


class _Peer:
    """What most peers share."""

    name = ""
    reads_pool = True
    writes_pool = True

    def refuses(self, row: Row) -> str | None:
        return None

    def load(self, folder: Path) -> None:
        return None

    def compiles(self, row: Row) -> list[str]:
        return []


class Ours(_Peer):
    """This repository, through its public entries, outputs and scratch preallocated."""

    name = "serving_conv"

    def calls(self, work: Work) -> list[Call]:
        """See `Peer`."""
        row = work.row
        scratch = prefill_workspace_size(row.tokens, row.sequences)
        workspace = work.x[0].new_empty(scratch, dtype=torch.int32) if scratch else None

        def prefill(i: int) -> Call:
            return lambda: causal_conv1d_fn(
                work.x[i],
                work.weight[i],
                work.state,
                work.cu_seqlens,
                work.slots[i],
                work.has_initial_state,
                bias=work.bias[i],
                out=work.out[i],
                workspace=workspace,
            )

        def update(i: int) -> Call:
            return lambda: causal_conv1d_update(
                work.x[i],
                work.weight[i],
                work.state,
                work.slots[i],
                cu_seqlens=work.cu_seqlens if row.kind == "speculative" else None,
                num_accepted_tokens=work.accepted,
                bias=work.bias[i],
                out=work.out[i],
            )

        make = prefill if row.kind == "prefill" else update
        return [make(i) for i in range(work.calls)]


class OursTriton(_Peer):
    """This repository's Triton backend, called behind the checks that the public entries make."""

    name = "serving_conv_triton"

    def refuses(self, row: Row) -> str | None:
        """See `Peer`."""
        return None if importlib.util.find_spec("triton") else "triton is not installed"

    def calls(self, work: Work) -> list[Call]:
        """See `Peer`."""
        row, backend = work.row, TritonBackend()

        def make(i: int) -> Call:
            shared: dict[str, Any] = {
                "x": work.x[i],
                "weight": work.weight[i],
                "conv_state": work.state,
                "bias": work.bias[i],
                "activation": "silu",
                "num_accepted_tokens": work.accepted,
                "out": work.out[i],
                "pad_slot_id": -1,
            }

            def call() -> Tensor:
                if row.kind == "prefill":
                    backend.prefill(
                        **shared,
                        cu_seqlens=work.cu_seqlens,
                        cache_indices=work.slots[i],
                        has_initial_state=work.has_initial_state,
                        workspace=None,
                    )
                else:
                    backend.update(
                        **shared,
                        cu_seqlens=work.cu_seqlens if row.kind == "speculative" else None,
                        state_indices=work.slots[i],
                        has_initial_state=None,
                    )
                return work.out[i]

            return call

        return [make(i) for i in range(work.calls)]


def _file(folder: Path, *parts: str) -> Path:
    path = folder.joinpath(*parts)
    if not path.exists():
        raise PeerAbsent(f"{'/'.join(parts)} is not in the peers' folder: run benchmarks/fetch_peers.py")
    return path


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    return module


@contextmanager
def _stand_ins(*modules: types.ModuleType) -> Iterator[None]:
    """Put modules where an import statement finds them, for as long as one file is being imported."""
    names = [module.__name__ for module in modules]
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def _load_file(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks its kernels' modules up
    spec.loader.exec_module(module)
    return module


def _triton() -> Any:
    try:
        return importlib.import_module("triton")
    except ImportError as error:
        raise PeerAbsent(f"Triton cannot be imported: {error}") from error


class Vllm(_Peer):
    """vLLM's Triton kernels, called as its Mamba2 layer calls them, with the prefill metadata built beforehand.

    Its file is loaded alone: the three vLLM imports it makes are answered by stand-ins with the same values. With
    and without its programmatic dependent launch, which helps it between other kernels and costs it back to back.
    """

    def __init__(self, *, dependent_launch: bool) -> None:
        self.name = "vLLM" if dependent_launch else "vLLM, no PDL"
        self._dependent_launch = dependent_launch
        self.file: Any = None

    def load(self, folder: Path) -> None:
        """See `Peer`."""
        triton = _triton()
        path = _file(folder, "vllm", "causal_conv1d.py")
        platform = types.SimpleNamespace(is_arch_support_pdl=lambda: self._dependent_launch, is_cpu=lambda: False)
        with _stand_ins(
            _module("vllm"),
            _module("vllm.platforms", current_platform=platform),
            _module("vllm.triton_utils", tl=importlib.import_module("triton.language"), triton=triton),
            _module("vllm.v1"),
            _module("vllm.v1.attention"),
            _module("vllm.v1.attention.backends"),
            _module("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0, PAD_SLOT_ID=-1),
        ):
            self.file = _load_file(f"peer_vllm_{int(self._dependent_launch)}", path)

    def calls(self, work: Work) -> list[Call]:
        """See `Peer`."""
        row, file = work.row, self.file
        metadata = self.metadata(row, work.x[0].device) if row.kind == "prefill" else None

        def prefill(i: int) -> Call:
            x = work.x[i].T

            def call() -> Tensor:
                out: Tensor = file.causal_conv1d_fn(
                    x,
                    work.weight[i],
                    work.bias[i],
                    work.state,
                    work.cu_seqlens,
                    cache_indices=work.slots[i],
                    has_initial_state=work.has_initial_state,
                    activation="silu",
                    metadata=metadata,
                )
                return out.T

            return call

        speculative = {}
        if row.kind == "speculative":
            speculative = {
                "num_accepted_tokens": work.accepted,
                "query_start_loc": work.cu_seqlens,
                "max_query_len": row.lengths[0],
            }

        def update(i: int) -> Call:
            def call() -> Tensor:
                out: Tensor = file.causal_conv1d_update(
                    work.x[i],
                    work.state,
                    work.weight[i],
                    work.bias[i],
                    "silu",
                    conv_state_indices=work.slots[i],
                    out=work.out[i],
                    **speculative,
                )
                return out

            return call

        make = prefill if row.kind == "prefill" else update
        return [make(i) for i in range(work.calls)]

    @staticmethod
    def metadata(row: Row, device: torch.device) -> Any:
        """The map from programs to (sequence, block of 8 tokens), as vLLM builds it once a step."""
        block = 8
        pairs = [
            (sequence, chunk) for sequence, length in enumerate(row.lengths) for chunk in range(-(-length // block))
        ]
        sequence_of, chunk_of = torch.tensor(pairs, dtype=torch.int32, device=device).T.contiguous().unbind(0)
        entry = {
            "tot": len(pairs),
            "mlist": None,
            "mlist_len": len(pairs),
            "offsetlist": None,
            "batch_ptr": sequence_of,
            "token_chunk_offset_ptr": chunk_of,
        }
        return types.SimpleNamespace(nums_dict={block: entry}, batch_ptr=sequence_of, token_chunk_offset_ptr=chunk_of)

    def compiles(self, row: Row) -> list[str]:
        """See `Peer`: sizes and strides are constants of its kernels."""
        if row.kind == "prefill":
            return [f"prefill C{row.channels}"]
        # Triton also compiles apart what divides by 16, and 1.
        count = "one" if row.sequences == 1 else f"{row.sequences % 16 == 0}"
        return [f"{row.kind} C{row.channels} {row.layout} {count}"]


Provider = Callable[..., Callable[..., Any]]


def flashinfer_module(path: Path, kernel: Provider, capability: tuple[int, int] | None = None) -> Any:
    """FlashInfer's host file with its compiler replaced.

    Its own checks, choices and launch order stay; the decorators (logging, and the check that allows sm_100 and
    sm_103 only) do nothing, and `kernel(name, *arguments)` gives the compiled kernels. The device's number is taken
    out of the arguments.
    """

    def same(function: Any) -> Any:
        return function

    def conv(*arguments: Any, **named: Any) -> Any:
        return kernel("conv", *arguments[:7], *arguments[8:], **named)

    def chunk_map(arch: str, _: int | None, block: int) -> Any:
        return kernel("chunk_map", arch, block)

    known = capability

    def get_capability(device: torch.device) -> tuple[int, int]:
        return known or torch.cuda.get_device_capability(device)

    package = _module("flashinfer", __path__=[])
    mamba = _module("flashinfer.mamba", __path__=[])
    cute = _module("flashinfer.cute_dsl", __path__=[])
    kernels = _module(
        "flashinfer.cute_dsl.causal_conv1d", BLOCK_C=128, get_conv_kernel=conv, get_chunk_map_kernel=chunk_map
    )
    utils = _module(
        "flashinfer.utils",
        backend_requirement=lambda **_: same,
        get_compute_capability=get_capability,
        supported_compute_capability=lambda _: same,
    )
    with _stand_ins(package, mamba, cute, kernels, utils, _module("flashinfer.api_logging", flashinfer_api=same)):
        module = _load_file("flashinfer.mamba.causal_conv1d", path)
    # It imports the kernels' file inside each call.
    for stand_in in (package, mamba, cute, kernels):
        sys.modules[stand_in.__name__] = stand_in
    return module


def kernel_key(name: str, *arguments: Any, **named: Any) -> str:
    """How the manifest of compiled FlashInfer kernels spells one."""
    return json.dumps([name, list(arguments), sorted(named.items())])


class FlashInfer(_Peer):
    """FlashInfer's CuTe DSL kernels, compiled beforehand for this architecture, which it does not allow itself.

    The compiler's package is larger than the peers' folder may be, so `fetch_peers.py` compiles the kernels of all
    rows and links them into one library; only its runtime and TVM FFI are needed here.
    """

    name = "FlashInfer"

    def __init__(self) -> None:
        self._file: Any = None

    def load(self, folder: Path) -> None:
        """See `Peer`."""
        library = _file(folder, "flashinfer", "kernels.so")
        manifest = json.loads(_file(folder, "flashinfer", "manifest.json").read_text())
        _add_site(folder)
        try:
            tvm_ffi = importlib.import_module("tvm_ffi")
        except ImportError as error:
            raise PeerAbsent(f"TVM FFI cannot be imported: {error}") from error
        unpacked = Path(tempfile.mkdtemp(prefix="peers-")) / "libcute_dsl_runtime.so"
        unpacked.write_bytes(lzma.decompress(_file(folder, "flashinfer", "libcute_dsl_runtime.so.xz").read_bytes()))
        try:
            ctypes.CDLL(str(unpacked), ctypes.RTLD_GLOBAL)
            module = tvm_ffi.load_module(str(library))
        except (OSError, RuntimeError) as error:
            raise PeerAbsent(f"its library cannot be loaded: {error}") from error
        known: dict[str, Any] = {}

        def kernel(name: str, *arguments: Any, **named: Any) -> Any:
            key = kernel_key(name, *arguments, **named)
            if key not in known:
                if key not in manifest["kernels"]:
                    raise PeerAbsent(f"not compiled beforehand: {key}")
                known[key] = module.get_function(manifest["kernels"][key])
            return known[key]

        self._file = flashinfer_module(_file(folder, "flashinfer", "causal_conv1d.py"), kernel)

    def calls(self, work: Work) -> list[Call]:
        """See `Peer`."""
        row, file = work.row, self._file
        workspace = work.x[0].new_empty(prefill_workspace_size(row.tokens, row.sequences) or 1, dtype=torch.int32)

        def prefill(i: int) -> Call:
            def call() -> Tensor:
                out: Tensor = file.causal_conv1d_fn(
                    work.x[i],
                    work.weight[i],
                    work.state,
                    work.cu_seqlens,
                    work.slots[i],
                    work.has_initial_state,
                    bias=work.bias[i],
                    out=work.out[i],
                    workspace=workspace,
                )
                return out

            return call

        def update(i: int) -> Call:
            def call() -> Tensor:
                out: Tensor = file.causal_conv1d_update(
                    work.x[i],
                    work.weight[i],
                    work.state,
                    work.slots[i],
                    cu_seqlens=work.cu_seqlens if row.kind == "speculative" else None,
                    num_accepted_tokens=work.accepted,
                    bias=work.bias[i],
                    out=work.out[i],
                )
                return out

            return call

        make = prefill if row.kind == "prefill" else update
        return [make(i) for i in range(work.calls)]


class Dao(_Peer):
    """causal-conv1d's channel-last kernels for bf16 and four taps, called without its torch binding.

    The kernels are the package's; only their instantiations for other types and widths are left out, and the call
    from the host goes through ctypes, which a captured graph does not see. Prefill has `seq_idx` and no pool.
    """

    name = "causal-conv1d"
    reads_pool = False
    writes_pool = False

    def __init__(self) -> None:
        self._library: Any = None

    def refuses(self, row: Row) -> str | None:
        """See `Peer`."""
        return "it has no speculative step" if row.kind == "speculative" else None

    def load(self, folder: Path) -> None:
        """See `Peer`."""
        path = _file(folder, "causal_conv1d", "libcausal_conv1d.so")
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise PeerAbsent(f"its library cannot be loaded: {error}") from error
        pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
        self._library.prefill.argtypes = [*[pointer] * 5, integer, integer, wide, wide, pointer]
        self._library.update.argtypes = [*[pointer] * 6, *[integer] * 3, *[wide] * 5, pointer]

    def calls(self, work: Work) -> list[Call]:
        """See `Peer`."""
        row, library = work.row, self._library
        device = work.x[0].get_device()
        owner = None
        if row.sequences > 1:
            lengths = torch.tensor(row.lengths)
            owner = torch.repeat_interleave(lengths).to(device=work.x[0].device, dtype=torch.int32)

        def prefill(i: int) -> Call:
            x, out = work.x[i], work.out[i]

            def call() -> Tensor:
                status = library.prefill(
                    x.data_ptr(),
                    work.weight[i].data_ptr(),
                    work.bias[i].data_ptr(),
                    0 if owner is None else owner.data_ptr(),
                    out.data_ptr(),
                    row.channels,
                    row.tokens,
                    x.stride(0),
                    out.stride(0),
                    torch._C._cuda_getCurrentRawStream(device),
                )
                return _launched(status, out)

            return call

        def update(i: int) -> Call:
            x, out = work.x[i], work.out[i]

            def call() -> Tensor:
                status = library.update(
                    x.data_ptr(),
                    work.weight[i].data_ptr(),
                    work.bias[i].data_ptr(),
                    out.data_ptr(),
                    work.state.data_ptr(),
                    work.slots[i].data_ptr(),
                    row.sequences,
                    row.channels,
                    row.positions,
                    x.stride(0),
                    out.stride(0),
                    *work.state.stride(),
                    torch._C._cuda_getCurrentRawStream(device),
                )
                return _launched(status, out)

            return call

        make = prefill if row.kind == "prefill" else update
        return [make(i) for i in range(work.calls)]


def _launched(status: int, out: Tensor) -> Tensor:
    if status != 0:
        raise RuntimeError(f"CUDA error {status} at the launch")
    return out


class Fla(_Peer):
    """flash-linear-attention's Triton convolution, with initial and final state, autotuned for each size.

    It keeps no pool: states are tensors `[sequences, channels, W]` of their own, so a pool of positions-contiguous
    slots is what its decode step is nearest to. Its package's `__init__` files, which import every model, are
    passed over; its autotuner takes fewer repetitions than by default.
    """

    name = "fla"
    writes_pool = False

    def __init__(self) -> None:
        self.shard: tuple[int, int] = (0, 1)  # which of its configurations are tried, for compiling beforehand
        self._ops: Any = None

    def refuses(self, row: Row) -> str | None:
        """See `Peer`."""
        if row.kind == "speculative":
            return "it has no speculative step"
        if row.kind == "decode" and row.layout == "channels":
            return "its decode state has positions contiguous"
        return None

    def load(self, folder: Path) -> None:
        """See `Peer`."""
        triton = _triton()
        root = _file(folder, "fla")
        _add_site(folder)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for name in ("fla", "fla.ops", "fla.modules", "fla.modules.causal_conv1d"):
            path = root.joinpath(*name.split(".")[1:])
            sys.modules.setdefault(name, _module(name, __path__=[str(path)], __version__="0"))
        # Context parallelism is only named in annotations here.
        sys.modules.setdefault("fla.ops.cp", _module("fla.ops.cp", FLACPContext=object))
        try:
            self._ops = importlib.import_module("fla.modules.causal_conv1d.ops")
        except ImportError as error:
            raise PeerAbsent(f"it cannot be imported: {error}") from error
        # The state kernel of a prefill is not tuned; the other two are.
        part, parts = self.shard
        for name in ("causal_conv1d_fwd_kernel", "causal_conv1d_update_kernel"):
            kernel = getattr(self._ops, name)
            while not hasattr(kernel, "configs"):
                kernel = kernel.fn
            every = kernel.__dict__.setdefault("every_config", list(kernel.configs))
            kernel.configs = every[part::parts]
            kernel.cache.clear()
            kernel.__dict__["do_bench"] = lambda call, quantiles: triton.testing.do_bench(
                call, warmup=3, rep=15, quantiles=quantiles
            )

    def calls(self, work: Work) -> list[Call]:
        """See `Peer`."""
        row, ops = work.row, self._ops
        if row.kind == "prefill":
            offsets = work.cu_seqlens.long() if row.sequences > 1 else None
            chunks = None if offsets is None else self._chunks(row, work.x[0].device)

        def state(i: int) -> Tensor:
            # The first of its W positions is never read.
            windows = work.state[work.slots[i].long()]
            return torch.nn.functional.pad(windows, (1, 0)).contiguous()

        def prefill(i: int) -> Call:
            x, initial = work.x[i][None], state(i)

            def call() -> Tensor:
                out: Tensor
                out, _ = ops.causal_conv1d_fwd(
                    x,
                    work.weight[i],
                    work.bias[i],
                    None,
                    initial_state=initial,
                    output_final_state=True,
                    activation="silu",
                    cu_seqlens=offsets,
                    chunk_indices=chunks,
                )
                return out[0]

            return call

        def update(i: int) -> Call:
            cache = state(i)

            def call() -> Tensor:
                out: Tensor
                out, _ = ops.causal_conv1d_update(
                    work.x[i], cache, weight=work.weight[i], bias=work.bias[i], activation="silu"
                )
                return out

            return call

        make = prefill if row.kind == "prefill" else update
        return [make(i) for i in range(work.calls)]

    @staticmethod
    def _chunks(row: Row, device: torch.device) -> Tensor:
        """(sequence, block of 64 tokens) of each program, which it would otherwise read back from the device."""
        pairs = [(sequence, chunk) for sequence, length in enumerate(row.lengths) for chunk in range(-(-length // 64))]
        return torch.tensor(pairs, device=device)

    def compiles(self, row: Row) -> list[str]:
        """See `Peer`: four parts of its sixteen configurations."""
        shape = f"C{row.channels} {row.sequences > 1}" if row.kind == "prefill" else f"C{row.channels}"
        return [f"{row.kind} {shape} {part}/4" for part in range(4)]


class TorchConv(_Peer):
    """torch's depthwise conv1d and SiLU on x as it likes it, `[1, channels, tokens]`: no pool, no windows."""

    name = "torch conv1d"
    reads_pool = False
    writes_pool = False

    def refuses(self, row: Row) -> str | None:
        """See `Peer`."""
        if row.kind != "prefill":
            return "it has no state"
        return None if row.sequences == 1 else "it knows one sequence"

    def calls(self, work: Work) -> list[Call]:
        """See `Peer`."""

        def make(i: int) -> Call:
            x = work.x[i].T.contiguous()[None]
            weight = work.weight[i][:, None]

            def call() -> Tensor:
                summed = torch.nn.functional.conv1d(
                    x, weight, work.bias[i], padding=WIDTH - 1, groups=work.row.channels
                )
                return torch.nn.functional.silu(summed[0, :, : work.row.tokens], inplace=True).T

            return call

        return [make(i) for i in range(work.calls)]


def _add_site(folder: Path) -> None:
    """Make the peers' few dependencies importable, behind whatever is installed."""
    site = str(folder / "site")
    if site not in sys.path:
        sys.path.append(site)


PEERS: tuple[Peer, ...] = (
    OursTriton(),
    Vllm(dependent_launch=True),
    Vllm(dependent_launch=False),
    FlashInfer(),
    Dao(),
    Fla(),
    TorchConv(),
)


def choose_peers(names: str) -> tuple[Peer, ...]:
    """Peers whose names start with one of the comma-separated `names`; empty means all, `none` means none.

    Raises:
        ValueError: a name that fits no peer.
    """
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    if wanted == ["none"]:
        return ()
    for name in wanted:
        if not any(peer.name.lower().startswith(name) for peer in PEERS):
            raise ValueError(f"no peer starts with {name!r}; there are: {', '.join(peer.name for peer in PEERS)}")
    return tuple(p for p in PEERS if not wanted or any(p.name.lower().startswith(name) for name in wanted))

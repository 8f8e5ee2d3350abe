"""Owns the convolution of a sequence that is cut over ranks: `causal_conv1d_cp`, forward and backward.

Forward: the shard's last W-1 rows leave, the whole shard is convolved as if nothing lay before it, and when the
halo is there the first W-1 rows are convolved again, with it. Backward: the halo's gradient needs the first W-1 rows
only, so it leaves first; then comes everything else; when the right neighbour's gradient is there the last W-1 rows
of dx are computed again, with it. So both exchanges hide behind the long part, and one row is computed twice at most.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from serving_conv.errors import ContractError
from serving_conv.ops import LIBRARY, needs_dispatch, register_operator
from serving_conv.settings import SETTINGS
from serving_conv.training.agreement import agree
from serving_conv.training.autograd import eager_function, fake_gradient, filled, first_derivative
from serving_conv.training.checks import check_convolution, check_global_seq_idx
from serving_conv.training.determinism import deterministic_reduction
from serving_conv.training.halo import Neighbours, resolve_group
from serving_conv.training.kernels import convolve, gradients
from serving_conv.training.sequences import offsets_of, reaches_back

__all__ = ["causal_conv1d_cp"]


def causal_conv1d_cp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cp_group: dist.ProcessGroup,
    global_seq_idx: Tensor | None = None,
) -> Tensor:
    """Differentiable causal depthwise convolution of a sequence that is cut over the ranks of a group.

    The meaning is that of Megatron-Core's function of this name. Each rank gets the W-1 inputs before its shard from
    its left neighbours; rank 0 starts from zeros. Shards may be of any length, 0 included, and shorter than W-1: the
    halo then spans several ranks. Every rank of the group must make the call, and its backward, in the same order.

    Gradients: dx is this rank's shard of the whole sequence's. dweight and dbias are the sums over this rank's rows;
    the sum over the group is the whole sequence's, as with any parameter that ranks replicate. They are
    bit-reproducible when `torch.use_deterministic_algorithms(True)` or `CAUSAL_CONV1D_DETERMINISTIC=1` asks for it.

    Args:
        x: `[B, T, D]` bf16, fp16, fp32 or float64, this rank's contiguous shard of the tokens, any strides.
        weight: `[D, W]` contiguous, 2 to 8 taps; types as of `causal_conv1d`.
        bias: `[D]` or None.
        activation: "silu" ("swish") or None.
        cp_group: process group (gloo, NCCL), its ranks ordered by shard.
        global_seq_idx: int32 `[1, ranks*T]`, the same on every rank: a nonnegative number for each token of the
            whole packed sequence; it restarts where the number changes. Needs B = 1 and shards of equal length.

    Returns:
        `[B, T, D]` in the type of x.

    Raises:
        ContractError: a shape, type, device or option breaks these rules, or the group cannot carry tensors of the
            device of x; it is a ValueError. In groups of gloo, on the first call of any other group and with
            `SERVING_CONV_DEBUG=1` the ranks compare notes first, so all of them raise if one does, or if they disagree
            on B, D, W, the type or device of x, or options. Otherwise the rank that sees an error raises, and its
            neighbours wait for it as for a rank that is gone.
        CommunicationError: under gloo, a neighbour is gone, or silent for longer than the group's timeout. NCCL raises
            it only for what it refuses at once: after a timeout its watchdog aborts the process, which no caller can
            catch (with `TORCH_NCCL_BLOCKING_WAIT=1` the wait raises instead).
        BackendError: see `causal_conv1d`.
        CaptureError: see `causal_conv1d`.
    """
    if torch.compiler.is_compiling() or _is_fake(x):
        _check(x, weight, bias, activation, cp_group, global_seq_idx)
    else:
        error = None
        try:
            _check(x, weight, bias, activation, cp_group, global_seq_idx)
            if cp_group.size() > 1 and not x.is_meta:
                Neighbours(cp_group).check_device(x)
        except ContractError as found:
            error = found
        agree(cp_group, error, x, weight, bias, activation, global_seq_idx, always=SETTINGS.debug)
    arguments = (x, weight, bias, global_seq_idx, activation and "silu", cp_group.group_name)
    out: Tensor
    if needs_dispatch(x):
        out, _ = torch.ops.serving_conv.conv1d_cp_forward(*arguments)
    else:
        out, _ = _CutConvolution.apply(*arguments)
    return out


def _is_fake(x: object) -> bool:
    """Whether the call computes shapes only: then no rank exchanges anything, and notes could not be read."""
    return needs_dispatch(x) and torch._guards.detect_fake_mode(x) is not None


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cp_group: dist.ProcessGroup,
    global_seq_idx: Tensor | None,
) -> None:
    check_convolution(x, weight, bias, activation)
    if global_seq_idx is not None:
        check_global_seq_idx(x, global_seq_idx, cp_group.size())


class _Shard:
    """A rank's shard and what packing says about it.

    Args:
        x: `[B, T, D]`.
        width: taps.
        global_seq_idx: int32 `[1, ranks*T]`, or None.
        neighbours: of the rank.
    """

    def __init__(self, x: Tensor, width: int, global_seq_idx: Tensor | None, neighbours: Neighbours) -> None:
        self.batches, self.rows, self.channels = x.shape
        self.halo = width - 1
        self.short = self.rows < self.halo
        self.edge = min(self.halo, self.rows)  # rows that meet the halo, and rows that the next rank's halo holds
        self.seq_idx: Tensor | None = None
        self._before: Tensor | None = None
        if global_seq_idx is not None and self.rows:
            begin = neighbours.rank * self.rows
            self.seq_idx = global_seq_idx[:, begin : begin + self.rows]
            self._before = global_seq_idx[0, max(0, begin - self.halo) : begin]

    def offsets(self) -> Tensor | None:
        """Of the whole shard's sequences; None: every batch is one."""
        return None if self.seq_idx is None else offsets_of(self.seq_idx)

    def head_offsets(self) -> Tensor | None:
        """Of the first rows, as many as meet the halo."""
        return None if self.seq_idx is None else offsets_of(self.seq_idx[:, : self.edge])

    def tail_offsets(self) -> Tensor | None:
        """Of the last rows, as many as the next rank's halo holds."""
        return None if self.seq_idx is None else offsets_of(self.seq_idx[:, self.rows - self.edge :])

    def mask_halo(self, halo: Tensor) -> Tensor:
        """Zero what belongs to another sequence than the shard's first row. `[B, W-1, D]`, inputs or gradients."""
        if self.seq_idx is None or self._before is None:
            return halo
        same = reaches_back(self._before, self.seq_idx[0, :1])
        # Fewer numbers than rows: the sequence begins inside the halo, whose first rows are zeros anyway.
        same = torch.nn.functional.pad(same, (self.halo - same.shape[0], 0))
        return torch.where(same[None, :, None], halo, 0)

    def before_tail(self, x: Tensor, halo: Tensor) -> Tensor:
        """Inputs `[B, W-1, D]` before the last rows, those of other sequences zeroed; `halo` is masked already."""
        if self.rows == self.edge:
            return halo
        begin = self.rows - self.edge
        near = x[:, max(0, begin - self.halo) : begin]
        before = torch.cat((halo[:, near.shape[1] :], near), 1)
        if self.seq_idx is None or self._before is None:
            return before
        numbers = self.seq_idx[0, max(0, begin - self.halo) : begin]
        same = reaches_back(numbers, self.seq_idx[0, begin : begin + 1])
        # The halo's rows reach the tail only through the whole shard, and then they are of its first row's sequence.
        whole = same[:1].expand(self.halo - same.shape[0])
        return torch.where(torch.cat((whole, same))[None, :, None], before, 0)

    def tail_final(self, dfinal: Tensor, offsets: Tensor | None) -> Tensor:
        """The right neighbour's gradient `[B, W-1, D]` as that of final windows `[N, D, W-1]` of the last rows."""
        windows = dfinal.transpose(1, 2)
        if offsets is None:
            return windows
        # Packed, N is the rows of the tail, most of them empty; the last that is not takes it all.
        last = (offsets[:-1] < self.edge).sum() - 1
        number = torch.arange(offsets.shape[0] - 1, device=dfinal.device)
        return torch.where((number == last)[:, None, None], windows, 0)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, global_seq_idx: Tensor | None, activation: str | None, group: str
) -> tuple[Tensor, Tensor]:
    """The output, and the masked halo `[B, W-1, D]`, which the backward needs."""
    neighbours = Neighbours(resolve_group(group))
    shard = _Shard(x, weight.shape[1], global_seq_idx, neighbours)
    shape = (shard.batches, shard.halo, shard.channels)
    halo = torch.zeros(shape, dtype=x.dtype, device=x.device)
    exchanges = halo.numel() > 0

    def run(part: Tensor, initial: Tensor | None, offsets: Tensor | None) -> Tensor:
        windows = None if initial is None else initial.transpose(1, 2)
        return convolve(part, weight, bias, windows, offsets, activation=activation, want_final=False)[0]

    receive = halo if exchanges and neighbours.has_left else None
    sends = exchanges and neighbours.has_right
    if shard.short:
        if receive is not None:
            neighbours.wait(neighbours.start(send=None, to_right=True, receive=receive, device=x.device))
        going = None
        if sends:
            outgoing = neighbours.stage(torch.cat((halo[:, shard.rows :], x), 1))
            going = neighbours.start(send=outgoing, to_right=True, receive=None, device=x.device)
        halo = shard.mask_halo(halo)
        out = run(x, halo, shard.offsets())
        if going is not None:
            neighbours.wait(going)
        return out, halo
    rows = neighbours.stage(x[:, shard.rows - shard.halo :]) if sends else None
    message = None
    if not neighbours.needs_staging(x.device):
        message = neighbours.start(send=rows, to_right=True, receive=receive, device=x.device)
    out = run(x, None, shard.offsets())
    if message is None:  # the host waits in the exchange, so the long part is queued first
        message = neighbours.start(send=rows, to_right=True, receive=receive, device=x.device)
    neighbours.wait(message)
    if receive is not None:
        halo = shard.mask_halo(halo)
        out[:, : shard.edge] = run(x[:, : shard.edge], halo, shard.head_offsets())
    return out, halo


def _backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    halo: Tensor,
    global_seq_idx: Tensor | None,
    activation: str | None,
    group: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    neighbours = Neighbours(resolve_group(group))
    shard = _Shard(x, weight.shape[1], global_seq_idx, neighbours)
    deterministic = deterministic_reduction()
    exchanges = halo.numel() > 0
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dnext = torch.zeros(halo.shape, dtype=wide, device=x.device)  # gradient of what went to the right
    receive = dnext if exchanges and neighbours.has_right else None
    sends = exchanges and neighbours.has_left

    def run(
        rows: slice, initial: Tensor, offsets: Tensor | None, dfinal: Tensor | None, *want: bool
    ) -> list[Tensor | None]:
        found = gradients(
            dout[:, rows],
            x[:, rows],
            weight,
            bias,
            initial.transpose(1, 2),
            offsets,
            dfinal,
            activation=activation,
            deterministic=deterministic,
            wanted=(want[0], want[1], want[2], want[3]),
        )
        return list(found)

    def leaving(dinitial: Tensor | None) -> Tensor | None:
        if dinitial is None:
            return None
        return neighbours.stage(shard.mask_halo(dinitial.transpose(1, 2)))

    whole = slice(0, shard.rows)
    if shard.short:
        if receive is not None:
            neighbours.wait(neighbours.start(send=None, to_right=False, receive=receive, device=x.device))
        if shard.rows == 0:
            found = run(whole, halo, None, None, *wanted, False)
            dhalo: Tensor | None = dnext.transpose(1, 2)  # nothing of it belongs here
        else:
            offsets = shard.offsets()
            *found, dhalo = run(whole, halo, offsets, shard.tail_final(dnext, offsets), *wanted, sends)
        outgoing = leaving(dhalo) if sends else None
        neighbours.wait(neighbours.start(send=outgoing, to_right=False, receive=None, device=x.device))
        return filled(found[0], x), filled(found[1], x), filled(found[2], x)
    rows = None
    if sends:
        rows = leaving(run(slice(0, shard.edge), halo, shard.head_offsets(), None, False, False, False, True)[3])
    message = None
    if not neighbours.needs_staging(x.device):
        message = neighbours.start(send=rows, to_right=False, receive=receive, device=x.device)
    found = run(whole, halo, shard.offsets(), None, *wanted, False)
    if message is None:
        message = neighbours.start(send=rows, to_right=False, receive=receive, device=x.device)
    neighbours.wait(message)
    dx = found[0]
    if receive is not None and dx is not None:
        tail = slice(shard.rows - shard.edge, shard.rows)
        offsets = shard.tail_offsets()
        last = run(
            tail, shard.before_tail(x, halo), offsets, shard.tail_final(dnext, offsets), True, False, False, False
        )[0]
        if last is not None:
            dx[:, tail] = last
    return filled(dx, x), filled(found[1], x), filled(found[2], x)


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, global_seq_idx: Tensor | None, activation: str | None, group: str
) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, x.new_empty((x.shape[0], weight.shape[1] - 1, x.shape[2]))


def _fake_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    halo: Tensor,
    global_seq_idx: Tensor | None,
    activation: str | None,
    group: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [fake_gradient(of, want, x) for of, want in zip((x, weight, bias), wanted, strict=True)]
    return grads[0], grads[1], grads[2]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, global_seq_idx, activation, group = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1], global_seq_idx)
    ctx.activation, ctx.group = activation, group
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, _dhalo: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, halo, global_seq_idx = ctx.saved_tensors
    if dout is None:
        # The neighbours may be waiting: a rank without a gradient still takes part.
        dout = x.new_zeros(()).expand(x.shape)
    wanted = [bool(ctx.needs_input_grad[place]) for place in range(3)]
    run = torch.ops.serving_conv.conv1d_cp_backward if needs_dispatch(x) else _backward
    found = run(dout, x, weight, bias, halo, global_seq_idx, ctx.activation, ctx.group, wanted)
    present = (True, True, bias is not None)
    grads = [g if want and there else None for g, want, there in zip(found, wanted, present, strict=True)]
    return (*grads, None, None, None)


_gradients = first_derivative(_differentiate)
_CutConvolution = eager_function("_CutConvolution", _forward, _setup, _gradients)

register_operator(
    "conv1d_cp_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? global_seq_idx, str? activation, str group) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
register_operator(
    "conv1d_cp_backward(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor halo, Tensor? global_seq_idx, "
    "str? activation, str group, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
torch.library.register_autograd("serving_conv::conv1d_cp_forward", _gradients, setup_context=_setup, lib=LIBRARY)

"""Owns how a replay's steps reach the device: by the separate entries, by one launch a layer, or by captured graphs."""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from torch import Tensor

from serving_conv import ops
from serving_conv.graphs import Bucket, StepGraphs, powers_of_two
from serving_conv.pool import Slot, StatePool
from serving_conv.replay.check import ConvLayer
from serving_conv.replay.options import ReplayOptions
from serving_conv.replay.scheduler import Entry, Work
from serving_conv.step import StepArguments, StepMetadata

__all__ = ["Launcher"]

PAD_TO = 8  # decode steps are padded up to a multiple, as the sizes of captured graphs are


class Launcher:
    """Runs the layers on the work of a step.

    Args:
        options: the settings.
        pool: states, and the preallocated outputs.
        layers: parameters of the stack.
    """

    def __init__(self, options: ReplayOptions, pool: StatePool, layers: list[ConvLayer]) -> None:
        self._options, self._pool, self._layers = options, pool, layers
        dtype, device = options.torch_dtype, pool.device
        most_rows = len(pool.outputs[0])
        self._outputs = [
            output if output.dtype == dtype else torch.empty(most_rows, options.channels, dtype=dtype, device=device)
            for output in pool.outputs
        ]
        # Where the layers before would have left their results.
        self._inputs = [torch.zeros_like(output) for output in self._outputs]
        self._metadata = {
            entry: StepMetadata(options.max_sequences, device, pad_slot_id=pool.pad_slot_id) for entry in Entry
        }
        self._step = StepMetadata(options.max_sequences, device, pad_slot_id=pool.pad_slot_id, drafts=True)
        self._graphs: tuple[StepGraphs, StepGraphs] | None = None
        if options.launch == "graphs":
            self._graphs = self._capture(most_rows)

    def run(
        self, works: list[Work], inputs: Tensor, slots: Several[Slot], history: list[bool], accepted: list[int]
    ) -> Tensor:
        """Run one step, or the part of it that goes through one entry.

        Args:
            works: of one entry if the entries are launched apart.
            inputs: `[rows, layers, channels]` on the host.
            slots: of each work.
            history: whether its slot holds its history.
            accepted: its accepted count.

        Returns:
            `[layers, rows, channels]` on the device, a copy.
        """
        rows, count, most = inputs.shape[0], len(works), self._options.max_sequences
        on_device = inputs.to(self._pool.device)
        for index, kept in enumerate(self._inputs):
            kept[:rows].copy_(on_device[:, index])
        lengths = [work.tokens for work in works]
        entries = {work.entry for work in works}
        if entries == {Entry.DECODE} and self._options.launch != "step":
            bucket = min(-(-count // PAD_TO) * PAD_TO, most)
            step = self._metadata[Entry.DECODE].fill(lengths, slots, history, accepted, bucket=bucket)
            if self._graphs is None:
                self._update(bucket, step, counted=False)
            else:
                self._graphs[1].replay(Bucket(bucket, bucket))
        elif self._options.launch == "entries":
            (entry,) = entries
            step = self._metadata[entry].fill(lengths, slots, history, accepted)
            if entry is Entry.PREFILL:
                self._prefill(rows, step)
            else:
                self._update(rows, step, counted=True)
        else:
            drafts = [work.entry is Entry.VERIFY for work in works]
            padded = most if self._graphs else None
            step = self._step.fill(lengths, slots, history, accepted, speculative=drafts, bucket=padded)
            if self._graphs is None:
                self._all(rows, step)
            else:
                chosen = self._graphs[0].bucket_for(rows, most)
                assert chosen is not None, "the largest bucket is the largest step"
                self._graphs[0].replay(chosen)
        return torch.stack([output[:rows] for output in self._outputs])

    def _capture(self, most_rows: int) -> tuple[StepGraphs, StepGraphs]:
        most, decoding = self._options.max_sequences, self._metadata[Entry.DECODE]
        mixed = StepGraphs(
            lambda bucket: self._all(bucket.rows, self._step.view(bucket.sequences, bucket.rows)),
            [Bucket(rows, most) for rows in powers_of_two(min(PAD_TO, most_rows), most_rows)],
            self._pool.device,
        )
        decode = StepGraphs(
            lambda bucket: self._update(bucket.rows, decoding.view(bucket.sequences, bucket.rows), counted=False),
            [Bucket(size, size) for size in sorted({*range(PAD_TO, most + 1, PAD_TO), most})],
            self._pool.device,
        )
        mixed.capture()
        decode.capture()
        return mixed, decode

    def _all(self, rows: int, step: StepArguments) -> None:
        """One launch a layer, whatever the sequences are."""
        for index, layer in enumerate(self._layers):
            ops.causal_conv1d_step(
                self._inputs[index][:rows],
                layer.weight,
                self._pool.states[index],
                **step.keywords(),  # type: ignore[arg-type]
                bias=layer.bias,
                out=self._outputs[index][:rows],
                pad_slot_id=self._pool.pad_slot_id,
            )

    def _update(self, rows: int, step: StepArguments, *, counted: bool) -> None:
        """Decode: one row a sequence, no counts; counted, a speculative step."""
        for index, layer in enumerate(self._layers):
            ops.causal_conv1d_update(
                self._inputs[index][:rows],
                layer.weight,
                self._pool.states[index],
                step.slots,
                cu_seqlens=step.cu_seqlens if counted else None,
                num_accepted_tokens=step.num_accepted_tokens if counted else None,
                has_initial_state=step.has_initial_state,
                bias=layer.bias,
                out=self._outputs[index][:rows],
                pad_slot_id=self._pool.pad_slot_id,
            )

    def _prefill(self, rows: int, step: StepArguments) -> None:
        pool = self._pool
        for index, layer in enumerate(self._layers):
            ops.causal_conv1d_fn(
                self._inputs[index][:rows],
                layer.weight,
                pool.states[index],
                step.cu_seqlens,
                step.slots,
                step.has_initial_state,
                bias=layer.bias,
                num_accepted_tokens=step.num_accepted_tokens,
                out=self._outputs[index][:rows],
                workspace=pool.workspace,
                pad_slot_id=pool.pad_slot_id,
            )

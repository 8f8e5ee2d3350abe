"""Trains a small two-layer Mamba2-like model on packed documents, on one rank and on several, and compares losses.

    python docs/examples/train_context_parallel.py            # 300 steps on 1 and on 4 ranks, CPU, about a minute

Every step packs documents into one sequence of 128 tokens; a document repeats a random motif, so from its second
round on the next token can be known. With R ranks each rank holds 128/R tokens. Two things cross the edges between
ranks, and both stop at the edges of documents:
  - the W-1 inputs of the convolution: `serving_conv.causal_conv1d_cp` does all of it;
  - the state of the recurrence: each rank gathers the others' chunk states (`carried_state` below).
Parameters are replicated; their gradients are summed over the ranks, as are the losses.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from serving_conv import causal_conv1d_cp

VOCABULARY, MODEL, STATE, TAPS, LAYERS = 16, 32, 8, 4, 2
TOKENS = 128
SAME = 1e-9  # relative difference of two losses, in float64


def packed_documents(step: int) -> tuple[Tensor, Tensor]:
    """Tokens `[1, TOKENS + 1]` and the document of each; the same on every rank."""
    random = torch.Generator().manual_seed(step)
    tokens, numbers = [], []
    while len(tokens) <= TOKENS:
        motif = torch.randint(VOCABULARY, (int(torch.randint(2, 6, (), generator=random)),), generator=random).tolist()
        length = int(torch.randint(3, 60, (), generator=random))
        numbers += [(numbers[-1] + 1 if numbers else 0)] * length
        tokens += (motif * length)[:length]
    cut = slice(0, TOKENS + 1)
    return torch.tensor(tokens[cut])[None], torch.tensor(numbers[cut], dtype=torch.int32)[None]


class Gather(torch.autograd.Function):
    """`[...]` of every rank as `[ranks, ...]`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Gather."""
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Each rank's part gathers what all ranks made of it."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def carried_state(chunk_state: Tensor, chunk_decay: Tensor) -> Tensor:
    """The recurrence's state before this rank's first token, from every rank's own part and what passes through it."""
    parts = Gather.apply(torch.cat((chunk_state.flatten(), chunk_decay[None])))
    carried = mine = torch.zeros_like(chunk_state)
    for rank, part in enumerate(parts):
        if rank == dist.get_rank():
            mine = carried
        carried = part[:-1].view_as(chunk_state) + part[-1] * carried
    # Every rank must reach the gather's backward, also one that uses nothing of it.
    return mine + 0.0 * carried


class Block(nn.Module):
    """Norm, projection, causal convolution over x|B|C, decaying state, projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL)
        self.enter = nn.Linear(MODEL, MODEL + 2 * STATE + 1)
        self.taps = nn.Parameter(torch.randn(MODEL + 2 * STATE, TAPS) / TAPS)
        self.bias = nn.Parameter(torch.zeros(MODEL + 2 * STATE))
        self.leave = nn.Linear(MODEL, MODEL)

    def forward(self, hidden: Tensor, numbers: Tensor) -> Tensor:
        """Hidden `[1, T, MODEL]` of this rank's tokens, document numbers `[1, ranks*T]` of all."""
        rows, rank = hidden.shape[1], dist.get_rank()
        mixed, gate = self.enter(self.norm(hidden)).split((MODEL + 2 * STATE, 1), 2)
        mixed = causal_conv1d_cp(mixed, self.taps, self.bias, "silu", dist.group.WORLD, numbers)
        values, keys, queries = mixed[0].split((MODEL, STATE, STATE), 1)

        mine = numbers[0, rank * rows : (rank + 1) * rows]
        before = numbers[0, rank * rows - 1] if rank else torch.tensor(-1)
        decay = nn.functional.logsigmoid(gate[0, :, 0] + 2).cumsum(0)
        # Token t sees token s of its own document, decayed by all that lies between.
        sees = (mine[:, None] == mine) & torch.ones(rows, rows, dtype=torch.bool).tril()
        weights = torch.where(sees, (decay[:, None] - decay).clamp(max=0).exp(), 0)
        result = ((queries @ keys.T) * weights) @ values
        of_last = torch.where(mine == mine[-1], (decay[-1] - decay).exp(), 0)
        through = torch.where(mine[-1] == before, decay[-1].exp(), 0)
        carried = carried_state((keys * of_last[:, None]).T @ values, through)
        result = result + torch.where(mine == before, decay.exp(), 0)[:, None] * (queries @ carried)
        return hidden + self.leave(result)[None]


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, MODEL)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(MODEL, VOCABULARY)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        """Logits `[1, T, VOCABULARY]` of this rank's tokens."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, numbers)
        return self.head(hidden)


def train(rank: int, ranks: int, file: str, steps: int, answers: Any) -> None:
    """One rank: train, and hand back the losses of the whole sequence."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # so that only mistakes show, not the order of sums
    torch.manual_seed(0)
    os.environ["CAUSAL_CONV1D_DETERMINISTIC"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens, numbers = packed_documents(step)
        shard = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
        logits = model(tokens[:, shard], numbers[:, :TOKENS])
        targets = tokens[0, 1:][shard]
        loss = nn.functional.cross_entropy(logits[0], targets, reduction="sum") / TOKENS
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        optimizer.step()
        losses.append(float(whole))
    if rank == 0:
        answers.put(losses)
    dist.destroy_process_group()


def run(ranks: int, steps: int) -> list[float]:
    """The losses of a training run on so many processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "group")
        started = [
            context.Process(target=train, args=(rank, ranks, file, steps, answers), daemon=True)
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        losses: list[float] = answers.get(timeout=600)
        for process in started:
            process.join()
    return losses


def main(
    steps: Annotated[int, typer.Option(help="of training")] = 300,
    ranks: Annotated[int, typer.Option(help="processes that share the sequence")] = 4,
) -> None:
    """Train on one rank and on several; exit 1 if their losses differ."""
    console = Console()
    if ranks < 1 or TOKENS % ranks:
        console.print(f"ranks: got {ranks}; wanted a divisor of {TOKENS}")
        raise typer.Exit(2)
    with console.status(f"{steps} steps on 1 rank"):
        alone = run(1, steps)
    with console.status(f"{steps} steps on {ranks} ranks"):
        shared = run(ranks, steps)
    table = Table("step", "loss, 1 rank", f"loss, {ranks} ranks")
    for step in sorted({*range(0, steps, max(1, steps // 6)), steps - 1}):
        table.add_row(str(step), f"{alone[step]:.9f}", f"{shared[step]:.9f}")
    console.print(table)
    apart = max(abs(a - b) / abs(a) for a, b in zip(alone, shared, strict=True))
    same = apart < SAME
    console.print(f"largest relative difference of {steps} losses: {apart:.1e} ({'same' if same else 'DIFFERENT'})")
    raise typer.Exit(0 if same else 1)


if __name__ == "__main__":
    typer.run(main)

"""Owns processes that form one group: each runs the functions it is sent, with the group open, until it is closed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "Ranks"]

PATIENCE = 400.0  # seconds for one function on all ranks, on a machine that is busy


class RankError(Exception):
    """What a rank raised: the type's name, the text, and the trace."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


def _serve(rank: int, size: int, file: str, timeout: float, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, arguments = task
        try:
            pipe.send((True, function(*arguments)))
        except Exception as error:
            known = tuple(base.__name__ for base in type(error).__mro__)
            pipe.send((False, (known, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Ranks:
    """A group of gloo processes on this machine.

    Args:
        size: processes.
        timeout: of the group, in seconds.
        **environment: set in each process before anything is imported.
    """

    def __init__(self, size: int, timeout: float = 300.0, **environment: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._file = tempfile.mktemp(prefix="ranks-")
        self._pipes: list[Connection] = []
        self.processes = []
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # inherited, so that it is there before the first import
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, size, self._file, timeout, theirs, environment), daemon=True
                )
                process.start()
                self._pipes.append(ours)
                self.processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)

    def try_call(self, function: Callable[..., Any], *arguments: Any, ranks: range | None = None) -> list[Any]:
        """Run a function of a module on the ranks; what each returned, or a RankError in its place."""
        chosen = range(self.size) if ranks is None else ranks
        for rank in chosen:
            self._pipes[rank].send((function, arguments))
        answers: list[Any] = []
        for rank in chosen:
            if not self._pipes[rank].poll(PATIENCE):
                raise TimeoutError(f"rank {rank} of {self.size} hangs in {function.__name__}")
            good, value = self._pipes[rank].recv()
            answers.append(value if good else RankError(" ".join(value[0]), value[1], value[2]))
        return answers

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function of a module on every rank; what each returned. Raises the first RankError."""
        answers = self.try_call(function, *arguments)
        for answer in answers:
            if isinstance(answer, RankError):
                raise answer
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        if os.path.exists(self._file):
            os.unlink(self._file)

"""Owns what happened inside an engine: calls that ran here, calls left to the engine's own function, and why.

The counters live in the package and not in the adapter, so that every process has exactly one set. They count
calls from Python: the replay of a captured graph calls nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from serving_conv.settings import SETTINGS

__all__ = ["COUNTERS", "Counters", "EngineReport", "FunctionReport", "engine_report"]


@dataclass
class FunctionReport:
    """Counts of one replaced function.

    Attributes:
        calls: calls that ran the operator.
        fallbacks: calls that the engine's own function ran, by reason.
    """

    calls: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineReport:
    """What the integration did in this process.

    Attributes:
        engine: name and version, or None while nothing is registered.
        backend: that serves the engine's device, once known.
        functions: counts by name of the replaced function.
        kept: functions left alone, with the reason.
        kernels_loaded: during warm-up.
        process: its id.
    """

    engine: str | None
    backend: str | None
    functions: dict[str, FunctionReport]
    kept: dict[str, str]
    kernels_loaded: int
    process: int

    @property
    def calls(self) -> int:
        """Calls that ran the operator."""
        return sum(function.calls for function in self.functions.values())

    @property
    def fallbacks(self) -> int:
        """Calls left to the engine's own functions."""
        return sum(sum(function.fallbacks.values()) for function in self.functions.values())

    def to_json(self) -> str:
        """One line of JSON with every field and both sums."""
        return json.dumps({**asdict(self), "calls": self.calls, "fallbacks": self.fallbacks})

    def sentence(self) -> str:
        """What the shutdown line says."""
        parts = [f"{name} {function.calls}" for name, function in self.functions.items() if function.calls]
        text = f"serving_conv: {self.calls} calls ran here ({', '.join(parts) or 'none'}), {self.fallbacks} fell back"
        reasons = [
            f"{name}: {count} x {reason}"
            for name, function in self.functions.items()
            for reason, count in function.fallbacks.items()
        ]
        return f"{text} ({'; '.join(reasons)})" if reasons else text


class Counters:
    """The process's counts; one per process, told to the log when the process ends."""

    def __init__(self) -> None:
        self.engine: str | None = None
        self.backend: str | None = None
        self.functions: dict[str, FunctionReport] = {}
        self.kept: dict[str, str] = {}
        self.kernels_loaded = 0
        self.logger = logging.getLogger("serving_conv")
        self._owner: int | None = None
        self._told: int | None = None
        self._writing = threading.Lock()
        self._written: EngineReport | None = None

    def function(self, name: str) -> FunctionReport:
        """The counts of one function, made on first use."""
        return self.functions.setdefault(name, FunctionReport())

    def fall_back(self, function: str, reason: str) -> None:
        """Count one call left to the engine, and log the reason the first time."""
        reasons = self.function(function).fallbacks
        if reason not in reasons:
            self.logger.warning("serving_conv: %s falls back to the engine's own: %s", function, reason)
        reasons[reason] = reasons.get(reason, 0) + 1

    def report(self) -> EngineReport:
        """A copy of the counts as they are now."""
        functions = {name: FunctionReport(f.calls, dict(f.fallbacks)) for name, f in self.functions.items()}
        return EngineReport(self.engine, self.backend, functions, dict(self.kept), self.kernels_loaded, os.getpid())

    def start(self) -> None:
        """Count for this process from now on; a forked child's counts start anew. Idempotent.

        With `SERVING_CONV_REPORT` the counts are written twice a second, since engines end their workers in ways
        that skip every exit handler.
        """
        if self._owner == os.getpid():
            return
        if self._owner is not None:
            for function in self.functions.values():
                function.calls = 0
                function.fallbacks.clear()
        self._owner = os.getpid()
        self._writing = threading.Lock()  # the parent's may be held by a thread that a fork does not have
        atexit.register(self.tell)
        if SETTINGS.report_directory is not None:
            threading.Thread(target=self._keep_writing, args=(SETTINGS.report_directory,), daemon=True).start()

    def tell(self) -> None:
        """Log the counts, once; for the end of the process."""
        if self._owner != os.getpid() or self._told == self._owner:
            return  # told already, or a fork that runs no layers
        self._told = self._owner
        self.logger.info("%s", self.report().sentence())
        if SETTINGS.report_directory is not None:
            self._write(SETTINGS.report_directory)

    def _keep_writing(self, folder: Path) -> None:
        while True:
            self._write(folder)
            time.sleep(0.5)

    def _write(self, folder: Path) -> None:
        with self._writing:  # so that the last to write has the newest counts
            report = self.report()
            if report != self._written:
                write_report(report, folder)
                self._written = report


def write_report(report: EngineReport, folder: Path) -> None:
    """Write one process's report as `PID.json`; a folder that cannot be written is logged, never raised."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{report.process}"
        scratch.write_text(report.to_json() + "\n", encoding="utf-8")
        scratch.replace(folder / f"{report.process}.json")  # at once, since a reader may be looking
    except OSError as error:
        logging.getLogger("serving_conv").warning("serving_conv: no report in %s: %s", folder, error)


COUNTERS = Counters()


def engine_report() -> EngineReport:
    """What the engine integration did in this process: calls, fallbacks and their reasons.

    An engine that runs its model in processes of its own has one report in each; `SERVING_CONV_REPORT` names a folder
    that collects them.
    """
    return COUNTERS.report()

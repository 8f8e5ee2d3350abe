"""One vLLM engine in this process: its tokens, and on the parent's word its step times and kernels.

Started by `benchmarks.engine`, which says what a run is; not meant to be called by hand.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine_models import draw_weights, write_config

LENGTHS = (2, 3, 17, 64, 128, 700, 1500, 3000)  # no prompt of one token: stock GDN does not repeat itself there
PREFILLS = {"1x700": (700,), "1x3000": (3000,), "8 mixed": LENGTHS}
DECODES = (1, 8, 64, 256)
NEW_TOKENS = 32
MIXED = 64  # generating sequences that a prompt of 700 tokens joins
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS, MIXED_STEPS = 6, 32, 16, 8
_CONV = ("causal_conv1d", "conv_prefill", "conv_update")
_LONGEST_WAIT = 400.0


class Engine:
    """A loaded engine and what its host side does in calls of the convolution."""

    def __init__(self, run: dict[str, Any], folder: Path) -> None:
        import torch
        import vllm
        from vllm.model_executor.model_loader import dummy_loader

        scale = run["block_scale"]
        dummy_loader.DummyModelLoader.load_weights = lambda self, model, config: draw_weights(model, scale)
        if run["first_configuration"]:
            _keep_first_configuration()
        self.register_seconds, self.load_seconds = _time_plugin()
        model = write_config(run["model"], folder)
        self.vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        begin = time.perf_counter()
        self.llm = vllm.LLM(model=str(model), **run["options"])
        self.start_seconds = time.perf_counter() - begin
        self.calls = _ConvCalls()
        self._torch, self._vllm = torch, vllm
        self._requests = 0

    def _sampling(self, tokens: int, logprobs: int | None = None) -> Any:
        return self._vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )

    def prompt(self, length: int, seed: int, *, motif: bool = False) -> dict[str, list[int]]:
        """Token ids from a seed; a motif repeats five of them."""
        source = random.Random(seed)
        ids = [source.randrange(3, self.vocabulary) for _ in range(min(length, 5) if motif else length)]
        return {"prompt_token_ids": (ids * (length // len(ids) + 1))[:length]}

    def tokens(self, prompts: list[Any], count: int) -> list[list[list[float]]]:
        """Of each prompt, for each new token: its id and log probability, and the next best's."""
        outputs = self.llm.generate(prompts, self._sampling(count, logprobs=2), use_tqdm=False)
        found = []
        for output in outputs:
            completion = output.outputs[0]
            steps = []
            for token, choices in zip(completion.token_ids, completion.logprobs, strict=True):
                others = [choice.logprob for other, choice in choices.items() if other != token]
                steps.append([token, round(choices[token].logprob, 5), round(max(others), 5)])
            found.append(steps)
        return found

    def prefill(self, lengths: tuple[int, ...]) -> dict[str, Any]:
        """A step of whole prompts, one new token each."""
        prompts = [self.prompt(length, length) for length in lengths]

        def work() -> None:
            self.llm.generate(prompts, self._sampling(1), use_tqdm=False)

        work()
        walls = [_seconds(work) for _ in range(5)]
        return {"wall_ms": round(1e3 * statistics.median(walls), 3), **_kernels(work)}

    def _add(self, prompt: Any, tokens: int) -> None:
        self._requests += 1
        self.llm.llm_engine.add_request(f"request {self._requests}", prompt, self._sampling(tokens))

    def _steps(self, most: int | None = None) -> int:
        done = 0
        while self.llm.llm_engine.has_unfinished_requests() and (most is None or done < most):
            self.llm.llm_engine.step()
            done += 1
        return done

    def _start(self, sequences: int) -> None:
        for index in range(sequences):
            self._add(self.prompt(16, 100 + index), 400)
        self._steps(WARM_STEPS)

    def _stop(self) -> None:
        self.llm.llm_engine.abort_request([f"request {number + 1}" for number in range(self._requests)])
        self._steps()

    def decode(self, sequences: int) -> dict[str, Any]:
        """A step in which every sequence generates."""
        self._start(sequences)
        walls = [_seconds(functools.partial(self._steps, TIMED_STEPS // 4)) * 4 / TIMED_STEPS for _ in range(4)]
        found = _kernels(functools.partial(self._steps, PROFILED_STEPS), PROFILED_STEPS)
        self._stop()
        return {"wall_ms": round(1e3 * statistics.median(walls), 4), **found}

    def mixed(self) -> dict[str, Any]:
        """A step in which a prompt of about 700 tokens joins 64 generating sequences.

        No two prompts timed have the same length: an engine's mixed steps hardly ever have the sizes of the one before.
        """
        self._start(MIXED)

        def work(tokens: int = 700) -> None:
            self._add(self.prompt(tokens, tokens), 1)
            self._steps(1)

        # With the plugin, the replaced functions serve every second step: two processes differ by more than the two.
        sides = ("plugin", "stock") if self.calls.replaced else ("stock",)
        walls: dict[str, list[float]] = {side: [] for side in sides}
        steps: dict[str, list[list[float]]] = {side: [] for side in sides}
        for step in range(len(sides) * MIXED_STEPS):
            side = sides[step % len(sides)]
            self.calls.start(stock=side == "stock")
            walls[side].append(_seconds(functools.partial(work, 700 + 16 * step)))
            steps[side].append([1e6 * seconds for seconds in self.calls.seconds])
        self.calls.start(stock=sides[0] == "stock")
        own, sums = steps[sides[0]], {side: [sum(calls) for calls in steps[side]] for side in sides}
        found = _kernels(work)
        with self.calls.watching_synchronisations():
            work()
        self._stop()
        return {
            "wall_ms": round(1e3 * statistics.median(walls[sides[0]]), 3),
            "conv_calls": statistics.median(len(calls) for calls in own),
            "conv_host_us": round(statistics.median(sums[sides[0]]), 1),
            "conv_host_stock_us": round(statistics.median(sums["stock"]), 1),
            "conv_host_first_step_us": round(sums[sides[0]][0], 1),
            "conv_host_calls_us": _medians(own),
            "conv_host_stock_calls_us": _medians(steps["stock"]),
            "conv_synchronisations": self.calls.synchronisations,
            **found,
        }

    def accepted(self) -> dict[str, float]:
        """Drafts proposed and accepted so far; empty without speculation."""
        return {
            metric.name.removeprefix("vllm:spec_decode_"): metric.value
            for metric in self.llm.get_metrics()
            if "spec_decode" in metric.name and hasattr(metric, "value")
        }


def _medians(steps: list[list[float]]) -> list[float]:
    """Of each call of a step, in order."""
    return [round(statistics.median(places), 1) for places in zip(*steps, strict=False)]


def _keep_first_configuration() -> None:
    """Let Triton's autotuner keep the first configuration: equal in every process, and quick to start."""
    import triton

    tune = triton.autotune
    triton.autotune = lambda configs, *arguments, **options: tune(configs[:1], *arguments, **options)


def _time_plugin() -> tuple[float, list[float]]:
    """Seconds that the plugin takes to register, behind vLLM's own import; and, later, to load its kernels."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d  # noqa: F401  (vLLM imports it anyway)
    from vllm.v1.attention.backends import utils  # noqa: F401

    begin = time.perf_counter()
    from serving_conv.engine_integration import vllm_plugin

    vllm_plugin.register()
    registered = time.perf_counter() - begin
    loads: list[float] = []
    load = vllm_plugin.load_kernels

    def timed(config: Any) -> int:
        begin = time.perf_counter()
        count: int = load(config)
        loads.append(time.perf_counter() - begin)
        return count

    vllm_plugin.load_kernels = timed
    return registered, loads


class _ConvCalls:
    """Wraps the names that layers call, in place, and keeps the wall time of each call from Python.

    Attributes:
        seconds: of each call since the start.
        replaced: the plugin has put its functions in the place of vLLM's.
    """

    def __init__(self) -> None:
        from vllm.model_executor.layers.mamba.ops import causal_conv1d as module

        self.seconds: list[float] = []
        self.replaced = False
        self._stock = False
        self.synchronisations = 0
        self._watching = False
        for name in ("causal_conv1d_fn", "causal_conv1d_update"):
            original = getattr(module, name)
            self.replaced |= hasattr(original, "serving_conv_original")
            wrapped = self._timed(original)
            for other in list(sys.modules.values()):
                if getattr(other, "__name__", "").startswith("vllm."):
                    for attribute, value in list(vars(other).items()):
                        if value is original:
                            setattr(other, attribute, wrapped)

    def start(self, *, stock: bool) -> None:
        """Forget the calls so far; from now on run vLLM's own functions, or those in their place."""
        self.seconds.clear()
        self._stock = stock

    def watching_synchronisations(self) -> Any:
        """Count what waits for the device in the calls made within."""
        import contextlib

        @contextlib.contextmanager
        def watch() -> Any:
            self._watching = True
            yield
            self._watching = False

        return watch()

    def _timed(self, function: Any) -> Any:
        import torch

        stock = getattr(function, "serving_conv_original", function)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._watching:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    result = function(*arguments, **keywords)
                    torch.cuda.set_sync_debug_mode("default")
                self.synchronisations += sum("synchroniz" in str(warning.message) for warning in caught)
                return result
            chosen = stock if self._stock else function
            if chosen is not function:  # vLLM's reads a map that the plugin puts off; its step builds it elsewhere
                keywords = {name: _with_map(value) for name, value in keywords.items()}
            begin = time.perf_counter()
            result = chosen(*arguments, **keywords)
            self.seconds.append(time.perf_counter() - begin)
            return result

        return call


def _with_map(value: Any) -> Any:
    map_: Any = getattr(value, "nums_dict", None)
    return map_.like_metadata() if hasattr(map_, "like_metadata") else value


def _seconds(work: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _kernels(work: Callable[[], object], steps: int = 1) -> dict[str, Any]:
    """Kernel time of a step of the work, the convolutions' part of it, and each of their kernels."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    repeats = 1 if steps > 1 else 3
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            work()
    events = [
        event
        for event in profiled.key_averages()
        if event.device_type == DeviceType.CUDA and not event.key.startswith(("Memcpy", "Memset"))
    ]
    total = sum(event.self_device_time_total for event in events)
    conv = [event for event in events if any(name in event.key for name in _CONV)]
    if not conv:
        raise RuntimeError(f"no convolution kernel among {sorted(event.key[:60] for event in events)}")
    mine = sum(event.self_device_time_total for event in conv)
    return {
        "kernel_us": round(total / repeats / steps, 2),
        "conv_us": round(mine / repeats / steps, 3),
        "conv_share": round(mine / total, 4),
        "conv_kernels": {
            event.key[:60]: [event.count / repeats / steps, round(event.self_device_time_total / event.count, 3)]
            for event in conv
        },
    }


def _wait_for(file: Path) -> None:
    end = time.monotonic() + _LONGEST_WAIT
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"nobody made {file} in {_LONGEST_WAIT:.0f} s")
        time.sleep(0.05)


def main() -> None:
    """Run what `FOLDER/NAME.json` says; leave `NAME.ready`, wait for `NAME.go` if timed, leave `NAME.result`."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    run: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    engine = Engine(run, folder)

    import serving_conv
    from serving_conv.native import cuda

    kernels = len(cuda._kernels)
    motif = bool(run["options"].get("speculative_config"))
    prompts = [engine.prompt(length, 7 + length, motif=motif) for length in LENGTHS]
    tokens = engine.tokens(prompts, NEW_TOKENS)
    result: dict[str, Any] = {
        "start_seconds": round(engine.start_seconds, 1),
        "plugin_register_seconds": round(engine.register_seconds, 3),
        "plugin_load_seconds": round(sum(engine.load_seconds), 3),
        "tokens": tokens,
        "repeats_itself": [[t for t, *_ in s] for s in engine.tokens(prompts, NEW_TOKENS)]
        == [[t for t, *_ in s] for s in tokens],
        "drafts": engine.accepted(),
    }
    (folder / f"{name}.ready").touch()
    if run["timed"]:
        _wait_for(folder / f"{name}.go")
        result["prefill"] = {row: engine.prefill(lengths) for row, lengths in PREFILLS.items()}
        result["decode"] = {str(sequences): engine.decode(sequences) for sequences in DECODES}
        result["mixed"] = engine.mixed()
    result["kernels_compiled_after_start"] = len(cuda._kernels) - kernels
    result["report"] = json.loads(serving_conv.engine_report().to_json())
    scratch = folder / f"{name}.writing"
    scratch.write_text(json.dumps(result), encoding="utf-8")
    scratch.replace(folder / f"{name}.result")
    os._exit(0)  # an engine's own shutdown takes seconds


if __name__ == "__main__":
    main()

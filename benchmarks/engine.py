"""The real vLLM on a GPU, stock and with the plugin in one run: tokens, step times, conv kernels' share, host time.

    python -m benchmarks.engine MODEL [MODEL ...] --output engine.jsonl [--options JSON] [--speculation JSON]

A MODEL is a folder with a config.json; weights are drawn from a seed (vLLM's own dummy weights are so small that no
token would depend on the convolution). Each model runs in its own process, once with `SERVING_CONV_VLLM=0` and once
without, one after the other on the same GPU; every process adds one line of JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS = (2, 3, 17, 64, 128, 700, 1500, 3000)  # no prompt of one token: stock GDN does not repeat itself there
PREFILLS = {"1x700": (700,), "1x3000": (3000,), "8 mixed": LENGTHS}
DECODES = (1, 8, 64, 256)
ENGINE = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "seed": 0,
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}
_CONV = ("causal_conv1d", "conv_prefill", "conv_update", "conv_step")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="more options of vllm.LLM, as JSON")
    parser.add_argument("--speculation", type=json.loads, help="speculative_config, as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        (model,) = options.models
        line = json.dumps(measure(model, {**options.options, **_speculative(options.speculation)}))
        with options.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return
    for model in options.models:
        for plugin in ("0", "1"):
            command = [sys.executable, "-m", "benchmarks.engine", "--inside", str(model), "--output"]
            command += [str(options.output), "--options", json.dumps(options.options)]
            if options.speculation:
                command += ["--speculation", json.dumps(options.speculation)]
            environment = {"SERVING_CONV_VLLM": plugin, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            subprocess.run(command, check=True, env={**os.environ, **environment})


def _speculative(config: dict[str, Any] | None) -> dict[str, Any]:
    return {"speculative_config": config} if config else {}


def measure(model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One engine: everything that the two lines of a model are compared by."""
    import torch
    import vllm
    from vllm.model_executor.model_loader import dummy_loader

    import serving_conv

    dummy_loader.DummyModelLoader.load_weights = lambda self, loaded, config: draw_weights(loaded)
    started = time.perf_counter()
    llm = vllm.LLM(model=str(model), **{**ENGINE, **options})
    start_seconds = time.perf_counter() - started
    host = time_conv_calls()
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def prompts(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": _token_ids(length, length, vocabulary)} for length in lengths]

    def generate(lengths: tuple[int, ...], tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts(lengths), sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    tokens = generate(LENGTHS, 32)
    result: dict[str, Any] = {
        "model": model.name,
        "plugin": os.environ["SERVING_CONV_VLLM"] == "1",
        "vllm": vllm.__version__,
        "gpu": torch.cuda.get_device_name(),
        "options": options,
        "start_seconds": round(start_seconds, 1),
        "tokens": tokens,
        "repeats_itself": generate(LENGTHS, 32) == tokens,
        "prefill": {},
        "decode": {},
    }
    for name, lengths in PREFILLS.items():
        host.clear()
        walls = [_seconds(functools.partial(generate, lengths, 1)) for _ in range(5)]
        calls = sum(host)
        result["prefill"][name] = {
            "wall_ms": [round(1e3 * wall, 2) for wall in walls],
            "conv_host_ms_a_run": round(1e3 * calls / len(walls), 3),
            **_kernels(functools.partial(generate, lengths, 1)),
        }
    for batch in DECODES:
        lengths = (16,) * batch
        wall = {}
        for each in (8, 40):
            work = functools.partial(generate, lengths, each)
            wall[each] = statistics.median([_seconds(work) for _ in range(3)])
        result["decode"][str(batch)] = {
            "step_ms": round(1e3 * (wall[40] - wall[8]) / 32, 4),
            **_kernels(functools.partial(generate, lengths, 40)),
        }
    result["report"] = json.loads(serving_conv.engine_report().to_json())
    return result


def _token_ids(length: int, seed: int, vocabulary: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, vocabulary) for _ in range(length)]


def _seconds(work: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _kernels(work: Callable[[], object]) -> dict[str, Any]:
    """Kernel time of the work, the convolutions' part of it, and each of their kernels."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
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
    return {
        "kernel_ms": round(total / 1e3, 3),
        "conv_ms": round(sum(event.self_device_time_total for event in conv) / 1e3, 4),
        "conv_kernels": {
            event.key[:60]: [event.count, round(event.self_device_time_total / event.count, 3)] for event in conv
        },
    }


def time_conv_calls() -> list[float]:
    """Wrap the names that layers call, in place; the list gets the wall time of each call from Python."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d as module

    times: list[float] = []

    def timed(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **keywords)
            times.append(time.perf_counter() - started)
            return result

        return call

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        original = getattr(module, name)
        wrapped = timed(original)
        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "").startswith("vllm."):
                for attribute, value in list(vars(other).items()):
                    if value is original:
                        setattr(other, attribute, wrapped)
    return times


def draw_weights(model: Any) -> None:
    """Weights of a sensible size, the same for equal names, so that tokens depend on every layer."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            source = torch.Generator(device=weight.device)
            source.manual_seed(zlib.crc32(name.encode()))
            last = name.rsplit(".", 1)[-1]
            if last == "A":
                weight.data.uniform_(-16, -1, generator=source)
            elif last == "A_log":
                weight.data.uniform_(0, math.log(16), generator=source)
            elif last == "D":
                weight.data.fill_(1)
            elif last == "dt_bias":
                weight.data.uniform_(0.001, 0.1, generator=source)
                weight.data.copy_(torch.log(torch.expm1(weight.data.float())))
            elif "norm" in name:
                weight.data.normal_(1, 0.1, generator=source)
            elif "conv1d" in name:
                weight.data.normal_(0, 0.2 if last == "bias" else 0.5, generator=source)
            elif last == "bias":
                weight.data.normal_(0, 0.1, generator=source)
            else:
                weight.data.normal_(0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5, generator=source)


if __name__ == "__main__":
    main()

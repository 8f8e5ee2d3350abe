"""Starts one real vLLM engine after another and writes what each generated: a script of its own, run by the tests.

    python drive_engines.py JOBS.json RESULTS

vLLM is imported once and each engine runs in a fork of that process. A job is an object with `name`, `model` (a
folder), `prompts` (lists of token ids, by a name; those named `alone` run one after another), and optionally
`environment`, `options` (of vllm.LLM), `tokens`, `fault` (spoil every convolution), `speculative_state` (see
state_update.py), `scores` (score the prompts too), `three_processes` (front end, engine core and worker, vLLM's
default; the prompts run twice, the second time with vLLM's own functions put back in the worker). Its result is
RESULTS/NAME.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,  # fails in the CPU build by itself: its scan returns no states per chunk
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,  # so that longer prompts come in chunks, together with decode rows
    "seed": 0,
    "disable_log_stats": False,
}


THREE_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def watch(job: dict[str, Any], seen: dict[str, int]) -> None:
    """Count initial states and accepted counts on their way to the operator; spoil the outputs if asked to."""
    from serving_conv.engine_integration import vllm_adapter

    prefill, update = vllm_adapter.causal_conv1d_fn, vllm_adapter.causal_conv1d_update

    def watched_prefill(*arguments: Any, **options: Any) -> Any:
        flags = options["has_initial_state"]
        if flags is not None and bool(flags.any()):
            seen["prefills with an initial state"] += 1
        if flags is not None and len(flags) > 1:
            seen["prefills of several prompts"] += 1
        result = prefill(*arguments, **options)
        return result.neg_() if job.get("fault") else result

    def watched_update(*arguments: Any, **options: Any) -> Any:
        counts = options["num_accepted_tokens"]
        if counts is not None:
            seen["speculative updates"] += 1
            seen["highest accepted count"] = max(seen["highest accepted count"], int(counts.max()))
        result = update(*arguments, **options)
        return result.neg_() if job.get("fault") else result

    vllm_adapter.causal_conv1d_fn, vllm_adapter.causal_conv1d_update = watched_prefill, watched_update


def tell(worker: Any) -> dict[str, Any]:
    """In a worker: its report, and which processes it and the engine core are."""
    from serving_conv import engine_report

    return {**json.loads(engine_report().to_json()), "engine core": os.getppid()}


def put_back(worker: Any) -> int:
    """In a worker: every replaced function of vLLM in its place again, as if there were no plugin."""
    replaced = [
        (module, name, value.serving_conv_original)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("vllm.")
        for name, value in list(vars(module).items())
        if isinstance(value, FunctionType) and hasattr(value, "serving_conv_original")
    ]
    for module, name, original in replaced:
        setattr(module, name, original)
    return len(replaced)


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    import serving_conv

    seen = dict.fromkeys(
        (
            "prefills with an initial state",
            "prefills of several prompts",
            "speculative updates",
            "highest accepted count",
        ),
        0,
    )
    if not job.get("three_processes"):  # the model runs elsewhere then
        watch(job, seen)
    if job.get("speculative_state"):
        sys.path.insert(0, str(Path(__file__).parent))
        import state_update

        state_update.install()
    started = time.perf_counter()
    llm = LLM(model=job["model"], **{**OPTIONS, **job.get("options", {})})
    ready = time.perf_counter()
    result: dict[str, Any] = {"seconds to start": round(ready - started, 1), "tokens": {}, "scores": {}}

    def generate(prompts: list[list[int]], tokens: int, **options: Any) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    def answers(name: str, prompts: list[list[int]]) -> list[list[int]]:
        batches = [[prompt] for prompt in prompts] if name == "alone" else [prompts]
        outputs = [output for batch in batches for output in generate(batch, job.get("tokens", 16))]
        return [list(output.outputs[0].token_ids) for output in outputs]

    for name, prompts in job["prompts"].items():
        result["tokens"][name] = answers(name, prompts)
        if job.get("scores"):
            scored = generate(prompts, 1, prompt_logprobs=0)
            result["scores"][name] = [
                [next(iter(position.values())).logprob for position in output.prompt_logprobs[1:]] for output in scored
            ]
    if job.get("three_processes"):
        with_plugin = llm.collective_rpc(tell)
        llm.collective_rpc(put_back)
        result["tokens without"] = {name: answers(name, prompts) for name, prompts in job["prompts"].items()}
        result["workers"], result["workers without"] = with_plugin, llm.collective_rpc(tell)
        result["front"] = os.getpid()
        llm.llm_engine.engine_core.shutdown()
        result["seconds to generate"] = round(time.perf_counter() - ready, 1)
        return result
    report = serving_conv.engine_report()
    result |= {
        "seconds to generate": round(time.perf_counter() - ready, 1),
        "seen": seen,
        "calls": report.calls,
        "fallbacks": {name: f.fallbacks for name, f in report.functions.items() if f.fallbacks},
        "backend": report.backend,
        "kernels loaded": report.kernels_loaded,
        "drafts accepted": sum(
            getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name.endswith("num_accepted_tokens")
        ),
    }
    return result


def main() -> None:
    jobs, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    os.environ.update(COMMON)
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401

    for job in jobs:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            log = os.open(results / f"{job['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(THREE_PROCESSES if job.get("three_processes") else {})
            os.environ.update(job.get("environment", {}))
            try:
                result = run(job)
            except BaseException:
                result = {"error": traceback.format_exc()}
            (results / f"{job['name']}.json").write_text(json.dumps(result))
            os._exit(0)
        started = time.perf_counter()
        os.waitpid(child, 0)
        print(f"{job['name']}: {time.perf_counter() - started:.1f} s", flush=True)
        with suppress(ProcessLookupError):  # what an engine of three processes has left behind, if it failed
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Adapters between engines and the operator; installed as `serving_conv.engine_integration`.

`vllm_plugin` replaces vLLM's functions, `vllm_adapter` translates its calls, `vllm_warmup` loads kernels ahead of them,
`call_sites` lists what vLLM calls where, `vllm_unit_tests` runs vLLM's own tests against the adapters, `run_command`
and `tiny_models` are `serving-conv run`. Imports here are relative, since the folder has another name as installed.
"""

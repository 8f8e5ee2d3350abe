"""Adapters between engines and the operator; installed as `serving_conv.engine_integration`.

`vllm_plugin` replaces vLLM's functions, `vllm_adapter` translates its calls, `vllm_warmup` loads kernels ahead of them,
`call_sites` lists what vLLM calls where. Imports here are relative, since the folder has another name as installed.
"""

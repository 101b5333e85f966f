"""Which requests an engine can never serve."""

from __future__ import annotations

from simmoe.simulator.config import EngineConfig
from simmoe.simulator.kv_blocks import blocks_for


def rejection_reason(config: EngineConfig, prompt_tokens: int, output_tokens: int) -> str | None:
    """Return why this request can never finish on this engine, or None if it can.

    vLLM refuses to start with a model length its KV cache cannot hold, or, with chunked prefill off, one above the
    token budget; a request beyond either is refused here one by one. The KV of the last output token is never computed.
    """
    usable = config.num_gpu_blocks - 1
    if blocks_for(prompt_tokens + output_tokens - 1, config.block_size) > usable:
        return f"prompt and output exceed the KV cache ({usable * config.block_size} tokens)"
    if not config.enable_chunked_prefill and prompt_tokens > config.max_num_batched_tokens:
        return f"prompt exceeds max_num_batched_tokens ({config.max_num_batched_tokens}) with chunked prefill off"
    return None

"""vLLM's real scheduler classes with no model behind them: outputs are made up, every decision is vLLM's own."""

from __future__ import annotations

import json
import zlib
from collections import deque
from pathlib import Path
from typing import Any

from simmoe.live.engine.prefix_salt import salted
from tests.live.tiny import TINY_OLMOE

BLOCK_SIZE = 16


def make_scheduler(folder: Path, num_gpu_blocks: int, **args: Any) -> Any:
    """Return a scheduler of the class that ``args`` name, with that many KV blocks (one is vLLM's null block)."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps({**TINY_OLMOE, "max_position_embeddings": 65536}))
    given = {"max_model_len": 4096, "block_size": BLOCK_SIZE, "enable_prefix_caching": False, "dtype": "float32"}
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **{**given, **args})
    vllm_config = config.create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = num_gpu_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=torch.float32)
    group = KVCacheGroupSpec(["layer"], spec)
    cache = KVCacheConfig(num_blocks=num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    init_none_hash(get_hash_fn_by_name("sha256"))
    return vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def make_request(
    name: str, prompt_tokens: int, output_tokens: int, k: int, arrival_s: float = 0.0, text: int | None = None
) -> Any:
    """Return vLLM's own request; it runs to exactly that many output tokens.

    Its prompt is the beginning of a text, by default one of its own, salted by its budget as the plug-in salts it.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    first = zlib.crc32(name.encode()) if text is None else 31 * text
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args={"simmoe_k": k})
    return Request(
        request_id=name,
        prompt_token_ids=[2 + (first + i) % 97 for i in range(prompt_tokens)],
        cache_salt=salted(None, k),
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_s,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256")),
    )


class Pipeline:
    """Steps through a scheduler as vLLM's engine core does, with no model: every token is a 7."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._in_flight: deque[tuple[Any, list[list[int]]]] = deque()

    def schedule(self) -> Any:
        """Compose a step and put it in flight; return vLLM's output."""
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        # a step that ends a prompt, or decodes, yields a token; a chunk before the end does not
        tokens = [[] if requests[name].is_prefill_chunk else [7] for name in output.num_scheduled_tokens]
        self._in_flight.append((output, tokens))
        return output

    def deliver(self) -> None:
        """Take in the oldest step in flight."""
        from vllm.v1.outputs import ModelRunnerOutput

        output, tokens = self._in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=tokens)
        )

    @property
    def num_in_flight(self) -> int:
        """Steps composed and not taken in."""
        return len(self._in_flight)

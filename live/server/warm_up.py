"""Warming an engine up before it serves: each budget it can step at, over all sizes of a step, and its largest batch.

Else the first steps would wait for the kernels' compiler (on an H200 0.4 to 0.8 s at a new k, and as long at the first
odd number of tokens that no graph pads), and those of a batch larger than any before for memory (10 to 40 ms).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from simmoe.live.server.budgets import K_ARG
from simmoe.live.server.upstream import Address, fetch

FIRST_TOKEN_ID = 2
"""Random prompts are drawn from here up: the ids below mean padding or an end in many vocabularies."""

_OUTPUT_TOKENS = 2
"""The first comes of the prompt, the second of a decode."""

_SHORT_TOKENS = 16
"""Of the prompts and outputs of the batch that warms up decoding."""

_LARGEST_CPU_BATCH = 128
"""A CPU waits for no memory; more would only take time."""

_TIMEOUT_S = 300.0
"""A kernel's compiler takes seconds; an engine that takes this long hangs."""

log = logging.getLogger(__name__)


class WarmUp(NamedTuple):
    """A request."""

    prompt_tokens: int
    output_tokens: int
    k: int


def warm_up_batches(facts: Mapping[str, Any], *, is_gpu: bool) -> Iterator[list[WarmUp]]:
    """Yield requests to be sent together, batch after batch.

    Args:
        facts: of the engine, see :func:`simmoe.live.server.state.engine_state`.
        is_gpu: whether it runs on a GPU, where a budget without graphs has kernels of its own.
    """
    largest, longest, k_max = facts["max_num_batched_tokens"], facts["max_model_len"] - _OUTPUT_TOKENS, facts["k_max"]
    classes = {*(1 << power for power in range((largest - 1).bit_length())), largest}
    for k in _step_ks(facts, is_gpu=is_gpu):
        sizes = set(classes)
        if is_gpu:  # Triton compiles one kernel for arguments divisible by 16 and another for those that are not
            padded = max(facts["captured_sizes"], default=0) if k in facts["captured_ks"] else 0
            sizes |= {size - 1 for size in sizes if size % 2 == 0 and size > padded + 1}
        for size in sorted(sizes):
            num_prompts = -(-size // longest)  # one, unless that is longer than the model takes
            lengths = (size // num_prompts + (i < size % num_prompts) for i in range(num_prompts))
            yield [WarmUp(length, _OUTPUT_TOKENS, k) for length in lengths]
    short = min(_SHORT_TOKENS, facts["max_model_len"] // 2)
    fit = (facts["num_gpu_blocks"] - 1) // (1 + 2 * short // facts["block_size"])
    size = min(facts["max_num_seqs"], max(1, fit), *(() if is_gpu else (_LARGEST_CPU_BATCH,)))
    yield [WarmUp(short, short, 1 + i % k_max) for i in range(size)]


def _step_ks(facts: Mapping[str, Any], *, is_gpu: bool) -> Sequence[int]:
    """Return the budgets that steps may run at, as far as kernels differ by them."""
    if not is_gpu:
        return (facts["k_max"],)
    if facts["uncaptured_k"] == "next" and facts["captured_ks"]:
        return list(facts["captured_ks"])
    return range(1, facts["k_max"] + 1)


def random_prompt(num_tokens: int, vocab_size: int) -> list[int]:
    """Return a prompt of random token ids, the same each time."""
    tokens = np.random.default_rng(num_tokens).integers(FIRST_TOKEN_ID, vocab_size, num_tokens)
    return [int(token) for token in tokens]


async def warm_up(address: Address, facts: Mapping[str, Any], *, is_gpu: bool) -> None:
    """Warm up the engine behind a server; one that refuses a request is left as warm as it is, and the log says so.

    Raises:
        OSError: the server does not answer.
    """
    for batch in warm_up_batches(facts, is_gpu=is_gpu):
        answers = await asyncio.gather(*(_serve(address, request, facts["vocab_size"]) for request in batch))
        if refusal := next(((status, body) for status, body in answers if status != 200), None):
            log.warning("%s is not warmed up: it answers %s with %d, %s", address, batch[0], *refusal)
            return


async def _serve(address: Address, request: WarmUp, vocab_size: int) -> tuple[int, str]:
    body = {
        "prompt": random_prompt(request.prompt_tokens, vocab_size), "max_tokens": request.output_tokens,
        "min_tokens": request.output_tokens, "ignore_eos": True, "vllm_xargs": {K_ARG: request.k},
    }  # fmt: skip
    data = json.dumps(body).encode()
    status, answer = await fetch(address, "/v1/completions", _TIMEOUT_S, method="POST", body=data)
    return status, answer[:300].decode("utf-8", "replace")

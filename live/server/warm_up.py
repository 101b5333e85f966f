"""Warming an engine up before it serves: each budget it can step at, over all sizes of a step, and a batch of decodes.

Else the first steps would wait for the kernels' compiler (on an H200 0.4 to 0.8 s at a new k, and as long at the first
odd number of tokens that no graph pads). What differs by the number of sequences alone is not passed from here, as they
come one by one (600 sent at once took 0.3 to 0.4 s to arrive): a worker does that before its engine is up, see
:mod:`simmoe.live.engine.row_warm_up`.
"""

from __future__ import annotations

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
"""A CPU loads nothing anew; more would only take time."""

_TIMEOUT_S = 300.0
"""A kernel's compiler takes seconds; an engine that takes this long hangs."""

log = logging.getLogger(__name__)


class WarmUp(NamedTuple):
    """A request."""

    prompt_tokens: int
    output_tokens: int
    k: int


def warm_up_batches(facts: Mapping[str, Any], *, is_gpu: bool) -> Iterator[list[WarmUp]]:
    """Yield requests to be sent together, those of a batch with the same budget and output, batch after batch.

    Each size up to the longest prompt, that one included, is one prompt: the engine cannot but run it in one step. A
    larger one is several, which it may happen to begin in more.

    Args:
        facts: of the engine, see :func:`simmoe.live.server.state.engine_state`.
        is_gpu: whether it runs on a GPU, where a budget without graphs has kernels of its own.
    """
    largest, longest, k_max = facts["max_num_batched_tokens"], facts["max_model_len"] - _OUTPUT_TOKENS, facts["k_max"]
    classes = {*(1 << power for power in range((largest - 1).bit_length())), min(longest, largest), largest}
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
    yield [WarmUp(short, short, k_max)] * size  # at one budget: a policy may part others


def _step_ks(facts: Mapping[str, Any], *, is_gpu: bool) -> Sequence[int]:
    """Return the budgets that steps may run at, as far as kernels differ by them."""
    if not is_gpu:
        return (facts["k_max"],)
    if facts["uncaptured_k"] == "next" and facts["captured_ks"]:
        return list(facts["captured_ks"])
    return range(1, facts["k_max"] + 1)


def random_prompts(batch: Sequence[WarmUp], vocab_size: int) -> list[list[int]]:
    """Return a prompt of random token ids for each request, each its own, the same each time.

    What two have in common the prefix cache would spare the engine, and its step would be as much smaller.
    """
    lengths = [request.prompt_tokens for request in batch]
    tokens = np.random.default_rng(lengths).integers(FIRST_TOKEN_ID, vocab_size, sum(lengths))
    return [prompt.tolist() for prompt in np.split(tokens, np.cumsum(lengths)[:-1])]


async def warm_up(address: Address, facts: Mapping[str, Any], *, is_gpu: bool) -> None:
    """Warm up the engine behind a server; one that refuses a request is left as warm as it is, and the log says so.

    Raises:
        OSError: the server does not answer.
    """
    for batch in warm_up_batches(facts, is_gpu=is_gpu):
        status, answer = await _serve(address, batch, facts["vocab_size"])
        if status != 200:
            log.warning("%s is not warmed up: it answers %s with %d, %s", address, batch[0], status, answer)
            return


async def _serve(address: Address, batch: Sequence[WarmUp], vocab_size: int) -> tuple[int, str]:
    """Have an engine serve a batch that one message brings, so that it has all of it at nearly the same time."""
    output_tokens = batch[0].output_tokens
    body = {
        "prompt": random_prompts(batch, vocab_size), "max_tokens": output_tokens, "min_tokens": output_tokens,
        "ignore_eos": True, "vllm_xargs": {K_ARG: batch[0].k},
    }  # fmt: skip
    data = json.dumps(body).encode()
    status, answer = await fetch(address, "/v1/completions", _TIMEOUT_S, method="POST", body=data)
    return status, answer[:300].decode("utf-8", "replace")

"""Each number of sequences a step may sample for, once before an engine serves.

The product for the logits is in no CUDA graph, and has as many rows as the step has sequences, padded to no captured
size. An H200's library has kernels of its own for each 8 rows or so; each is loaded when first asked for, and its step
then waits for the device (in recorded runs 10 to 40 ms at the first step with 65, 73, 81... sequences). vLLM's own
warm-up samples for 1, for 2, and for as many sequences as the engine may hold. This passes those between.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from simmoe.live.engine.transport import follows_budgets

ROWS_OF_A_KERNEL = 8
"""A multiple of it and the next number are the most and the least rows of a class of kernels."""

_EACH_UP_TO = 1024
"""Every number of rows up to here: where within a class the library changes its mind (at 168 as at 161) is its own
affair. Beyond, where rows take longer, both ends of each class. vLLM's default limit on an H200 is as many."""


def row_counts(limit: int) -> list[int]:
    """Return the numbers of rows to sample for, ascending, both ends of every class included.

    >>> row_counts(3), row_counts(1040)[1022:]
    ([1, 2, 3], [1023, 1024, 1025, 1032, 1033, 1040])
    """
    return [rows for rows in range(1, limit + 1) if rows <= _EACH_UP_TO or rows % ROWS_OF_A_KERNEL <= 1]


def warm_up_rows(runner: Any) -> None:
    """Have a model runner compute logits of nothing, and sample, with each number of rows that its steps may have.

    No KV block is used and nothing is scheduled, so it is for every number whatever the cache holds. All workers of an
    engine take the same numbers, as they gather logits together.

    Args:
        runner: vLLM's second model runner, its model loaded and no request there.
    """
    import torch
    from vllm.logger import init_logger

    if runner.is_pooling_model or not runner.is_last_pp_rank:
        return
    start_s = time.perf_counter()
    limit = min(runner.max_num_reqs, runner.max_num_tokens)
    # hidden[i] is the last hidden state of sequence i, [limit, hidden_size]
    hidden = torch.zeros(limit, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device)
    for rows in row_counts(limit):
        runner._dummy_sampler_run(hidden[:rows])
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - start_s
    init_logger("vllm.simmoe").info("sampled for each number of sequences up to %d, in %.1f s", limit, seconds)


def install() -> None:
    """Have workers do so right after vLLM's own warm-up of its kernels, before graphs are captured. Idempotent.

    An engine whose scheduler is none of simmoe's is left alone, and so is one that vLLM does not warm up either: with
    ``enforce_eager``, on a CPU, or under its first model runner.
    """
    from vllm.v1.worker import gpu_worker

    original = gpu_worker.warmup_kernels
    if hasattr(original, "simmoe"):
        return

    @functools.wraps(original)
    def warmup_kernels(model_runner: Any, *args: Any, **kwargs: Any) -> None:
        original(model_runner, *args, **kwargs)
        if follows_budgets(model_runner.vllm_config):
            warm_up_rows(model_runner)

    warmup_kernels.simmoe = True  # type: ignore[attr-defined]
    gpu_worker.warmup_kernels = warmup_kernels

"""Proof of the k that ran: the same model's logits at every k, in one engine and in another.

A replayed CUDA graph runs no Python that could tell its k. So probe prompts run at every k on the engine that is
measured and on one that runs eagerly, where the router reads k each time; whichever eager k an engine's logits lie
nearest to is the k that ran.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simmoe.errors import LiveError
from simmoe.live.measure.engine import MeasuredEngine, Prompt

FloatArray = npt.NDArray[np.float64]

NUM_PROBE_TOKENS = 64
NUM_OUTPUT_TOKENS = 4


async def check_captured(engine: MeasuredEngine) -> None:
    """Make sure that graphs were captured at every budget that is to be measured.

    Raises:
        LiveError: some were left out for want of memory.
    """
    told, asked = await engine.call("captured_graphs"), list(engine.setup.captured_ks)
    if engine.captured_sizes and told["captured_ks"] != asked:
        raise LiveError(
            f"graphs were captured at k = {told['captured_ks']}, not at all of {asked}: they took {told['graph_gib']} "
            f"of at most {told['graph_memory_gib']} GiB; measure fewer budgets, or smaller steps"
        )


async def probe(
    engine: MeasuredEngine, ks: Sequence[int], batches: Sequence[Sequence[int]]
) -> dict[str, dict[int, FloatArray]]:
    """Return raw logits by step kind and k.

    Args:
        engine: to ask.
        ks: budgets, all requests of a batch at the same.
        batches: prompt lengths of requests that run together, for each batch.
    Returns:
        ``{'prefill': {k: [num_requests, 64]}, 'decode': {k: [num_requests * 3, 64]}}``: logits of 64 fixed tokens after
        the prompt, and after each of three output tokens, which are the same in every run.
    """
    rng = np.random.default_rng(7)
    vocab_size = engine.llm.vllm_config.model_config.get_vocab_size()
    ids = sorted(rng.choice(np.arange(2, vocab_size), min(NUM_PROBE_TOKENS, vocab_size // 2), replace=False).tolist())
    # prompts[b][r] are the tokens of request r of batch b
    prompts = [[rng.integers(2, vocab_size, n).tolist() for n in lengths] for lengths in batches]
    result: dict[str, dict[int, FloatArray]] = {"prefill": {}, "decode": {}}
    for k in ks:
        rows: dict[str, list[list[float]]] = {"prefill": [], "decode": []}
        for batch in prompts:
            for output in await asyncio.gather(*(_logits(engine, tokens, k, ids) for tokens in batch)):
                rows["prefill"].append(output[0])
                rows["decode"] += output[1:]
        for kind, values in rows.items():
            result[kind][k] = np.array(values)
    return result


async def _logits(engine: MeasuredEngine, tokens: list[int], k: int, ids: list[int]) -> list[list[float]]:
    """Return [NUM_OUTPUT_TOKENS, len(ids)] raw logits; the output is forced to one token, which masks no raw logit."""
    prompt = Prompt(len(tokens), k, NUM_OUTPUT_TOKENS)
    sampling: dict[str, Any] = {"temperature": 0.0, "allowed_token_ids": ids[:1], "logprob_token_ids": ids}
    outputs = [output async for output in engine.stream(prompt, tokens=tokens, **sampling)]
    return [[position[i].logprob for i in ids] for position in outputs[-1].outputs[0].logprobs]


def distances(measured: dict[int, FloatArray], reference: dict[int, FloatArray]) -> FloatArray:
    """Return [measured k, reference k, probe] relative distances of centred logits, ``|a - b| / |b|``."""

    def centred(logits: FloatArray) -> FloatArray:
        result: FloatArray = logits - logits.mean(axis=1, keepdims=True)
        return result

    def distance(a: FloatArray, b: FloatArray) -> FloatArray:
        result: FloatArray = np.linalg.norm(centred(a) - centred(b), axis=1) / np.linalg.norm(centred(b), axis=1)
        return result

    return np.array([[distance(a, b) for b in reference.values()] for a in measured.values()])


def verdict(measured: dict[int, FloatArray], reference: dict[int, FloatArray]) -> tuple[bool, str]:
    """Return whether every k named is the k that ran, and a line that says what was seen.

    Rounding in bfloat16 sets every distance a floor, so neighbouring budgets differ little. Now and then it picks
    another expert: at k = 1, where one expert is all of a token, such a probe lies as far from the logits of its own k
    as from any other's, and tells nothing. So most probes of each k must lie nearest to the k named, and nearer than
    any other k's logits do; and of all probes at most 5 in 100 may be another k's, nearer to its logits than half of
    what lies between both.
    """
    table = distances(measured, reference)
    columns = np.array([list(reference).index(k) for k in measured])
    is_other = np.arange(len(reference))[None, :, None] != columns[:, None, None]
    own = np.take_along_axis(table, columns[:, None, None], axis=1)[:, 0]  # [measured k, probe]
    between = distances(reference, reference)
    to_own, from_own = (
        between.swapaxes(0, 1)[columns],
        between[columns],
    )  # relative to the named k's, and to the other's
    told = (table.argmin(axis=1) == columns[:, None]) & (own < np.where(is_other, to_own, np.inf).min(axis=1))
    others = ((table < from_own / 2) & is_other).any(axis=1)
    seen = (
        f"{told.sum()} of {told.size} probes nearest to the eager logits of the k named, of k in {list(reference)}, "
        f"{others.sum()} at another's; median relative distance to them at most {np.median(own, axis=1).max():.4f}"
    )
    return bool((told.mean(axis=1) > 0.5).all() and others.mean() <= 0.05), seen


def save(logits: dict[str, dict[int, FloatArray]], path: Any) -> None:
    """Write probe results to an ``.npz`` file."""
    arrays: dict[str, Any] = {f"{kind}/{k}": a for kind, by_k in logits.items() for k, a in by_k.items()}
    np.savez(path, **arrays)


def load(path: Any) -> dict[str, dict[int, FloatArray]]:
    """Read what :func:`save` wrote."""
    result: dict[str, dict[int, FloatArray]] = {}
    with np.load(path) as file:
        for name in file.files:
            kind, k = name.split("/")
            result.setdefault(kind, {})[int(k)] = file[name]
    return result

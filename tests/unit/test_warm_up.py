"""What an engine is made to do before it serves."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.live.server.warm_up import FIRST_TOKEN_ID, WarmUp, random_prompts, warm_up_batches

FACTS = st.fixed_dictionaries(
    {
        "k_max": st.integers(1, 32),
        "captured_ks": st.just([]) | st.just([1, 8, 32]),
        "uncaptured_k": st.sampled_from(["eager", "next"]),
        "captured_sizes": st.just([]) | st.just([1, 2, 4, 8, 512]) | st.just([1, 16384]),
        "max_num_batched_tokens": st.integers(1, 16384),
        "max_model_len": st.integers(3, 32768),
        "max_num_seqs": st.integers(1, 1024),
        "num_gpu_blocks": st.integers(3, 100_000),
        "block_size": st.sampled_from([16, 32, 128]),
    }
)


@given(FACTS, st.booleans())
def test_every_budget_runs_every_size_class_and_the_largest_batch_fits(facts: dict[str, Any], is_gpu: bool) -> None:
    *sizes, largest = warm_up_batches(facts, is_gpu=is_gpu)
    if not is_gpu:
        ks = {facts["k_max"]}
    elif facts["captured_ks"] and facts["uncaptured_k"] == "next":
        ks = set(facts["captured_ks"])
    else:
        ks = set(range(1, facts["k_max"] + 1))
    assert {request.k for batch in sizes for request in batch} == ks
    for k in ks:
        steps = [sum(request.prompt_tokens for request in batch) for batch in sizes if batch[0].k == k]
        # a class is the sizes up to twice another: none between neighbours that has not been run at
        assert steps[0] == 1
        assert all(before < after <= 2 * before for before, after in pairwise(steps))
        assert steps[-1] == facts["max_num_batched_tokens"]
        # what fits a step runs in one, however the engine is sent it: it is one prompt
        longest = min(facts["max_model_len"] - sizes[0][0].output_tokens, steps[-1])
        assert longest in steps
        assert all(len(batch) == 1 for batch in sizes if sum(r.prompt_tokens for r in batch) <= longest)
        if is_gpu:  # each class of sizes that no graph pads has an odd one too
            assert all(
                after % 2 or after - 1 in steps
                for after in steps
                if after - 1 > (max(facts["captured_sizes"], default=0) if k in facts["captured_ks"] else 0)
            )
    for batch in [*sizes, largest]:
        assert len({(r.output_tokens, r.k) for r in batch}) == 1  # as one message may ask for
        assert all(r.prompt_tokens > 0 and r.prompt_tokens + r.output_tokens <= facts["max_model_len"] for r in batch)
    blocks = sum(-(-(r.prompt_tokens + r.output_tokens) // facts["block_size"]) for r in largest)
    assert 1 <= len(largest) <= facts["max_num_seqs"]
    assert len(largest) == 1 or blocks < facts["num_gpu_blocks"]
    assert {r.k for r in largest} == {facts["k_max"]}


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.integers(FIRST_TOKEN_ID + 1, 1000))
def test_prompts_are_the_same_each_time(lengths: list[int], vocab_size: int) -> None:
    batch = [WarmUp(num_tokens, 1, 1) for num_tokens in lengths]
    prompts = random_prompts(batch, vocab_size)
    assert prompts == random_prompts(batch, vocab_size)
    assert [len(prompt) for prompt in prompts] == lengths
    assert all(FIRST_TOKEN_ID <= token < vocab_size for prompt in prompts for token in prompt)


def test_prompts_of_a_batch_share_no_prefix() -> None:
    first, second = random_prompts([WarmUp(64, 1, 1)] * 2, 32_000)
    assert first[:16] != second[:16]

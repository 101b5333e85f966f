"""Which k ran, told by logits: what proves it, what does not, and what tells nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.live.measure import proof

KS = (1, 2, 4, 8)
NUM_PROBES = 21


def reference(rng: np.random.Generator) -> dict[int, proof.FloatArray]:
    """Logits at each k: experts add up, so neighbours are nearer than far ones."""
    parts = rng.normal(size=(max(KS), NUM_PROBES, 64))
    return {k: parts[:k].mean(axis=0) for k in KS}


def measured(expected: dict[int, proof.FloatArray], rng: np.random.Generator) -> dict[int, proof.FloatArray]:
    """The same in another order of additions."""
    return {k: logits + 0.01 * logits.std() * rng.normal(size=logits.shape) for k, logits in expected.items()}


@given(st.integers(0, 2**32 - 1))
def test_what_differs_by_rounding_is_proved(seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = reference(rng)
    proved, seen = proof.verdict(measured(expected, rng), expected)
    assert proved
    assert seen.startswith(f"{len(KS) * NUM_PROBES} of {len(KS) * NUM_PROBES} probes nearest")
    assert ", 0 at another's" in seen


@given(st.integers(0, 2**32 - 1), st.sampled_from(KS), st.sampled_from(KS), st.floats(0.25, 1.0))
def test_a_k_that_is_another_for_some_of_its_probes_is_not(seed: int, named: int, ran: int, share: float) -> None:
    """Graphs of one size frozen at another k: a quarter of a k's probes are more than 5 in 100 of all."""
    rng = np.random.default_rng(seed)
    expected = reference(rng)
    found = measured(expected, rng)
    at_another = int(np.ceil(share * NUM_PROBES))
    found[named][:at_another] = measured(expected, rng)[ran][:at_another]
    assert proof.verdict(found, expected)[0] == (named == ran)


@given(st.integers(0, 2**32 - 1), st.integers(0, NUM_PROBES))
def test_probes_of_another_expert_tell_nothing(seed: int, num_flipped: int) -> None:
    """As at k = 1 of Qwen3-MoE on the GPU, whose router's one weight is 1: up to a fifth of the decode probes."""
    rng = np.random.default_rng(seed)
    expected = reference(rng)
    found = measured(expected, rng)
    found[1][:num_flipped] = rng.normal(size=(num_flipped, 64))
    proved, seen = proof.verdict(found, expected)
    assert proved == (num_flipped <= NUM_PROBES // 2)
    assert seen.startswith(f"{len(KS) * NUM_PROBES - num_flipped} of ")
    assert ", 0 at another's" in seen


@pytest.mark.parametrize("k", KS)
def test_one_k_for_all_is_not(k: int) -> None:
    rng = np.random.default_rng(7)
    expected = reference(rng)
    assert not proof.verdict(dict.fromkeys(KS, measured(expected, rng)[k]), expected)[0]

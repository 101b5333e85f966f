"""Round-robin, queue-aware and vLLM 0.32's rule against their descriptions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.policies.queue_aware import QueueAware
from simmoe.policies.round_robin import RoundRobin
from simmoe.policies.samples import SAMPLE_CONTEXT
from simmoe.policies.views import RankView, RequestView
from simmoe.policies.vllm_032 import Vllm032

REQUEST = RequestView("r", 0.0, 100, 0, 16)

#: (waiting, running, in flight, eighths of KV used); few values, so that ties are common
rank_states = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 8))


@st.composite
def deployments(draw: st.DrawFn) -> tuple[int, int, list[list[RankView]]]:
    """A front end's index, how many there are, and what it sees at each of several requests."""
    num_ranks = draw(st.integers(1, 5))
    num_front_ends = draw(st.integers(1, 4))
    front_end = draw(st.integers(0, num_front_ends - 1))
    states = draw(st.lists(st.lists(rank_states, min_size=num_ranks, max_size=num_ranks), min_size=1, max_size=8))
    views = [
        [RankView(i, w, r, flying, num_front_ends, kv / 8, 0, 0.0) for i, (w, r, flying, kv) in enumerate(ranks)]
        for ranks in states
    ]
    return front_end, num_front_ends, views


@settings(max_examples=200, deadline=None)
@given(deployments())
def test_vllm_032(deployment: tuple[int, int, list[list[RankView]]]) -> None:
    """Load is the larger of the scaled in-flight count and waiting + running; above half-full KV each waiting request
    counts more, three more when full; the scan starts at the front end's share and one further with each request."""
    front_end, num_front_ends, views = deployment
    num_ranks = len(views[0])
    context = replace(SAMPLE_CONTEXT, num_ranks=num_ranks, front_end_index=front_end, num_front_ends=num_front_ends)
    policy = Vllm032(context)
    for call, ranks in enumerate(views):
        load = {}
        for rank in ranks:
            load[rank.dp_rank] = float(max(num_front_ends * rank.num_inflight, rank.num_waiting + rank.num_running))
            if rank.kv_used > 0.5:
                load[rank.dp_rank] += 3 * rank.num_waiting * (rank.kv_used - 0.5) / 0.5
        start = (front_end * num_ranks // num_front_ends + call) % num_ranks
        tied = [rank for rank in load if load[rank] == min(load.values())]
        assert policy.route(REQUEST, ranks, 0.0) == min(tied, key=lambda rank: (rank - start) % num_ranks)


@settings(max_examples=100, deadline=None)
@given(deployments())
def test_queue_aware(deployment: tuple[int, int, list[list[RankView]]]) -> None:
    for ranks in deployment[2]:
        best = min(4 * rank.num_waiting + rank.num_running for rank in ranks)
        first = next(rank.dp_rank for rank in ranks if 4 * rank.num_waiting + rank.num_running == best)
        assert QueueAware().route(REQUEST, ranks, 0.0) == first


@settings(max_examples=50, deadline=None)
@given(deployments())
def test_round_robin_deals_evenly(deployment: tuple[int, int, list[list[RankView]]]) -> None:
    front_end, num_front_ends, views = deployment
    num_ranks = len(views[0])
    policy = RoundRobin(
        replace(SAMPLE_CONTEXT, num_ranks=num_ranks, front_end_index=front_end, num_front_ends=num_front_ends)
    )
    dealt = [policy.route(REQUEST, views[0], 0.0) for _ in range(3 * num_ranks)]
    assert set(Counter(dealt).values()) == {3}
    assert dealt[0] == front_end * num_ranks // num_front_ends

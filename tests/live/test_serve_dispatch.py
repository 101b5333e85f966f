"""What the route policy is shown live is what it is shown in the simulator; which ranks there are may change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.errors import PolicyError
from simmoe.live.server.budgets import BYTES_A_TOKEN, Budgets, parse_request, split_alias
from simmoe.live.server.dispatch import Counts, Dispatcher, Ticket
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RankView, RequestView
from simmoe.simulator.front_end import FrontEnd
from simmoe.simulator.publication import Counts as SimulatedCounts

INTERVAL_S = 1.0


def context(num_ranks: int) -> PolicyContext:
    return PolicyContext(
        prefill_s=lambda n, k: n * k * 1e-6, k_min=1, k_max=8, num_ranks=num_ranks, max_num_seqs=64,
        max_num_batched_tokens=1024,
    )  # fmt: skip


def request(k: int, name: str = "r") -> RequestView:
    return RequestView(name, 0.0, 10, 0, k)


class Recording:
    """Routes in turn and keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[RankView, ...]] = []

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        self.shown.append(tuple(ranks))
        return ranks[len(self.shown) % len(ranks)].dp_rank


class Published:
    """A simulated engine that says what it is told to say."""

    counts = SimulatedCounts(0, 0, 0.0, 0)

    def published(self, now_s: float) -> SimulatedCounts:
        return self.counts


counts_of_a_rank = st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1), st.integers(0, 8))
events = st.lists(
    st.one_of(
        st.tuples(st.just("route"), st.integers(1, 8)),
        st.tuples(st.just("finish"), st.integers(0, 99)),
        st.tuples(st.just("publish"), st.lists(counts_of_a_rank, min_size=3, max_size=3)),
    ),
    max_size=40,
)


@given(events)
def test_the_simulator_s_front_end_shows_the_same(events: list[tuple[str, object]]) -> None:
    """To the last item of every view."""
    engines, simulated, live = [Published() for _ in range(3)], Recording(), Recording()
    front_end = FrontEnd(simulated, engines, 1, INTERVAL_S, Asker(context(3)))  # type: ignore[arg-type]
    dispatcher = Dispatcher(parse_policy("queue-aware"), context(3))
    dispatcher.set_up(range(3))
    dispatcher.policy = live
    now_s, tickets = 0.0, list[Ticket]()
    for kind, what in events:
        if kind == "route":
            assert isinstance(what, int)
            ticket = dispatcher.route(request(what), 1, now_s)
            assert front_end.route(request(what), now_s) == ticket.rank
            tickets.append(ticket)
        elif kind == "finish" and tickets:
            assert isinstance(what, int)
            ticket = tickets.pop(what % len(tickets))
            dispatcher.release(ticket)
            front_end.finished(ticket.rank)
        elif kind == "publish":
            assert isinstance(what, list)
            now_s += INTERVAL_S
            for rank, counts in enumerate(what):
                engines[rank].counts = SimulatedCounts(*counts)
                dispatcher.publish(rank, Counts(*counts), dispatcher.mark(rank), now_s)
            front_end.route(request(1), now_s)  # the simulator reads publications when it next routes
            tickets.append(dispatcher.route(request(1), 1, now_s))
    assert live.shown == simulated.shown


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 8), st.integers(0, 9))
def test_an_engine_that_does_not_tell_runs_the_largest_budget_in_flight(ks: list[int], told: int, running: int) -> None:
    """Plain vLLM; one that tells is believed."""
    dispatcher = Dispatcher(parse_policy("queue-aware"), context(1))
    dispatcher.set_up([0])
    dispatcher.policy = recording = Recording()
    tickets = [dispatcher.route(request(k), 1, 0.0) for k in ks]
    for counts, k_running in (
        (Counts(0, running, 0.5), max(ks) if running else 0),
        (Counts(0, running, 0.5, told), told),
    ):
        dispatcher.publish(0, counts, dispatcher.mark(0), 1.0)
        dispatcher.route(request(1), 1, 1.0)
        assert recording.shown[-1][0].k_running == k_running
    for ticket in tickets:
        dispatcher.release(ticket)
    dispatcher.publish(0, Counts(0, 1, 0.5), dispatcher.mark(0), 2.0)
    dispatcher.route(request(1), 1, 2.0)
    assert recording.shown[-1][0].k_running == 1, "what has been released is not in flight"


def test_what_is_sent_while_an_answer_is_on_its_way_still_counts() -> None:
    dispatcher = Dispatcher(parse_policy("queue-aware"), context(1))
    dispatcher.set_up([0])
    dispatcher.policy = recording = Recording()
    dispatcher.route(request(3), 2, 0.0)
    mark = dispatcher.mark(0)
    dispatcher.route(request(5), 1, 0.1)
    dispatcher.publish(0, Counts(1, 1, 0.5), mark, 0.2)
    dispatcher.route(request(1), 1, 0.3)
    (view,) = recording.shown[-1]
    assert view == RankView(0, 2, 1, 3, 1, 0.5, 5, 0.2)


@given(st.lists(st.sets(st.integers(0, 3)), max_size=12), st.sampled_from(["lanes", "lanes,lanes=4", "vllm-0.32"]))
def test_nothing_is_sent_to_a_rank_that_is_down(ups: list[set[int]], policy: str) -> None:
    dispatcher = Dispatcher(parse_policy(policy), context(4))
    for i, up in enumerate(ups):
        dispatcher.set_up(sorted(up))
        assert bool(dispatcher.fallback_reason) == (policy == "lanes,lanes=4" and 1 < len(up) < 4)
        for k in range(1, 9) if up else ():
            assert dispatcher.route(request(k), 1, float(i)).rank in up


def test_a_policy_that_fails_counts_nothing() -> None:
    class Fails:
        def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
            return 7

    dispatcher = Dispatcher(parse_policy("queue-aware"), context(2))
    dispatcher.set_up([0, 1])
    dispatcher.policy = Fails()
    with pytest.raises(PolicyError, match="route returned 7"):
        dispatcher.route(request(1), 1, 0.0)
    assert [dispatcher.num_inflight(rank) for rank in (0, 1)] == [0, 0]


@given(st.text(min_size=1).filter(lambda name: ":k=" not in name), st.integers(-5, 50))
def test_an_alias_is_the_model_and_its_budget(name: str, k: int) -> None:
    assert split_alias(f"{name}:k={k}") == (name, str(k))
    assert split_alias(name) == (name, None)


@pytest.mark.parametrize(
    ("fields", "sequences", "tokens"),
    [
        ('"prompt": [1, 2, 3]', 1, 3),
        ('"prompt": [[1, 2], [3]]', 2, 3),
        ('"prompt": "abcde"', 1, 2),
        ('"prompt": ["abcd", "e"], "n": 3', 6, 2),
        ('"messages": [{"role": "user", "content": "abcd"}, {"content": [{"type": "text", "text": "efghi"}]}]', 1, 3),
        ('"messages": 7', 1, 0),
        ('"prompt": null', 1, 0),
    ],
)
def test_a_request_s_size(fields: str, sequences: int, tokens: int) -> None:
    assert BYTES_A_TOKEN == 4
    body = f'{{"model": "m", {fields}}}'.encode()
    parsed = parse_request(body, Budgets(k_max=8, default_k=6))
    assert (parsed.num_sequences, parsed.num_prompt_tokens, parsed.k) == (sequences, tokens, 6)
    assert parsed.body is body

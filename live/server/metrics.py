"""The router's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RouterMetrics:
    """Counters a request touches, and gauges filled in when somebody asks.

    A counter is there from the start, at 0: what appears with its first event has no rate that shows it.

    Args:
        ranks: of the replicas.
        outcomes: ways in which a request can end.
        k_max: the largest budget.
    """

    def __init__(self, ranks: Sequence[int], outcomes: Sequence[str], k_max: int) -> None:
        self.registry = registry = CollectorRegistry()

        def ranked_counter(name: str, text: str) -> Counter:
            return Counter(name, text, labelnames=("rank",), registry=registry)

        def ranked_gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, labelnames=("rank",), registry=registry)

        self.requests = Counter(
            "simmoe_requests", "Requests by how they ended.", labelnames=("outcome",), registry=registry
        )
        self.routed = ranked_counter("simmoe_routed", "Requests sent to a rank, every attempt.")
        self.failovers = ranked_counter("simmoe_failovers", "Attempts lost before their first byte, tried again.")
        self.deaths = ranked_counter("simmoe_replica_deaths", "Times a replica was found dead.")
        self.policy_errors = Counter("simmoe_policy_errors", "Requests the route policy failed on.", registry=registry)
        self.ttft = Histogram(
            "simmoe_time_to_first_event_seconds",
            "From a request's arrival to its answer's first byte on its way to the client.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.routing = Histogram(
            "simmoe_routing_seconds",
            "Reading a request and asking the policy.",
            buckets=(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 0.05),
            registry=registry,
        )
        self.budgets = Counter(
            "simmoe_requests_by_budget", "Requests by routing budget.", labelnames=("k",), registry=registry
        )
        for rank in ranks:
            for counter in (self.routed, self.failovers, self.deaths):
                counter.labels(rank)
        for outcome in outcomes:
            self.requests.labels(outcome)
        for k in range(1, k_max + 1):
            self.budgets.labels(k)
        self.up = ranked_gauge("simmoe_replica_up", "Whether requests are sent to the replica.")
        self.inflight = ranked_gauge("simmoe_inflight_requests", "Engine requests not finished.")
        self.waiting = ranked_gauge("simmoe_num_requests_waiting", "As the engine last published.")
        self.running = ranked_gauge("simmoe_num_requests_running", "As the engine last published.")
        self.kv_used = ranked_gauge("simmoe_kv_cache_usage", "Share of KV blocks in use, as last published.")
        self.fallback = Gauge(
            "simmoe_route_fallback", "Whether the policy cannot be built for the replicas up.", registry=registry
        )

    def render(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)

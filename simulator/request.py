"""One request's life inside a rank."""

from __future__ import annotations

from typing import Any

from simmoe.policies.views import RequestView
from simmoe.simulator.prefix_cache import CachedUnit


class SimRequest:
    """State the engine keeps for a request.

    Once its prompt is computed a request takes part in every composed step until its last output token, so its decode
    position is not stored: it follows from ``prefill_step`` (the step that completed the prompt) and the index of the
    step at hand. At step c > prefill_step it computes the token at position ``prefill_tokens + c - prefill_step - 1``.
    """

    __slots__ = (
        "active",
        "cached_units",
        "finish_step",
        "front_end",
        "held_blocks",
        "k_exec",
        "k_qos",
        "num_computed_tokens",
        "num_preemptions",
        "output_left",
        "prefill_step",
        "prefill_tokens",
        "prefix_hashes",
        "queue_key",
        "row",
        "view",
    )

    def __init__(
        self,
        row: int,
        view: RequestView,
        output_tokens: int,
        k_qos: int,
        front_end: int,
        prefix_hashes: tuple[int, ...],
    ) -> None:
        self.row = row
        """Row of the workload."""
        self.view = view
        """What policies see while it waits; its budget there is the one it will run at."""
        self.k_qos = k_qos
        """The budget it asked for."""
        self.k_exec = view.k_qos
        """Its budget as the deployment runs it: k_qos rounded up to the granularity."""
        self.front_end = front_end
        """The front end that sent it."""
        self.prefix_hashes = prefix_hashes
        """Hash ids of the prompt's whole leading hash blocks, with outputs once preempted; empty without a cache."""
        self.queue_key: Any = 0
        """The policy's key of its place in the waiting queue."""
        self.prefill_tokens = view.prompt_tokens
        """Tokens to compute before the next output token; grows by the outputs so far when preempted."""
        self.output_left = output_tokens
        """Output tokens still to produce from that prefill on."""
        self.num_computed_tokens = 0
        """Prefill tokens computed or found cached; stands still once decoding."""
        self.held_blocks = 0
        """KV blocks held while the prompt is being computed, cached ones included."""
        self.cached_units: list[CachedUnit] = []
        """Prefix-cache units it refers to, in prompt order."""
        self.prefill_step = -1
        """Index of the step that completes the prompt; -1 until composed."""
        self.finish_step = -1
        """Index of the step that yields the last output token; -1 until known."""
        self.active = False
        """Whether it takes part in the next step composed as a decode."""
        self.num_preemptions = 0

"""What a policy sees: frozen views of requests, of a rank's next step, and of the ranks behind a front end.

A host (the simulator, or the vLLM plug-in) owns the state and keeps the sequences of a view incrementally; they are
read-only, and valid only during the call they were passed to. No view holds a request's output length: a policy cannot
know it. Views are tuples, so that nothing can be written into them, ``object.__setattr__`` included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RequestView(NamedTuple):
    """One request as a policy may know it."""

    request_id: str
    arrival_s: float
    """When the request reached the front end, on the host's clock."""
    prompt_tokens: int
    """Tokens to compute before the next output token: the prompt, plus outputs to recompute after a preemption."""
    num_computed_tokens: int
    """Tokens whose KV is on the rank (prefix-cache hits are known only once the request runs)."""
    k_qos: int
    """The routing budget the request must at least be run at, in the deployment's units (sub-experts when split)."""


class StepView(NamedTuple):
    """One rank, just before its next step is composed."""

    now_s: float
    dp_rank: int
    waiting: Sequence[RequestView]
    """Requests that may enter, in queue order: by the policy's ``queue_key`` if it has one, else by arrival;
    preempted requests come first."""
    running: Sequence[RequestView]
    """Admitted and unfinished, oldest admission first. Items are built on access: do not loop over it each step."""
    token_budget: int
    """Tokens of the step left after what is running has taken its share."""
    max_num_seqs: int
    free_kv_blocks: int
    block_size: int
    """Tokens a KV block holds."""
    k_running: int
    """The largest budget among running requests; 0 if none runs. It already sets a floor for the step's budget."""
    oldest: RequestView | None
    """The waiting request that arrived first, whatever the queue's order; None if nothing waits."""
    num_preempted: int = 0
    """How many requests at the front of ``waiting`` were preempted; from there on the queue is sorted."""


class RankView(NamedTuple):
    """One rank as a front end knows it, possibly stale."""

    dp_rank: int
    num_waiting: int
    """Waiting requests at the last publication, plus what this front end has sent there since."""
    num_running: int
    """Running requests at the last publication."""
    num_inflight: int
    """Requests this front end has sent there and that are not finished; exact."""
    num_front_ends: int
    """Front ends that share the ranks (vLLM's client count)."""
    kv_used: float
    """Share of KV blocks in use at the last publication, 0..1."""
    k_running: int
    """Largest budget running there at the last publication; 0 if none."""
    published_s: float
    """When that publication was, on the host's clock; ``route`` is told what time it is now."""

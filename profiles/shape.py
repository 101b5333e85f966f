"""A step's shape, and the protocol every step-cost model meets."""

from __future__ import annotations

from typing import NamedTuple, Protocol

UNCAPTURED = ("eager", "next")
"""How a step runs at a budget without CUDA graphs: at that budget, its kernels launched one by one; or with the graphs
of the next larger budget that has some, which takes the host less and the device more."""


class StepShape(NamedTuple):
    """What one engine step computes; everything its cost may depend on."""

    num_prefill_tokens: int = 0
    """Prompt tokens computed, over all prompts and chunks of the step."""
    prefill_kv_pairs: int = 0
    """Query-key pairs of those tokens: a chunk of c tokens after a context of h adds c*h + c*(c+1)//2."""
    num_prefill_seqs: int = 0
    """Prompts and chunks those tokens belong to."""
    num_decode_seqs: int = 0
    """Sequences that compute one token."""
    decode_kv_tokens: int = 0
    """KV tokens those sequences attend to, the new one included, summed."""
    k_exec: int = 1
    """The budget every token of the step is routed at."""

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return self.num_prefill_tokens + self.num_decode_seqs


class DecodeLine(NamedTuple):
    """Seconds of a decode-only step at fixed sequences and budget: the device's are ``base_s + per_kv_token_s * kv``.

    Evaluated in exactly this order, in floats or in float64 arrays, that equals the part of the same shape bit for bit;
    the simulator's fast-forward rests on it. The host's part is ``floor_s``, which under asynchronous scheduling no
    step goes below; where workers of their own launch, that holds ``update_s`` besides.
    """

    base_s: float
    per_kv_token_s: float
    floor_s: float
    update_s: float = 0.0
    """Of ``floor_s``, the part that follows the step's output (see StepParts)."""
    wait_s: float = 0.0
    """How long the host launches before the device can begin (see StepParts)."""


class StepParts(NamedTuple):
    """What a step takes of the two that work on it. Under asynchronous scheduling the host's part overlaps the device's
    of other steps, and a train of like steps is as fast as the larger of both; where workers in processes of their own
    launch, as the larger of the device's part and the launch. Under synchronous scheduling, the launch alone overlaps
    the device's part, of the same step.
    """

    device_s: float
    host_s: float = 0.0
    """To compose it, to launch it, and to take in its output."""
    update_s: float = 0.0
    """Of ``host_s``, the part that follows its output: to take that in. The rest comes before it runs."""
    wait_s: float = 0.0
    """Of that rest, the part that is over before the device can begin: a graph is launched whole, nearly at the end,
    where of kernels launched one by one the first can run at once, or once the step's inputs are prepared."""

    @property
    def launch_s(self) -> float:
        """Of ``host_s``, the part that comes before its output: to compose and launch it."""
        return self.host_s - self.update_s

    @property
    def alone_s(self) -> float:
        """From when it is composed to when its output is taken in, while no other step is under way.

        No less than either part, and no more than both together.
        """
        return max(self.host_s, self.wait_s + self.device_s + self.update_s)

    @property
    def tail_s(self) -> float:
        """Of ``launch_s``, the part that the device need not wait for."""
        return self.launch_s - self.wait_s

    def on_host(self, launch_s: float, update_s: float) -> StepParts:
        """Return the parts on another host. What of a launch the device need not wait for is as long on any."""
        wait_s = max(0.0, launch_s - self.tail_s) if self.wait_s else 0.0
        return StepParts(self.device_s, launch_s + update_s, update_s, wait_s)


class StepCost(Protocol):
    """Seconds a step takes. Pure: the same shape always costs the same."""

    def step_s(self, shape: StepShape, /) -> float:
        """Return the time from the start of a step to the start of the next, host's share included; > 0."""
        ...

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return the parts of a step: ``step_s`` is the larger of both, or of a synchronous engine ``alone_s``."""
        ...

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        """Return the line a decode-only step of this many sequences follows as its KV grows.

        Its ``floor_s``, ``update_s`` and ``wait_s`` are those of the parts, the rest the device's. None but the last
        grows as sequences leave, as long as the budget stays, and that is within the launch. Asked ahead, of steps that
        may never run; a line on which one did is also asked for by ``parts_s``.
        """
        ...

    def prefill_s(self, num_tokens: int, k_exec: int, /) -> float:
        """Return T(n, k): the time of a step that computes prompt tokens alone."""
        ...


class ConstantStepCost:
    """Every step takes the same time: for theory checks and tests.

    >>> ConstantStepCost(0.5).step_s(StepShape(num_prefill_tokens=7))
    0.5
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def step_s(self, shape: StepShape, /) -> float:
        """Return the constant."""
        return self.seconds

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return all of it as the device's."""
        return StepParts(self.step_s(shape))

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        """Return a flat line."""
        return DecodeLine(self.seconds, 0.0, 0.0)

    def prefill_s(self, num_tokens: int, k_exec: int, /) -> float:
        """Return the constant."""
        return self.seconds


class LinearStepCost:
    """``base + per_pair * tokens * k_exec + per_kv * decode_kv_tokens``: the least model in which budgets matter."""

    def __init__(self, base_s: float = 4e-3, per_pair_s: float = 2.5e-7, per_kv_s: float = 2e-8) -> None:
        self.base_s = base_s
        self.per_pair_s = per_pair_s
        self.per_kv_s = per_kv_s

    def step_s(self, shape: StepShape, /) -> float:
        """Return the linear cost."""
        return (self.base_s + self.per_pair_s * (shape.num_tokens * shape.k_exec)) + self.per_kv_s * (
            shape.decode_kv_tokens
        )

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return all of it as the device's."""
        return StepParts(self.step_s(shape))

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        """Return the same cost as a line in KV tokens."""
        return DecodeLine(self.base_s + self.per_pair_s * (num_decode_seqs * k_exec), self.per_kv_s, 0.0)

    def prefill_s(self, num_tokens: int, k_exec: int, /) -> float:
        """Return the same cost for prompt tokens alone."""
        return self.base_s + self.per_pair_s * (num_tokens * k_exec)

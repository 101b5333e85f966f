"""What hosting a policy costs a step of vLLM's own scheduler, with 1,000 requests waiting and no model.

And that all of its code is counted: its plans', and its queue_key's while the engine takes newcomers in.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from simmoe.profiles.catalog import DEFAULT_PROFILE

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]

NUM_WAITING = 1000
NUM_STEPS = 100
NUM_ROUNDS = 100
"""At most, a minute or two: time to find a core left alone for one of them, half a second."""

LIMIT_S = 200e-6


@pytest.mark.parametrize("policy", ["fifo", "fixed-k", "tiers", "tiers,max_wait_s=0.5"])
def test_a_step_with_a_thousand_waiting(tmp_path: Path, policy: str) -> None:
    """Mean CPU time a step of views, the policy's own code and the check of its plan; under aging all are aged.

    The least of some rounds counts: a core that is slowed, or whose caches others use, for seconds at a time only adds.
    """
    from tests.live.schedulers import Pipeline, make_request, make_scheduler

    scheduler = make_scheduler(
        tmp_path, 60_000, scheduler_cls="simmoe.live.engine.policy_host.PolicyScheduler", max_num_batched_tokens=2048,
        max_num_seqs=256, additional_config={"simmoe_policy": {"policy": policy, "profile": DEFAULT_PROFILE}},
    )  # fmt: skip
    pipeline = Pipeline(scheduler)
    rng = np.random.default_rng(0)
    count = 0

    def fill() -> None:
        nonlocal count
        while len(scheduler.waiting) < NUM_WAITING:
            prompt, output, k = (int(rng.integers(*bounds)) for bounds in ((100, 1000), (20, 100), (1, 9)))
            scheduler.add_request(make_request(f"r{count}", prompt, output, k))
            count += 1

    fill()
    # as many run as seats allow before anything is measured
    while len(scheduler.running) < 256 and scheduler.num_plans < 400:
        pipeline.schedule()
        pipeline.deliver()
        fill()
    rounds: list[float] = []
    while not rounds or (rounds[-1] > LIMIT_S and len(rounds) < NUM_ROUNDS):
        scheduler.num_plans, scheduler.plan_s = 0, 0.0
        for _ in range(NUM_STEPS):
            pipeline.schedule()
            pipeline.deliver()
            fill()
        assert NUM_STEPS / 4 < scheduler.num_plans <= NUM_STEPS, "the policy is hardly asked"
        rounds.append(scheduler.plan_s / scheduler.num_plans)
    print(f"{policy}: {', '.join(f'{1e6 * round_s:.0f}' for round_s in rounds)} us a plan, at most one a step")
    assert rounds[-1] <= LIMIT_S


SPENT_S = 0.05
"""CPU time of each call."""

BUSY = f"""
import time
from simmoe.policies.protocols import ADMIT_ALL

def spend():
    end_s = time.thread_time() + {SPENT_S}
    while time.thread_time() < end_s:
        pass

class Busy:
    def plan(self, view, /):
        spend()
        return ADMIT_ALL

    def queue_key(self, request, /):
        spend()
        return request.k_qos
"""


def test_a_policy_s_time_is_that_of_its_plans_and_of_its_queue_keys(tmp_path: Path) -> None:
    from tests.live.schedulers import Pipeline, make_request, make_scheduler

    (tmp_path / "busy.py").write_text(BUSY)
    scheduler = make_scheduler(
        tmp_path, 1_000, scheduler_cls="simmoe.live.engine.policy_host.PolicyScheduler",
        additional_config={"simmoe_policy": {"policy": f"{tmp_path / 'busy.py'}:Busy"}},
    )  # fmt: skip
    for i in range(3):
        scheduler.add_request(make_request(f"r{i}", 20, 5, 1 + i))
    stats = scheduler.policy_stats()
    assert stats["plan_s"] == 0 and stats["policy_s"] >= 3 * SPENT_S, "a newcomer's place is the policy's work"
    keys_s = stats["policy_s"]
    pipeline = Pipeline(scheduler)
    while scheduler.num_plans < 1:
        pipeline.schedule()
        pipeline.deliver()
    stats = scheduler.policy_stats()
    assert stats["plan_s"] >= SPENT_S * stats["num_plans"] > 0
    assert stats["policy_s"] == keys_s + stats["plan_s"]

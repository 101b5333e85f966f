"""Policies that misbehave inside vLLM's own scheduler classes: no token is lost, the failure is named, it replays."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.cli import run as cli
from simmoe.errors import LiveError, PolicyError

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]

NUM_BLOCKS = 64
"""KV for few enough requests that some are preempted."""

HEAD = """
import itertools
import sys
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from simmoe.policies.protocols import ADMIT_ALL, StepPlan

kept = []

class Own(BaseException):
    pass

class Endless(Sequence):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return self.names[i % len(self.names)]

class Once(Sequence):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        name, self.names[i] = self.names[i], "gone"
        return name

class Fickle(StepPlan):
    @property
    def order(self):
        raise ValueError("not twice")

def names(view):
    return [request.request_id for request in view.waiting]

class Mine:
    num_calls = 0

    def plan(self, view, /):
        self.num_calls += 1
"""

NONSENSE = {
    "return None": "plan returned None; it must return a StepPlan",
    "return StepPlan(order=['gone', *names(view)])": "plan lets in 'gone', which does not wait on rank 0",
    "return StepPlan(order=[r.request_id for r in view.running] or ['none'])": "which does not wait on rank 0",
    "return StepPlan(order=names(view) * 2)": "plan lets in '0' twice",
    "return StepPlan(order=names(view) * 100_000)": "plan lets in '0' twice",
    "return StepPlan(order=Endless(names(view)))": "plan lets in '0' twice",
    "return StepPlan(order=itertools.cycle(names(view)))": "it must be None or a sequence of request ids",
    "return StepPlan(order=np.array(names(view)))": "it must be None or a sequence of request ids",
    "return StepPlan(order=names(view)[0])": "plan returned order '0'; it must be None or a sequence",
    "return StepPlan(order=[view.waiting[0]])": "plan lets in RequestView(request_id='0'",
    "return StepPlan(order=view.waiting[0])": "it must be None or a sequence of request ids",
    "return StepPlan(order=view.waiting)": "plan lets in RequestView(request_id='0'",
    "return tuple.__new__(Fickle)": "ValueError: not twice",
    "return StepPlan(k_max=-1)": "plan returned k_max -1; it must be None or a whole number, at least 0",
    "return StepPlan(k_max=True)": "plan returned k_max True",
    "return StepPlan(k_max=np.float32(4))": "plan returned k_max np.float32(4.0)",
    "return StepPlan(wake_at_s=view.now_s)": "it must be None or a later, finite time",
    "return StepPlan(wake_at_s=np.nextafter(view.now_s, 0))": "it must be None or a later, finite time",
    "return StepPlan(wake_at_s=Fraction(view.now_s) + Fraction(1, 10**30))": "it must be None or a later, finite time",
    "return StepPlan(wake_at_s=Fraction(10) ** 400)": "OverflowError",
    "return StepPlan(wake_at_s=float('nan'))": "plan returned wake_at_s nan",
    "return StepPlan(wake_at_s=np.inf)": "plan returned wake_at_s inf",
    "view.waiting.sort()": "AttributeError: 'WaitingView' object has no attribute 'sort'",
    "del view.waiting[0]": "TypeError: 'WaitingView' object doesn't support item deletion",
    "view.token_budget = 5": "AttributeError: can't set attribute",
    "view.waiting[0].k_qos = 1": "AttributeError: can't set attribute",
    "object.__setattr__(view, 'waiting', None)": "AttributeError: can't set attribute",
    "object.__setattr__(view.waiting[0], 'request_id', 'x')": "AttributeError: can't set attribute",
    "object.__setattr__(view.waiting[-1], 'arrival_s', 0.0)": "AttributeError: can't set attribute",
    "object.__setattr__(view.oldest, 'k_qos', 0)": "AttributeError: can't set attribute",
    "object.__delattr__(view.oldest, 'k_qos')": "AttributeError: can't delete attribute",
    "object.__setattr__(view.running[0], 'request_id', None)": "AttributeError: can't set attribute",
    "object.__setattr__(ADMIT_ALL, 'order', ['x'])": "AttributeError: can't set attribute",
    "view.oldest.note = 'mine'": "AttributeError: 'RequestView' object has no attribute 'note'",
    "view.running.clear()": "AttributeError: 'RunningView' object has no attribute 'clear'",
}
"""What a policy's body does at every call, and what is told of it."""

RAISES = {
    "raise ValueError('no\\n\\nmore')": "ValueError: no",
    "raise Own('mine')": "Own: mine",
    "raise BaseException": "BaseException",
    "raise MemoryError": "MemoryError",
    "raise GeneratorExit": "GeneratorExit",
    "sys.exit(3)": "SystemExit: 3",
    "(lambda f: f(f))(lambda f: f(f))": "RecursionError: maximum recursion depth exceeded",
}

LAWFUL = {
    "numpy's numbers": "return StepPlan(k_max=np.uint8(4), wake_at_s=np.float32(view.now_s) + np.float32(60))",
    "numpy's texts": "return StepPlan(order=deque(np.array(names(view))))",
    "a fraction": "return StepPlan(wake_at_s=Fraction(view.now_s) + Fraction(1, 3))",
    "a budget beyond all": "return StepPlan(k_max=10**30)",
    "an order read once": "return StepPlan(order=Once(names(view)))",
    "an order taken back": "self.order = names(view); return StepPlan(order=self.order)",
    "views kept": "kept.append(view); sum(len(v.waiting) + len([*v.running]) for v in kept); return ADMIT_ALL",
    "nobody, by order": "return StepPlan(order=())",
    "nobody, by budget": "return StepPlan(k_max=0, wake_at_s=view.now_s + 1e9)",
    "nobody, every second time": "return StepPlan(k_max=0) if self.num_calls % 2 else ADMIT_ALL",
    "random numbers begun anew": "np.random.seed(0); import random, torch; random.seed(0); torch.manual_seed(0)\n"
    "        return ADMIT_ALL",
    "a key that changes its mind": "return ADMIT_ALL\n\n    num_keys = 0\n\n    def queue_key(self, request, /):\n"
    "        self.num_keys += 1\n        return self.num_keys * 7919 % 13, str(self.num_keys)",
}


@pytest.fixture(scope="module", params=["sync", "async"])
def scheduler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One scheduler of each class; each test hosts its own policy in it."""
    from tests.live.schedulers import make_scheduler

    kind = "Async" if request.param == "async" else ""
    return make_scheduler(
        tmp_path_factory.mktemp("model"), NUM_BLOCKS, max_model_len=450, max_num_batched_tokens=64, max_num_seqs=6,
        scheduler_cls=f"simmoe.live.engine.policy_host.{kind}PolicyScheduler",
    )  # fmt: skip


@pytest.fixture
def host(scheduler: Any, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Hosts the policy a text defines, its calls recorded and a failed one kept; an idle scheduler is left behind."""

    def host(text: str, **options: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(text)
        kept = {"decisions": str(tmp_path / "decisions.jsonl"), "evidence": str(tmp_path), **options}
        scheduler.host_policy({"policy": f"{path}:Mine", **kept})
        return path

    yield host
    finish_all(scheduler)
    scheduler.host_policy({"policy": "fifo"})
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


def finish_all(scheduler: Any) -> None:
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)


@dataclass
class Life:
    """What became of a run's requests."""

    asked: dict[str, int] = field(default_factory=dict)
    """Output tokens of each."""
    told: dict[str, int] = field(default_factory=dict)
    """Output tokens that came out of the engine."""
    aborted: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    num_preempted: int = 0

    def check(self) -> None:
        """No token is lost, and none comes too many."""
        for name, asked in self.asked.items():
            told = self.told.get(name, 0)
            assert told <= asked and (told == asked or name in self.aborted), (name, told, asked)


def drive(scheduler: Any, *, size: int = 24, seed: int = 0, patience: int = 3, aborts: bool = True) -> Life:
    """Send random requests, abort some, step until nothing is left; with two steps in flight where that is the way.

    Prompts are cut into chunks and requests preempted. Once the policy has failed ``patience`` times, everybody who
    waits is aborted after each failure.
    """
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    from tests.live.schedulers import make_request

    rng = np.random.default_rng(seed)
    life = Life()
    in_flight: deque[tuple[Any, list[list[int]]]] = deque()
    most_in_flight = 1 + scheduler.vllm_config.scheduler_config.async_scheduling

    def abort(names: list[str]) -> None:
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        life.aborted.update(names)

    for _ in range(20_000):
        if len(life.asked) == size and not scheduler.has_requests() and not in_flight:
            break
        for _ in range(min(int(rng.integers(0, 3)), size - len(life.asked))):
            name, (prompt, output) = str(len(life.asked)), map(int, rng.integers(1, 200, 2))
            life.asked[name] = output
            scheduler.add_request(make_request(name, prompt, output, int(rng.integers(1, 9)), scheduler.clock()))
        if aborts and rng.random() < 0.01 and scheduler.requests:
            abort([str(rng.choice(list(scheduler.requests)))])
        if scheduler.has_requests():
            try:
                output = scheduler.schedule()
            except PolicyError as error:
                life.failures.append(str(error))
                if len(life.failures) >= patience:
                    abort([request.request_id for request in scheduler.waiting])
                continue
            life.num_preempted += len(output.preempted_req_ids or ())
            requests = scheduler.requests
            tokens = [[] if requests[name].is_prefill_chunk else [7] for name in output.num_scheduled_tokens]
            in_flight.append((output, tokens))
            if output.num_scheduled_tokens and len(in_flight) < most_in_flight:
                continue
        if in_flight:
            output, tokens = in_flight.popleft()
            names = list(output.num_scheduled_tokens)
            ran = ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
            )
            for outputs in scheduler.update_from_output(output, ran).values():
                for out in outputs.outputs:
                    life.told[out.request_id] = life.told.get(out.request_id, 0) + len(out.new_token_ids)
    assert len(life.asked) == size and not scheduler.requests and not in_flight, "it hangs"
    assert not scheduler.request_ks and not len(scheduler.waiting) and not scheduler.views._recomputed
    life.check()
    return life


def replays(scheduler: Any, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every recorded call, failures included, has the same answer from a fresh policy."""
    num_plans, recording = scheduler.num_plans, scheduler.hosting.decisions
    scheduler.host_policy({"policy": "fifo"})  # which ends the recording
    capsys.readouterr()
    assert cli(["policies", "check", f"{policy}:Mine", "--replay", recording]) == 0
    assert f" answers {num_plans} calls as " in capsys.readouterr().out


@pytest.mark.parametrize("body", NONSENSE)
def test_nonsense_is_named_and_costs_nobody_a_token(
    scheduler: Any, host: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    policy = host(f"{HEAD}        if len(view.running) > 2:\n            {body}\n        return ADMIT_ALL\n")
    life = drive(scheduler)
    assert life.failures
    told = re.escape(NONSENSE[body]).replace("'0'", r"'\d+'")
    for failure in life.failures:
        assert re.search(rf"^rank 0: policy Mine: .*{told}", failure), failure
        assert "its view is saved in" in failure
    saved = tmp_path / "policy_call-rank0.json"
    assert cli(["policies", "check", f"{policy}:Mine", "--replay", str(saved)]) == 4
    replays(scheduler, policy, capsys)


@pytest.mark.parametrize("body", RAISES)
def test_whatever_is_raised_at_the_nth_call_is_named(
    scheduler: Any, host: Callable[..., Path], capsys: pytest.CaptureFixture[str], body: str
) -> None:
    text = f"{HEAD}        if self.num_calls % 7 == 5:\n            {body}\n        return ADMIT_ALL\n"
    policy = host(text)
    line = text.splitlines().index(f"            {body}") + 1
    life = drive(scheduler, patience=1000)
    assert life.num_preempted > 0 and len(life.failures) > 2
    for failure in life.failures:
        assert failure.startswith(f"rank 0: policy Mine: {policy}:{line}: {RAISES[body]}"), failure
    replays(scheduler, policy, capsys)


@pytest.mark.parametrize("what", LAWFUL)
def test_odd_plans_are_followed(
    scheduler: Any, host: Callable[..., Path], capsys: pytest.CaptureFixture[str], what: str
) -> None:
    policy = host(f"{HEAD}        {LAWFUL[what]}\n")
    life = drive(scheduler)
    assert not life.failures
    assert (scheduler.policy_stats()["gates_opened"] > 0) == what.startswith(("nobody", "numpy's numbers"))
    replays(scheduler, policy, capsys)


def test_ctrl_c_inside_a_plan_is_no_failure_of_the_policy(
    scheduler: Any, host: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the call of the scheduler; whoever goes on has every token.

    In an engine's own process nobody presses it: it is the policy's, and vLLM would hang on what is no Exception.
    """
    host(f"{HEAD}        if self.num_calls % 5 == 3:\n            raise KeyboardInterrupt\n        return ADMIT_ALL\n")
    schedule = scheduler.schedule
    num_interrupts = 0

    def schedule_again() -> Any:
        nonlocal num_interrupts
        try:
            return schedule()
        except KeyboardInterrupt:
            num_interrupts += 1
            return schedule()

    monkeypatch.setattr(scheduler, "schedule", schedule_again)
    life = drive(scheduler)
    assert num_interrupts > 2 and not life.failures

    monkeypatch.undo()
    monkeypatch.setattr(signal, "getsignal", {signal.SIGINT: print}.get)
    life = drive(scheduler)
    assert life.failures and all("mine.py" in failure and "KeyboardInterrupt" in failure for failure in life.failures)


UNHOSTABLE = {
    "def __getattr__(self, name):\n        return getattr(self, name + 'x')": r"other.py:\d+: RecursionError",
    "@property\n    def queue_key(self):\n        raise AttributeError('mine')": r"other.py:\d+: AttributeError: mine",
    "queue_key = 5": "queue_key is a int; it must be a method, or not be there",
    "@property\n    def k_floor(self):\n        raise Own('no floor')": r"other.py:\d+: Own: no floor",
    "k_floor = np.float64(2)": "k_floor is .*; it must be a whole number in 0..8",
    "def __init__(self):\n        raise Own('no policy')": r"cannot be built: .*other.py:\d+: Own: no policy",
}


@pytest.mark.parametrize("member", UNHOSTABLE)
def test_a_policy_that_cannot_be_hosted_leaves_the_one_before(
    scheduler: Any, host: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, member: str
) -> None:
    before = host(f"{HEAD}        return ADMIT_ALL\n")
    other = tmp_path / "other.py"
    other.write_text(f"{HEAD}        return ADMIT_ALL\n\n    {member}\n")
    with pytest.raises(PolicyError, match=rf"Mine.*{UNHOSTABLE[member]}"):
        scheduler.host_policy({"policy": f"{other}:Mine"})
    assert not drive(scheduler, size=4).failures
    replays(scheduler, before, capsys)


def test_a_recording_that_cannot_be_begun_leaves_the_one_before(
    scheduler: Any, host: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = host(f"{HEAD}        return ADMIT_ALL\n")
    with pytest.raises(LiveError, match=f"^cannot record decisions in '{tmp_path}': Is a directory"):
        scheduler.host_policy({"policy": "tiers", "decisions": str(tmp_path)})
    with pytest.raises(LiveError, match=r"^cannot record decisions in '/dev/full': No space left on device"):
        scheduler.host_policy({"policy": "tiers", "decisions": "/dev/full"})
    assert not drive(scheduler, size=4).failures
    replays(scheduler, policy, capsys)


class Full:
    """A file on a disk that has no room left."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_recording_and_nothing_else(
    scheduler: Any,
    host: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = host(f"{HEAD}        return ADMIT_ALL\n")
    assert not drive(scheduler, size=8).failures
    num_plans, recording = scheduler.num_plans, scheduler.hosting.decisions
    monkeypatch.setattr(scheduler.decisions, "_file", Full(recording))
    assert not drive(scheduler, size=8).failures
    assert scheduler.num_plans > num_plans
    told = [record.message for record in caplog.records if record.name == "simmoe.live.engine.decision_file"]
    assert told == [f"the recording of decisions in '{recording}' ends here: No space left on device"]
    scheduler.host_policy({"policy": "fifo"})
    capsys.readouterr()
    assert cli(["policies", "check", f"{policy}:Mine", "--replay", recording]) == 0
    assert f" answers {num_plans} calls as " in capsys.readouterr().out


def test_keys_that_fail_refuse_their_requests_alone(
    scheduler: Any, host: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first refusal is kept with the queue it was compared with; what waits is not touched."""
    from tests.live.schedulers import make_request

    policy = host(
        f"{HEAD}        return ADMIT_ALL\n\n    def queue_key(self, request, /):\n"
        "        return 'a' if request.k_qos == 7 else float('nan') if request.k_qos == 8 else request.k_qos\n"
    )
    told = {7: "TypeError: '<' not supported", 8: "queue_key returned nan; nothing can be compared with NaN"}
    for i, k in enumerate((3, 7, 2, 8, 7, 1)):
        if k < 7:
            scheduler.add_request(make_request(str(i), 20, 5, k, scheduler.clock()))
            continue
        with pytest.raises(PolicyError, match=f"^rank 0: policy Mine: .*{told[k]}") as refusal:
            scheduler.add_request(make_request(str(i), 20, 5, k, scheduler.clock()))
        assert ("its view is saved in" in str(refusal.value)) == (i == 1)
    assert [request.request_id for request in scheduler.waiting] == ["5", "2", "0"]
    assert set(scheduler.request_ks) == {"5", "2", "0"}
    saved = tmp_path / "policy_call-rank0.json"
    assert [request["k_qos"] for request in json.loads(saved.read_text())["view"]["requests"]] == [3, 7]
    assert cli(["policies", "check", f"{policy}:Mine", "--replay", str(saved)]) == 4
    finish_all(scheduler)
    assert not drive(scheduler, size=0).failures
    replays(scheduler, policy, capsys)


def test_a_view_whose_sequences_were_taken_apart_is_not_said_to_be_saved(
    scheduler: Any, host: Callable[..., Path]
) -> None:
    host(
        f"{HEAD}        if self.num_calls == 3:\n            view.waiting._queue = view.running._scheduler = None\n"
        "            raise ValueError('sorry')\n        return ADMIT_ALL\n"
    )
    (failure,) = drive(scheduler).failures
    assert failure.endswith(
        "ValueError: sorry; its view cannot be saved: the policy has written into what it was shown"
    )


def test_a_thread_that_a_policy_leaves_behind_is_named_once(
    scheduler: Any, host: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    text = HEAD.replace("import sys", "import sys\nimport threading\nstop = threading.Event()")
    policy = host(
        f"{text}        if self.num_calls == 1:\n            threading.Thread(target=stop.wait, name='ends').start()\n"
        "            threading.Thread(target=lambda: stop.wait(), name='mine').start()\n        return ADMIT_ALL\n"
    )
    assert not drive(scheduler, size=4).failures
    scheduler.shutdown()
    scheduler.shutdown()
    told = [record.message for record in caplog.records if "thread" in record.message]
    line = 1 + next(n for n, line in enumerate(policy.read_text().splitlines()) if "lambda: stop" in line)
    assert told == [f"rank 0: a policy's thread 'mine' ({policy}:{line}) is still running"]
    sys.modules[type(scheduler.batch_policy).__module__].stop.set()

"""Wherever a policy breaks, in whatever way, one line names it and the run exits with the code of policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simmoe.cli import run as simmoe
from simmoe.profiles.catalog import DEFAULT_PROFILE, profile_names

PROFILE = DEFAULT_PROFILE if DEFAULT_PROFILE in profile_names() else profile_names()[0]

BATCH = """
import sys
from simmoe.policies.protocols import ADMIT_ALL

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("not telling")

class Own(BaseException):
    pass

class Unspeakable(Exception):
    def __str__(self):
        raise Own

def mine(*_):
    raise Own("my own")

class Mine:
    def plan(self, view, /):
        return ADMIT_ALL
"""

ROUTE = """
import sys

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("not telling")

class Own(BaseException):
    pass

class Unspeakable(Exception):
    def __str__(self):
        raise Own

class Mine:
    def route(self, request, ranks, now_s, /):
        return 0
"""

#: what a body does -> what is told of it
WAYS = {
    "raise ZeroDivisionError('no')": "ZeroDivisionError: no",
    "raise Mute": "Mute: its message cannot be shown (RuntimeError)",
    "raise Unspeakable": "Unspeakable: its message cannot be shown (Own)",
    "sys.exit(3)": "SystemExit: 3",
    "raise GeneratorExit": "GeneratorExit",
    "raise Own('my own')": "Own: my own",
    "raise AttributeError('mine')": "AttributeError: mine",
}

#: where -> (class it is in, head of the method, whether the policy was shown something)
PLACES = {
    "constructor": (BATCH, "def __init__(self):", False),
    "plan": (BATCH, "def plan(self, view, /):", True),
    "queue_key": (BATCH, "def queue_key(self, request, /):", True),
    "queue_key itself": (BATCH, "@property\n    def queue_key(self):", False),
    "k_floor": (BATCH, "@property\n    def k_floor(self):", False),
    "snapshot": (BATCH, "def snapshot(self):", False),
    "route": (ROUTE, "def route(self, request, ranks, now_s, /):", True),
    "a router's snapshot": (ROUTE, "def snapshot(self):", False),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Thirty requests at once: with four sequences on a rank, most of them wait."""
    path = tmp_path / "requests.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"0,{20 + i},9\n" for i in range(30)))
    return path


def refused(trace: Path, text: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the policy ``text`` defines; return the last line on stderr after checking what holds for every failure."""
    policy = trace.parent / "mine.py"
    policy.write_text(text)
    arguments = ["--trace", str(trace), "--profile", PROFILE, "--max-num-seqs", "4", "--policy", f"{policy}:Mine"]
    assert simmoe(["run", *arguments, "--out", str(out)]) == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("simmoe: policy ") and "Mine" in line
    assert not (out / "manifest.json").exists(), "no record half written"
    return line


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_every_place_and_every_way(
    place: str, way: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, head, is_shown = PLACES[place]
    text = f"{start}\n    {head}\n        {way}\n"
    line = refused(trace, text, tmp_path / "out", capsys)
    assert f"mine.py:{text.count(chr(10))}: {WAYS[way]}" in line
    saved = tmp_path / "out" / "policy_call.json"
    assert saved.exists() == is_shown == (str(saved) in line)
    if is_shown:
        policy = tmp_path / "mine.py"
        assert simmoe(["policies", "check", f"{policy}:Mine", "--replay", str(saved)]) == 4
        assert WAYS[way] in capsys.readouterr().err


@pytest.mark.parametrize("place", PLACES)
def test_the_kit_survives_every_place(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, head, _ = PLACES[place]
    (tmp_path / "mine.py").write_text(f"{start}\n    {head}\n        sys.exit(3)\n")
    assert simmoe(["policies", "check", f"{tmp_path}/mine.py:Mine"]) == 4
    printed = capsys.readouterr()
    assert "FAIL" in printed.out and "SystemExit: 3" in printed.out
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("member", "told"),
    [
        ("k_floor = 'x'", "k_floor is 'x'; it must be a whole number in 0..32"),
        ("k_floor = 1000", "k_floor is 1000; it must be a whole number in 0..32"),
        ("k_floor = -1", "k_floor is -1"),
        ("k_floor = 2.5", "k_floor is 2.5"),
        ("k_floor = True", "k_floor is True"),
        ("k_floor = None", "k_floor is None"),
        ("k_floor = float('nan')", "k_floor is nan"),
        ("queue_key = 5", "queue_key is a int; it must be a method"),
        ("def snapshot(self): return [1]", "snapshot returned [1]; it must return a mapping"),
        ("def snapshot(self): return {'x': self}", "not JSON serializable"),
        ("def snapshot(self): return {'x': float('nan')}", "snapshot returned what JSON cannot hold"),
        ("def snapshot(self): return {(1, 2): 3}", "snapshot returned what JSON cannot hold"),
        ("def snapshot(self): x = {}; x['x'] = x; return x", "snapshot returned what JSON cannot hold"),
        ("def queue_key(self, request): return float('nan')", "queue_key returned nan"),
        ("def queue_key(self, request): return request.k_qos, (float('nan'),)", "compared with NaN"),
        ("def queue_key(self, request): return None", "queue_key returned None; it must be a number, a text"),
        ("def queue_key(self, request): return {'k': 1}", "queue_key returned {'k': 1}"),
        ("def queue_key(self, request): return 1j", "queue_key returned 1j"),
        ("def queue_key(self, request): return request", "queue_key returned RequestView("),
        ("def queue_key(self, request): return request.k_qos, request", "queue_key returned RequestView("),
        ("def queue_key(self, request): return object()", "queue_key returned <object"),
        ("def queue_key(self): return 1", "TypeError"),
        ("def queue_key(self, request): return (0, 1) if request.prompt_tokens % 2 else (0, 'a')", "TypeError: '<'"),
        ("def queue_key(self, request): return 1 if request.prompt_tokens % 2 else 'a'", "TypeError: '<'"),
    ],
)
def test_nonsense_is_named_before_anything_runs_on_it(
    member: str, told: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(trace, f"{BATCH}\n    {member}\n", tmp_path / "out", capsys)
    assert simmoe(["policies", "check", f"{tmp_path}/mine.py:Mine"]) == 4
    assert "FAIL" in capsys.readouterr().out


def test_keys_that_cannot_be_compared_are_saved_with_the_queue_they_broke(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "def queue_key(self, request): return 1 if request.request_id != '7' else 'a'"
    refused(trace, f"{BATCH}\n    {key}\n", tmp_path / "out", capsys)
    saved = tmp_path / "out" / "policy_call.json"
    requests = json.loads(saved.read_text())["view"]["requests"]
    assert [request["request_id"] for request in requests] == [str(i) for i in range(8)]
    assert simmoe(["policies", "check", f"{tmp_path}/mine.py:Mine", "--replay", str(saved)]) == 4
    assert "TypeError: '<'" in capsys.readouterr().err
    assert simmoe(["policies", "check", "tiers", "--replay", str(saved)]) == 0
    assert "tiers answers ['" in capsys.readouterr().out


def test_a_key_is_asked_for_once_and_kept(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that changes its mind cannot lose a request that it put in the queue."""
    policy = tmp_path / "mine.py"
    policy.write_text(
        f"{BATCH}\n"
        "    calls = 0\n"
        "    def queue_key(self, request):\n"
        "        self.calls += 1\n"
        "        return self.calls * 7919 % 13\n"
        "    def plan(self, view, /):\n"
        "        from simmoe.policies.protocols import StepPlan\n"
        "        return StepPlan(order=[view.waiting[-1].request_id])\n"
        "    def snapshot(self):\n"
        "        return {'calls': self.calls}\n"
    )
    options = ["--trace", str(trace), "--profile", PROFILE, "--max-num-seqs", "4", "--policy", f"{policy}:Mine"]
    assert simmoe(["run", *options, "--out", str(tmp_path / "out")]) == 0
    assert "30 injected = 30 finished" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["policy_state"]["batch_0"] == {"calls": 30}


def test_a_plan_whose_order_is_made_on_access_is_read_once(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(
        "from collections.abc import Sequence\n"
        "from simmoe.policies.protocols import StepPlan\n"
        "class Fleeting(Sequence):\n"
        "    def __init__(self, ids): self.ids = ids\n"
        "    def __len__(self): return len(self.ids)\n"
        "    def __getitem__(self, index): return self.ids.pop(0)\n"
        "class Mine:\n"
        "    def plan(self, view, /):\n"
        "        return StepPlan(order=Fleeting([view.waiting[0].request_id]))\n"
    )
    options = ["--trace", str(trace), "--profile", PROFILE, "--policy", f"{policy}:Mine"]
    assert simmoe(["run", *options]) == 0
    assert "30 finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def __init__(self, x: 'np.flot' = 1): pass", "the annotation of 'x' is unknown: name 'np' is not defined"),
        ("def __init__(self, x: 'sys.flot' = 1): pass", "the annotation of 'x' is unknown: module 'sys' has no"),
        ("def __init__(self, x: '1/0' = 1): pass", "the annotation of 'x' is unknown: division by zero"),
        ("def __init__(self, x: 'int(' = 1): pass", "the annotation of 'x' is unknown"),
        ("def __init__(self, x: [int] = 1): pass", "parameter 'x' is annotated [<class 'int'>]"),
        ("def __init__(self, x: float | str = 1): pass", "parameter 'x' is annotated float | str"),
        ("__signature__ = 3", "its constructor cannot be looked at"),
        ("def __init__(self, x: 'mine()' = 1): pass", "the annotation of 'x' is unknown: my own"),
        ("__signature__ = property(mine)", "its constructor cannot be looked at"),
    ],
)
def test_a_constructor_that_cannot_be_read_is_named(
    text: str, told: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(trace, f"{BATCH}\n    {text}\n", tmp_path / "out", capsys)


@pytest.mark.parametrize("member", ["def __getattr__(cls, name)", "@property\n    def clairvoyant(cls)"])
@pytest.mark.parametrize("way", ["sys.exit(3)", "raise Own('my own')"])
def test_a_class_that_cannot_be_looked_at_is_named(
    member: str, way: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "import sys\nclass Own(BaseException): ...\n"
    meta = f"{own}class Meta(type):\n    {member}:\n        {way}\n"
    policy = tmp_path / "mine.py"
    policy.write_text(f"{meta}class Mine(metaclass=Meta):\n    def plan(self, view, /): ...\n")
    assert simmoe(["run", "--trace", str(trace), "--profile", PROFILE, "--policy", f"{policy}:Mine"]) == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert "mine.py:Mine' cannot be looked at: " in line and WAYS[way] in line


def test_what_is_no_class_is_not_suggested(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(f"{BATCH}\ndef mina(): ...\n")
    assert simmoe(["run", "--trace", str(trace), "--profile", PROFILE, "--policy", f"{policy}:mina"]) == 4
    assert "has no class 'mina' (did you mean 'Mine'?)" in capsys.readouterr().err


WRITES = {
    "a step's view": ("batch", "object.__setattr__(view, 'waiting', None)"),
    "who waits": ("batch", "object.__setattr__(view.waiting[0], 'request_id', 'x')"),
    "who waits longest": ("batch", "object.__setattr__(view.oldest, 'arrival_s', 1e9)"),
    "the plan of all plans": ("batch", "object.__setattr__(ADMIT_ALL, 'order', ['x'])"),
    "who arrives": ("route", "object.__setattr__(request, 'k_qos', [])"),
    "a rank": ("route", "object.__setattr__(ranks[0], 'dp_rank', 7)"),
}


@pytest.mark.parametrize("what", WRITES)
def test_nothing_can_be_written_into_what_a_policy_is_shown(
    what: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, write = WRITES[what]
    signature = "def plan(self, view, /)" if kind == "batch" else "def route(self, request, ranks, now_s, /)"
    text = f"from simmoe.policies.protocols import ADMIT_ALL\n\nclass Mine:\n    {signature}:\n        {write}\n"
    line = refused(trace, text, tmp_path / "out", capsys)
    assert "policy Mine: " in line and "mine.py:5: AttributeError: can't set attribute" in line and "saved" in line


def test_what_a_policy_writes_into_its_deployment_is_its_own(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(
        "from simmoe.policies.protocols import ADMIT_ALL\n\nclass Mine:\n    def __init__(self, context):\n"
        "        assert context.k_max > 0\n        object.__setattr__(context, 'k_max', 0)\n"
        "    k_floor = 1\n    def plan(self, view, /):\n        return ADMIT_ALL\n"
    )
    arguments = ["run", "--trace", str(trace), "--profile", PROFILE, "--ranks", "2", "--policy", f"{policy}:Mine"]
    assert simmoe(arguments) == 0, capsys.readouterr().err


def test_a_view_whose_sequences_were_taken_apart_is_not_saved(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(
        trace, f"{BATCH}\n    def plan(self, view, /):\n        view.waiting._queue = None\n", tmp_path / "out", capsys
    )
    assert "plan returned None; it must return a StepPlan" in line and "saved" not in line


def test_ctrl_c_is_no_fault_of_the_policy(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(f"{BATCH}\n    def plan(self, view, /):\n        raise KeyboardInterrupt\n")
    assert simmoe(["run", "--trace", str(trace), "--profile", PROFILE, "--policy", f"{policy}:Mine"]) == 130


@pytest.mark.parametrize("value", ["inf", "-inf", "0", "-1"])
def test_an_aging_time_that_is_none_is_refused_at_once(
    value: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe(["run", "--trace", str(trace), "--profile", PROFILE, "--policy", f"tiers,max_wait_s={value}"]) == 2
    assert f"max_wait_s is {float(value)}; it must be above 0 seconds and finite" in capsys.readouterr().err

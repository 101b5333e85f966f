"""Every call of a live route policy, recorded and asked again: answers equal, whatever happened to the ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.cli import run as cli
from simmoe.errors import DataError, PolicyError, SimmoeError, UsageError
from simmoe.live.engine import decision_file
from simmoe.live.engine.decision_file import DecisionReader, set_aside
from simmoe.live.engine.provenance import Provenance
from simmoe.live.server.dispatch import Counts, Dispatcher, Ticket
from simmoe.live.server.route_decisions import FILE_NAME, Choice, RouteRecording, open_recorder
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RequestView
from simmoe.profiles.catalog import DEFAULT_PROFILE

NUM_RANKS = 4

FICKLE = """
class Fickle:
    "Shows what it was built for and all it is shown in its answers, and fails at some."

    def __init__(self, context, salt: int = 0):
        self.num_ranks, self.salt, self.num_calls = context.num_ranks, salt, 0

    def route(self, request, ranks, now_s, /):
        self.num_calls += 1
        assert len(ranks) == self.num_ranks
        seen = hash((tuple(ranks), request.k_qos, request.prompt_tokens, now_s, self.num_calls, self.salt))
        return seen % (self.num_ranks + 1)
"""

POLICIES = ("lanes", "lanes,lanes=4", "round-robin", "queue-aware", "vllm-0.32", "{}/fickle.py:Fickle")


def context(num_ranks: int = NUM_RANKS) -> PolicyContext:
    return PolicyContext(lambda n, k: n * k * 1e-6, 1, 8, num_ranks, 64, 1024)


events = st.lists(
    st.one_of(
        st.tuples(st.just("route"), st.integers(1, 8), st.integers(1, 2000)),
        st.tuples(st.just("release"), st.integers(0, 99)),
        st.tuples(st.just("publish"), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)),
        st.tuples(st.just("forget"), st.integers(0, 3)),
        st.tuples(st.just("up"), st.sets(st.integers(0, 3))),
    ),
    max_size=60,
)


def recorded(
    folder: Path, policy: str, events: list[tuple[Any, ...]], profile: str = ""
) -> tuple[Path, list[int | None]]:
    """Run a recorded dispatcher through events; return the recording and the rank each request went to."""
    (folder / "fickle.py").write_text(FICKLE)
    choice = parse_policy(policy.format(folder))
    recorder = open_recorder(folder, Provenance.of(choice.route_part, profile), context())
    dispatcher = Dispatcher(choice, context(), recorder)
    dispatcher.set_up(range(NUM_RANKS))
    tickets: list[Ticket] = []
    went: list[int | None] = []
    for i, (kind, *what) in enumerate(events):
        now_s = i * 0.1
        if kind == "route" and dispatcher.up:
            view = RequestView(f"r{i}", now_s, what[1], 0, what[0])
            went.append(None)
            with suppress(PolicyError):
                tickets.append(dispatcher.route(view, 1, now_s))
                went[-1] = tickets[-1].rank
        elif kind == "release" and tickets:
            dispatcher.release(tickets.pop(what[0] % len(tickets)))
        elif kind == "publish":
            rank, *counts = what
            dispatcher.publish(rank, Counts(*counts), dispatcher.mark(rank), now_s)
        elif kind == "forget":
            dispatcher.forget(what[0])
        elif kind == "up":
            dispatcher.set_up(sorted(what[0]))
    recorder.close()
    return folder / FILE_NAME, went


def replayed(path: Path, policy: str) -> int:
    part, recording = parse_policy(policy).route_part, RouteRecording(path)
    now = Provenance.of(part, recording.profile)
    return recording.replay(part.build, recording.context(context().prefill_s), now)


@given(events, st.sampled_from(POLICIES))
def test_every_answer_is_given_again(events: list[tuple[Any, ...]], policy: str) -> None:
    """And the recording alone says where each request went, ranks that come and go included."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        path, went = recorded(folder, policy, events)
        assert replayed(path, policy.format(folder)) == len(went)
        up: list[int] = []
        told: list[int | None] = []
        for event in RouteRecording(path).events():
            if isinstance(event, Choice):
                told.append(None if isinstance(event.answer, str) else up[event.answer])
            else:
                up = event.ranks
        assert told == went


@given(events, st.data())
def test_a_cut_recording_is_good_to_its_last_whole_line(events: list[tuple[Any, ...]], data: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        path, _ = recorded(Path(name), "lanes", events)
        content = path.read_bytes()
        cut = data.draw(st.integers(content.index(b"\n") + 1, len(content)))
        path.write_bytes(content[:cut])
        whole = [line for line in content[:cut].split(b"\n") if line.startswith(b'["?"') and line.endswith(b"]")]
        calls = replayed(path, "lanes")
        assert calls <= len(whole)
        assert calls >= content[:cut].count(b'\n["?"') - 1


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(st.text(max_size=5), values, max_size=3)),
    max_leaves=6,
)
BUSY = [("route", 1 + i % 8, 10 * i + 1) if i % 5 else ("up", {i % 3, 3}) for i in range(30)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("honest")
    path, _ = recorded(folder, "lanes", BUSY)
    return path, path.read_text()


@given(st.data())
def test_any_value_in_any_place_is_refused_in_one_line_or_is_harmless(
    honest: tuple[Path, str], data: st.DataObject
) -> None:
    lines = [json.loads(line) for line in honest[1].splitlines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    hurt(lines[number], data)
    with TemporaryDirectory() as name:
        bad = Path(name) / "bad.jsonl"
        bad.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert_one_line(bad)


def hurt(value: Any, data: st.DataObject) -> None:
    """Put some JSON somewhere into a value."""
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    place = data.draw(st.sampled_from(places))
    if isinstance(value[place], list | dict) and value[place] and data.draw(st.booleans()):
        hurt(value[place], data)
    else:
        value[place] = data.draw(JSON)


@given(st.data())
def test_any_bytes_are_refused_in_one_line_or_are_harmless(honest: tuple[Path, str], data: st.DataObject) -> None:
    content = bytearray(honest[1].encode())
    at = data.draw(st.integers(14, len(content) - 1))
    content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    with TemporaryDirectory() as name:
        bad = Path(name) / "bad.jsonl"
        bad.write_bytes(content)
        assert_one_line(bad)


def assert_one_line(path: Path) -> None:
    try:
        replayed(path, "lanes")
    except SimmoeError as error:
        assert "\n" not in str(error)
        assert str(path) in str(error) or isinstance(error, UsageError), "its profile is none"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[" * 100_000, "line 2 is not JSON"),
        ('["?", 0.0, ["r", 0.0, 1, 1], [], 0]', "line 2 does not follow from those before: views of 0 ranks are due"),
        ('["=", [0, 4], ""]', "the deployment has ranks 0 to 3"),
        ('["=", [1, 0], ""]', "ranks do not ascend"),
        ('["=", [0, 1e999], ""]', "inf is no count"),
        ('["=", [true], ""]', "True is no count"),
        ('["!"]', "its first item is neither '=' nor '?'"),
        ('{"=": 1}', "it is {'=': 1}"),
    ],
)
def test_what_cannot_be_is_named_with_its_line(honest: tuple[Path, str], tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{honest[1].splitlines()[0]}\n{line}\n")
    with pytest.raises(DataError, match=r"bad\.jsonl' line 2 ") as caught:
        replayed(path, "lanes")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"decisions": 1}, "is a recording of version 1; this simmoe reads 2"),
        ({"policy_sha256": None}, "has a header that cannot be: None is no text"),
        ({"deployment": {}}, "has a header that cannot be: it has no 'k_min'"),
        ({"call": "plan"}, "it holds calls of 'plan', not of route"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    honest: tuple[Path, str], tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(json.loads(honest[1].splitlines()[0]) | change) + "\n")
    with pytest.raises(DataError) as caught:
        RouteRecording(path)
    assert told in str(caught.value)


def test_the_command_asks_again_and_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, went = recorded(tmp_path, "{}/fickle.py:Fickle", BUSY, DEFAULT_PROFILE)
    policy = f"{tmp_path}/fickle.py:Fickle"

    def check(policy: str, *options: str) -> tuple[int, str, str]:
        code = cli(["policies", "check", policy, "--replay", str(path), *options])
        return code, *capsys.readouterr()

    assert check(policy) == (0, f"{policy} answers {len(went)} calls as '{policy}' did\n", "")
    code, _, told = check(f"{policy},salt=1")
    assert code == 4 and told.count("\n") == 1 and "the policy's parameters were ''" in told
    code, _, told = check("lanes")
    assert code == 4 and told.count("\n") == 1 and "the policy's file is another (sha256 " in told
    code, _, told = check("tiers")
    assert (code, told.count("\n")) == (3, 1) and "holds calls of a route policy; 'tiers' is none" in told
    (tmp_path / "fickle.py").write_text(FICKLE.replace("self.num_ranks + 1)", "self.num_ranks)"))
    code, _, told = check(policy)
    assert code == 4 and "the policy's file is another (sha256 " in told and "profile" not in told


def test_an_honest_replay_that_differs_names_profile_and_version() -> None:
    was = Provenance("0.0.9", "a.py:A,b=1", "1" * 64, "mine.json", "2" * 64)
    assert was.against(was) == "policy, profile and simmoe are the recorded ones"
    told = was.against(replace(was, simmoe="0.1.0", policy="elsewhere/a.py:A,b=1", profile_sha256="3" * 64))
    assert told == (
        "the profile 'mine.json' is another (sha256 222222222222, now 333333333333); --profile takes the recorded one; "
        "simmoe was 0.0.9, now 0.1.0"
    )


def test_the_policy_is_replayed_for_the_ranks_it_was_built_for(tmp_path: Path) -> None:
    """One built once for all of them answers otherwise."""
    path, _ = recorded(tmp_path, "{}/fickle.py:Fickle", BUSY)
    part = parse_policy(f"{tmp_path}/fickle.py:Fickle").route_part
    recording = RouteRecording(path)
    with pytest.raises(PolicyError, match="call "):
        recording.replay(lambda _: part.build(context()), recording.context(context().prefill_s), recording.provenance)


@contextmanager
def limited(monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(decision_file, "MAX_BYTES", size)
        yield


def test_a_recording_ends_at_its_limit_and_is_good_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 2000
    with limited(monkeypatch, limit), caplog.at_level(logging.ERROR):
        path, went = recorded(tmp_path, "lanes", BUSY)
    assert limit - 300 < path.stat().st_size <= limit
    assert 0 < replayed(path, "lanes") < len(went)
    assert [r.message for r in caplog.records] == [
        f"the recording of decisions in '{path}' ends here: it has its {limit} bytes"
    ]


def test_an_earlier_recording_is_kept(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    set_aside(path)
    for content in ("first", "second", "third"):
        set_aside(path)
        path.write_text(content)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        FILE_NAME: "third", "decisions-route.1.jsonl": "first", "decisions-route.2.jsonl": "second",
    }  # fmt: skip


def test_kinds_are_told_apart(honest: tuple[Path, str], tmp_path: Path) -> None:
    assert DecisionReader.kind_in(honest[0]) == "route"
    assert DecisionReader.kind_in(tmp_path) is None
    assert DecisionReader.kind_in(tmp_path / "none") is None

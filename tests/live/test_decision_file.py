"""A recording of a batch policy that was damaged or made up: refused in one line, whatever stands in it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.cli import run as cli
from simmoe.errors import SimmoeError
from simmoe.live.engine.decisions import DecisionRecorder, Recording
from simmoe.live.engine.policy_queue import PolicyQueue
from simmoe.live.engine.provenance import Provenance
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RequestView, StepView
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from tests.live.test_route_decisions import hurt

CONTEXT = PolicyContext(load_profile(DEFAULT_PROFILE).cost(False).prefill_s, 1, 8, 1, 4, 64)
POLICY = "tiers,max_wait_s=2"
CONSTANT = {"dp_rank": 0, "max_num_seqs": 4, "block_size": 16}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a host that admits one request a step, preempts every fifth, and finishes who ran three."""
    path = tmp_path_factory.mktemp("honest") / "decisions-rank0.jsonl"
    part, asker = parse_policy(POLICY).batch_part, Asker(CONTEXT)
    policy = part.build(CONTEXT)
    recorder = DecisionRecorder(path, "batch", Provenance.of(part, DEFAULT_PROFILE), False, CONTEXT, CONSTANT)
    enqueue = partial(asker.enqueue, policy) if asker.orders_queue(policy) else None
    queue = PolicyQueue(lambda request: request.view, enqueue, recorder.queued)
    running: dict[str, Any] = {}
    for i in range(24):
        view = RequestView(f"r{i}", i * 0.1, 10 + i, 0, 1 + i % 8)
        queue.add_request(SimpleNamespace(request_id=f"r{i}", view=view, num_preemptions=0))
        if i % 5 == 4:
            name, request = running.popitem()
            request.num_preemptions += 1
            queue.prepend_request(request)
        shown = StepView(
            now_s=i * 0.1, waiting=queue.view, running=tuple(r.view for r in running.values()), token_budget=64,
            free_kv_blocks=9, k_running=max((r.view.k_qos for r in running.values()), default=0),
            oldest=queue.oldest(), num_preempted=queue.num_preempted, **CONSTANT,
        )  # fmt: skip
        recorder.decided(shown, asker.plan(policy, shown))
        request = queue.pop_request()
        running[request.request_id] = request
        recorder.stepped([request.request_id])
        if len(running) > 3:
            name = next(iter(running))
            del running[name]
            recorder.left(name)
    recorder.close()
    return path


def replayed(path: Path) -> int:
    part, recording = parse_policy(POLICY).batch_part, Recording(path)
    return recording.replay(part.build(recording.context(CONTEXT.prefill_s)), recording.provenance)


def assert_one_line(path: Path) -> None:
    try:
        replayed(path)
    except SimmoeError as error:
        assert "\n" not in str(error) and str(path) in str(error)


def test_an_honest_one_is_answered_alike(honest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replayed(honest) == 24
    assert cli(["policies", "check", POLICY, "--replay", str(honest)]) == 0
    assert cli(["policies", "check", "tiers,max_wait_s=0.01", "--replay", str(honest)]) == 4
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "; the policy's parameters were 'max_wait_s=2.0'" in told


@given(st.data())
def test_any_value_in_any_place(honest: Path, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in honest.read_text().splitlines()]
    hurt(lines[data.draw(st.integers(0, len(lines) - 1))], data)
    with TemporaryDirectory() as name:
        bad = Path(name) / "bad.jsonl"
        bad.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert_one_line(bad)


@given(st.data())
def test_lines_lost_repeated_or_out_of_order(honest: Path, data: st.DataObject) -> None:
    header, *lines = honest.read_text().splitlines()
    picked = data.draw(st.lists(st.sampled_from(lines), max_size=len(lines)))
    with TemporaryDirectory() as name:
        bad = Path(name) / "bad.jsonl"
        bad.write_text("\n".join([header, *picked]) + "\n")
        assert_one_line(bad)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('["+", "r0", 0.0, -1, 4]', "-1 is no count"),
        ('["+", "r0", NaN, 1, 4]', "nan is no number"),
        ('["+", 5, 0.0, 1, 4]', "5 is no text"),
        ('["-", "nobody"]', "it has no 'nobody'"),
        ('["?", 0.0, 64, 9, 0, 0, {}, [], [5, null, null]]', "not iterable"),
        ('["?", 0.0, 64, 9, 0, 0, {}, [], [[1], null, null]]', "1 is no text"),
    ],
)
def test_what_cannot_be_is_named_with_its_line(honest: Path, tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{honest.read_text().splitlines()[0]}\n{line}\n")
    with pytest.raises(SimmoeError) as caught:
        replayed(path)
    assert f"'{path}' line 2 does not follow from those before: " in str(caught.value)
    assert told in str(caught.value)


def test_a_folder_a_pipe_and_nothing_are_no_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path, told in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe"), (tmp_path / "none", "No such file")):
        assert cli(["policies", "check", "tiers", "--replay", str(path)]) == 3
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1

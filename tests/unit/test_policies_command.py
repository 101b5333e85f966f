"""``simmoe policies`` as a user runs it: tables, verdicts, exit codes, replays of saved calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simmoe.cli import run
from simmoe.policies.loading import GROUPS, installed
from simmoe.policies.samples import SAMPLE_CONTEXT, sample_route_calls, sample_views
from simmoe.policies.testing import ask
from simmoe.policies.tiers import Tiers
from simmoe.policies.validate import RouteCall, call_from_json, route_call_to_json, view_to_json

POLICY = """\
from simmoe.policies.protocols import StepPlan


class Gate:
    def __init__(self, context, k: int = 8):
        self.k = k

    def plan(self, view, /):
        assert len(view.waiting) < 80, "a full house"
        return StepPlan(k_max=self.k)


class Wrong:
    def plan(self, view, /):
        return 3
"""


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "gate.py"
    path.write_text(POLICY)
    return path


def test_list_names_every_policy_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "list"]) == 0
    out = capsys.readouterr().out
    for kind in GROUPS:
        for name in installed(kind):
            assert any(line.split()[:2] == [name, kind] for line in out.splitlines())
    assert "max_wait_s=none" in out and "window=4" in out


def test_check_passes_and_says_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "check", "tiers,max_wait_s=9+lanes"]) == 0
    out = capsys.readouterr().out
    assert "tiers,max_wait_s=9.0 (batch policy)" in out and "lanes (route policy)" in out
    assert "FAIL" not in out and out.count("  ok    ") == 21


def test_check_fails_with_the_exit_code_of_policies(policy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "check", f"{policy_file}:Wrong"]) == 4
    captured = capsys.readouterr()
    assert "FAIL  answers every call validly: plan returned 3; it must return a StepPlan" in captured.out
    assert captured.err.count("\n") == 1 and "fails" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["check", "tier"], 2, "did you mean 'tiers'?"),
        (["check", "lanes,window=x"], 2, "window is 'x'"),
        (["check", "no/such.py:Policy"], 4, "no/such.py': No such file"),
        (["check", "fifo", "--ranks", "0"], 2, "--ranks"),
        (["check", "fifo", "--replay", "none.json"], 3, "cannot read the saved call 'none.json'"),
    ],
)
def test_bad_input_is_one_line_and_a_code(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["policies", *arguments]) == code
    captured = capsys.readouterr()
    assert told in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_saved_call_survives_json() -> None:
    for view in sample_views(SAMPLE_CONTEXT):
        call, deployment = call_from_json(json.loads(json.dumps(view_to_json(view, SAMPLE_CONTEXT))), "here")
        assert not isinstance(call, RouteCall)
        assert call == view._replace(waiting=tuple(view.waiting), running=tuple(view.running))
        assert replace(SAMPLE_CONTEXT, **deployment) == SAMPLE_CONTEXT
    for saved in sample_route_calls(SAMPLE_CONTEXT):
        data = route_call_to_json(saved.request, saved.ranks, saved.now_s)
        assert call_from_json(json.loads(json.dumps(data)), "here") == (replace(saved, ranks=tuple(saved.ranks)), {})


def test_replay_prints_the_answer_to_the_saved_call(
    policy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "call.json"
    view = next(view for view in sample_views(SAMPLE_CONTEXT) if len(view.waiting) == 7)
    path.write_text(json.dumps(view_to_json(view)))
    assert run(["policies", "check", "tiers", "--replay", str(path)]) == 0
    assert str(ask(Tiers(SAMPLE_CONTEXT), view)) in capsys.readouterr().out
    assert run(["policies", "check", "lanes", "--replay", str(path)]) == 3
    assert "holds a call of a batch policy; 'lanes' is none" in capsys.readouterr().err


def test_replay_reproduces_a_failure(policy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "call.json"
    view = next(view for view in sample_views(SAMPLE_CONTEXT) if len(view.waiting) == 80)
    path.write_text(json.dumps(view_to_json(view)))
    assert run(["policies", "check", f"{policy_file}:Gate", "--replay", str(path)]) == 4
    assert "gate.py:9: AssertionError: a full house" in capsys.readouterr().err
    assert run(["policies", "check", f"{policy_file}:Wrong", "--replay", str(path)]) == 4
    assert "plan returned 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is no saved policy call"),
        ('{"call": "plan", "view": {}, "deployment": {}}', "it has no 'waiting'"),
        ('{"call": "dance", "view": {}, "deployment": {}}', "its call is 'dance', neither plan, route nor queue_key"),
        ('{"call": "plan", "view": {}, "deployment": {"k": 3}}', "unknown 'k'"),
    ],
)
def test_what_is_no_saved_call_is_told(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "call.json"
    path.write_text(text)
    assert run(["policies", "check", "fifo", "--replay", str(path)]) == 3
    error = capsys.readouterr().err
    assert told in error and str(path) in error and error.count("\n") == 1

"""Policies by name and by file: the grammar, parameters, and one clear line for everything that is wrong."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from simmoe.errors import PolicyError, SimmoeError, UsageError
from simmoe.policies.fifo import Fifo
from simmoe.policies.lanes import Lanes
from simmoe.policies.loading import GROUPS, installed
from simmoe.policies.protocols import BatchPolicy, RoutePolicy
from simmoe.policies.queue_aware import QueueAware
from simmoe.policies.registry import parse_policy
from simmoe.policies.samples import SAMPLE_CONTEXT
from simmoe.policies.tiers import Tiers

SHIPPED = [(kind, name) for kind in GROUPS for name in installed(kind)]

USER_FILE = '''\
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simmoe.policies.protocols import ADMIT_ALL

if TYPE_CHECKING:
    from simmoe.policies.protocols import PolicyContext


@dataclass
class Batch:
    """A batch policy."""

    context: PolicyContext
    depth: int
    share: float | None = None
    on: bool = False
    label: str = "plain"

    def plan(self, view, /):
        return ADMIT_ALL


class Seer:
    clairvoyant = True

    def route(self, request, ranks, now_s, /):
        return ranks[0].dp_rank


class Broken:
    def __init__(self, depth: int = 1):
        raise ValueError("no depth will do")

    def plan(self, view, /):
        return ADMIT_ALL


class Odd:
    def __init__(self, table: list[int]):
        pass

    def plan(self, view, /):
        return ADMIT_ALL


class Both(Seer):
    def plan(self, view, /):
        return ADMIT_ALL
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "a+b" / "mine.py"
    path.parent.mkdir()
    path.write_text(USER_FILE)
    return path


def refusal(text: str, kind: type[SimmoeError]) -> str:
    with pytest.raises(kind) as error:
        parse_policy(text)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_shipped_policies_are_found_by_name(kind: str, name: str) -> None:
    choice = parse_policy(name)
    assert (choice.batch_name if kind == "batch" else choice.route_name) == name
    assert isinstance(choice.batch(SAMPLE_CONTEXT), BatchPolicy)
    assert isinstance(choice.route(SAMPLE_CONTEXT), RoutePolicy)
    assert not choice.clairvoyant


def test_the_missing_kind_is_the_default() -> None:
    assert isinstance(parse_policy("lanes").batch(SAMPLE_CONTEXT), Fifo)
    assert isinstance(parse_policy("tiers").route(SAMPLE_CONTEXT), QueueAware)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("fifo", "fifo+queue-aware"),
        ("lanes+tiers", "tiers+lanes"),
        (" tiers , max_wait_s=1e+1 + lanes , bypass=no,window=0 ", "tiers,max_wait_s=10.0+lanes,window=0,bypass=false"),
        ("tiers,max_wait_s=none", "tiers,max_wait_s=none+queue-aware"),
        ("vllm-0.32+fixed-k,k=16", "fixed-k,k=16+vllm-0.32"),
    ],
)
def test_canonical_text_names_both_kinds_and_parses_to_the_same(text: str, canonical: str) -> None:
    choice = parse_policy(text)
    assert choice.text == canonical
    assert parse_policy(canonical) == choice


def test_parameters_are_resolved_with_their_defaults() -> None:
    choice = parse_policy("tiers,max_wait_s=20+lanes,adaptive=false")
    assert choice.parameters["batch"] == {"max_wait_s": 20.0, "count_running": False}
    assert choice.parameters["route"]["adaptive"] is False
    assert choice.parameters["route"]["window"] == 4
    assert isinstance(choice.batch(SAMPLE_CONTEXT), Tiers) and isinstance(choice.route(SAMPLE_CONTEXT), Lanes)


def test_a_file_is_a_policy(user_file: Path) -> None:
    choice = parse_policy(f"{user_file}:Batch,depth=3,share=2,on=true,label=x+{user_file}:Seer")
    again = pickle.loads(pickle.dumps(choice))
    assert again == choice == parse_policy(choice.text)
    policy = again.batch(SAMPLE_CONTEXT)
    assert (policy.context, policy.depth, policy.share, policy.on, policy.label) == (SAMPLE_CONTEXT, 3, 2.0, True, "x")
    assert choice.parameters["batch"] == {"depth": 3, "share": 2.0, "on": True, "label": "x"}
    assert choice.clairvoyant
    assert len(set(choice.files.values())) == 1 and set(choice.files) == {f"{user_file}:Batch", f"{user_file}:Seer"}


def test_a_file_that_changes_in_use_is_told(user_file: Path) -> None:
    choice = parse_policy(f"{user_file}:Seer")
    user_file.write_text(USER_FILE + "\nEXTRA = 1\n")
    with pytest.raises(PolicyError, match="changed while it was in use"):
        choice.route(SAMPLE_CONTEXT)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tier", "no policy 'tier' (did you mean 'tiers'?)"),
        ("fifo+tiers", "'fifo' and 'tiers' are both batch policies"),
        ("lanes,windw=3", "policy 'lanes' has no parameter 'windw' (did you mean 'window'?)"),
        ("fifo,k=3", "policy 'fifo' has no parameter 'k' (it takes none)"),
        ("lanes,window=wide", "window is 'wide'; it must be a whole number"),
        ("lanes,window=none", "window is 'none'; it must be a whole number"),
        ("lanes,adaptive=maybe", "adaptive is 'maybe'; it must be true or false"),
        ("tiers,max_wait_s=nan", "max_wait_s is 'nan'; it must be a number, or none"),
        ("lanes,window", "'window' is no parameter; write key=value"),
        ("lanes,window=1,window=2", "window is given twice"),
        ("", "'' names no policy"),
        ("fifo+", "'fifo+' names no policy"),
        ("fifo+lanes+fifo", "names no policy"),
    ],
)
def test_unusable_text_is_told(text: str, told: str) -> None:
    assert told in refusal(text, UsageError)


def test_unusable_classes_are_told(user_file: Path, tmp_path: Path) -> None:
    assert "needs depth; add ',depth=...'" in refusal(f"{user_file}:Batch", UsageError)
    assert "has no class 'Batc' (did you mean 'Batch'?)" in refusal(f"{user_file}:Batc", PolicyError)
    assert "parameter 'table' is annotated" in refusal(f"{user_file}:Odd,table=1", PolicyError)
    assert "has both plan and route" in refusal(f"{user_file}:Both", PolicyError)
    assert "cannot read the policy file" in refusal(f"{tmp_path}/none.py:Batch", PolicyError)


def test_failures_in_a_users_file_have_their_line(user_file: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=rf"cannot be built: .*mine\.py:{line_of('no depth')}: ValueError: no depth"):
        parse_policy(f"{user_file}:Broken").batch(SAMPLE_CONTEXT)
    for name, source, told in [
        ("syntax", "x = 1\ndef plan(:\n", "syntax.py:2: SyntaxError: invalid syntax"),
        ("name", "x = 1\n\ny = z\n", "name.py:3: NameError: name 'z' is not defined"),
        ("inside", "import json\n\njson.loads('{')\n", "inside.py:3: JSONDecodeError: Expecting property name"),
        ("leaves", "raise SystemExit(3)\n", "leaves.py:1: SystemExit: 3"),
    ]:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        assert told in refusal(f"{path}:Anything", PolicyError)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(USER_FILE.splitlines(), 1) if text in line)


def test_a_refused_parameter_names_the_policy_and_its_range() -> None:
    with pytest.raises(UsageError, match=r"fixed-k: k is 99; it must be in 1\.\.32"):
        parse_policy("fixed-k,k=99").batch(SAMPLE_CONTEXT)
    with pytest.raises(UsageError, match=r"tiers: max_wait_s is 0\.0; it must be above 0"):
        parse_policy("tiers,max_wait_s=0").batch(SAMPLE_CONTEXT)

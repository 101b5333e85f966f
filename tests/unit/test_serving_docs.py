"""docs/serving.md names every metric and every outcome of a request that the router counts."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("prometheus_client") is None or find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.live.server.exchange import Outcome
from simmoe.live.server.metrics import RouterMetrics
from simmoe.live.server.router import OUTCOMES

DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_metrics_are_named_as_they_are_scraped() -> None:
    families = RouterMetrics([0], OUTCOMES, 8).registry.collect()
    exposed = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert exposed == set(re.findall(r"\bsimmoe_\w+", DOCS.partition("**Metrics**")[2].partition("\n\n")[0]))


def test_outcomes_are_named() -> None:
    said = DOCS.partition("Outcomes: ")[2].partition("\n\n")[0]
    router = (Path(__file__).parents[2] / "live" / "server" / "router.py").read_text(encoding="utf-8")
    own = set(re.findall(r'(?:return|outcome =) "([a-z ]+)"', router)) | {"bad request", "turned away"}
    lost = {Outcome.LOST.value}  # tried again, until it is one of the others
    assert set(re.findall(r"`([a-z ]+)`", said)) == set(OUTCOMES)
    assert set(OUTCOMES) == own | {outcome.value for outcome in Outcome} - lost

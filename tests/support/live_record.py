"""A simulated run's record as a live run leaves it."""

from __future__ import annotations

from typing import Any

from simmoe.records import RunRecord


def as_live(record: RunRecord, **more: Any) -> RunRecord:
    """Return the record as of live engines: what they report of themselves, and nothing of step costs or front end."""
    config = record.manifest["config"]
    engine = {name: value for name, value in config["engine"].items() if name != "watermark"}
    manifest = {
        "kind": "live",
        "config": {"num_ranks": config["num_ranks"], "k_max": config["k_max"], "engine": engine},
        "policy": record.manifest["policy"],
        "workload": record.manifest["workload"],
        **more,
    }
    return RunRecord(record.requests, manifest, record.steps)

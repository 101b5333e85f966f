"""The host of the machine at hand, from the clocks that a live record keeps of its engines' loop."""

from __future__ import annotations

import csv
import gzip
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simmoe.errors import RecordError
from simmoe.live.driving.recording import HOST_COLUMNS, HOST_FILE
from simmoe.profiles.catalog import Profile
from simmoe.profiles.host_times import HostTime, on_host
from simmoe.profiles.table import HostShare
from simmoe.records import RunRecord, read_record

UPDATE = "update"
"""Beside the launch paths' shares in a manifest: of each, what follows a step's output."""

MIXED = "mixed_host"
"""Likewise, the share of prompts beside decodes where a profile has one."""


def host_of(folder: Path, profile: Profile) -> dict[str, Any]:
    """Return the host's shares by a live run's record, as a manifest keeps them.

    Args:
        folder: of the record.
        profile: of the engines that were recorded.
    Returns:
        ``record`` and ``sha256`` of the file of the host's times, and ``shares``: launch path, or UPDATE, to base_s and
        per_seq_s, both seconds.
    Raises:
        RecordError: the record does not keep the host's times, or of another number of steps.
        ProfileError: it keeps too few.
    """
    record = read_record(folder)
    sizes = ((record.manifest.get("config") or {}).get("engine") or {}).get("captured_sizes")
    table = on_host(profile.captured_at(sizes).table, read_host_times(folder, record))
    shares = {**table.host, UPDATE: table.update}
    if table.mixed_host:
        shares[MIXED] = table.mixed_host.share
    return {
        "record": str(folder),
        "sha256": hashlib.sha256((folder / HOST_FILE).read_bytes()).hexdigest(),
        "shares": {name: share._asdict() for name, share in shares.items()},
    }


def with_host(profile: Profile, told: Mapping[str, Any] | None) -> Profile:
    """Return a profile with the host's shares that :func:`host_of` told; itself without any."""
    if not told:
        return profile
    shares = {name: HostShare(**share) for name, share in told["shares"].items()}
    table = profile.table
    host = {path: shares.get(path, share) for path, share in table.host.items()}
    mixed = table.mixed_host
    if mixed is not None and MIXED in shares:
        mixed = mixed._replace(share=shares[MIXED])
    return Profile(replace(table, host=host, mixed_host=mixed, update=shares[UPDATE]))


def read_host_times(folder: Path, record: RunRecord) -> list[HostTime]:
    """Return what the host took for the steps of a record, those that are known, by rank.

    Args:
        folder: of the record.
        record: what it holds.
    Raises:
        RecordError: it does not keep the host's times, or of another number of steps.
    """
    path, steps = folder / HOST_FILE, record.steps
    try:
        with gzip.open(path, "rt") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        raise RecordError(
            f"'{folder}' keeps no times of its host ({HOST_FILE}); record a run of 'simmoe live run' on a GPU"
        ) from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RecordError(f"cannot read '{path}': {error}") from None
    num_steps = 0 if steps is None else len(steps["start_s"])
    if steps is None or len(rows) != num_steps or not set(HOST_COLUMNS) <= set(rows[0] if rows else ()):
        raise RecordError(f"'{path}' is not of the record's {num_steps} steps")
    counts = zip(steps["num_prefill_tokens"].tolist(), steps["num_decode_tokens"].tolist(), strict=True)
    return [
        HostTime(prompt_tokens, prompt_tokens + decodes, int(row["num_prefill_seqs"]) + decodes, launch_s, update_s)
        for (prompt_tokens, decodes), row in zip(counts, rows, strict=True)
        if row["launch_s"] and row["update_s"]
        for launch_s, update_s in [(float(row["launch_s"]), float(row["update_s"]))]
    ]

"""The host of the machine at hand, from the clocks that a live record keeps of its engines' loop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simmoe.commands.record_times import read_times
from simmoe.commands.recorded_config import captured_sizes, live_engine, require_k_max
from simmoe.errors import RecordError
from simmoe.live.driving.recording import HOST_COLUMNS, HOST_FILE
from simmoe.profiles.catalog import Profile
from simmoe.profiles.fitting.host_times import HostTime, on_host
from simmoe.profiles.table import HostShare
from simmoe.record_checks import MAX_TIME_S, read_checked
from simmoe.records import RunRecord

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
        RecordError: the record is no live run's, or does not keep the host's times, or of another number of steps.
        UsageError: its engines had another k_max than the profile.
        ProfileError: it keeps too few.
    """
    record = read_checked(folder)
    if record.manifest.get("kind") != "live":
        raise RecordError(f"'{folder}' is no live run's record, which tells of a machine; record one there")
    require_k_max(record, profile, f"the engines of '{folder}'")
    table = on_host(profile.captured_at(captured_sizes(record)).table, read_host_times(folder, record))
    shares = {**table.host, UPDATE: table.update}
    if table.mixed_host:
        shares[MIXED] = table.mixed_host.share
    return {
        "record": str(folder),
        "sha256": hashlib.sha256((folder / HOST_FILE).read_bytes()).hexdigest(),
        "shares": {name: share._asdict() for name, share in shares.items()},
    }


def host_doubts(told: Mapping[str, Any], live: RunRecord, folder: Path) -> list[str]:
    """Return why the host that :func:`host_of` told may not be the one of a live run to predict, a line each.

    Args:
        told: by :func:`host_of`.
        live: the live run's record.
        folder: of it.
    Raises:
        RecordError: the record that told cannot be read any more.
    """
    found, other = [], Path(told["record"])
    if other.resolve() == folder.resolve():
        found.append(f"--host-from is the run at hand, '{folder}': what it is told of itself is no prediction")
    models = [(record.manifest.get("target") or {}).get("model") for record in (read_checked(other), live)]
    if None not in models and models[0] != models[1]:
        found.append(
            f"--host-from is of engines of model '{models[0]}', the live run's are of '{models[1]}': to launch another "
            f"model takes a host otherwise"
        )
    return found


def with_host(profile: Profile, told: Mapping[str, Any] | None) -> Profile:
    """Return a profile with the host's shares that :func:`host_of` told; itself without any.

    Raises:
        RecordError: a share is no time.
    """
    if not told:
        return profile
    shares = {name: _share(name, share) for name, share in told["shares"].items()}
    table = profile.table
    host = {path: shares.get(path, share) for path, share in table.host.items()}
    mixed = table.mixed_host
    if mixed is not None and MIXED in shares:
        mixed = mixed._replace(share=shares[MIXED])
    return Profile(replace(table, host=host, mixed_host=mixed, update=shares[UPDATE]))


def _share(name: str, told: Mapping[str, Any]) -> HostShare:
    share = HostShare(**told)
    if not all(isinstance(value, float | int) and 0 <= value <= MAX_TIME_S for value in share):
        raise RecordError(f"profile.host.shares.{name} is {told}; it must be seconds of at least 0")
    return share


def read_host_times(folder: Path, record: RunRecord) -> list[HostTime]:
    """Return what the host took for the steps of a record, those that are known, by rank.

    Args:
        folder: of the record.
        record: what it holds.
    Raises:
        RecordError: it does not keep the host's times, of another number of steps, or what is no time.
    """
    steps = record.steps
    if steps is None:
        raise RecordError(f"'{folder}' keeps no steps, of which the host's times are")
    path, num_prefill, num_decode = folder / HOST_FILE, steps["num_prefill_tokens"], steps["num_decode_tokens"]
    try:
        host = read_times(path, HOST_COLUMNS, "steps", len(num_prefill))
    except FileNotFoundError:
        raise RecordError(
            f"'{folder}' keeps no times of its host ({HOST_FILE}); record a run of 'simmoe live run' on a GPU"
        ) from None
    prompts, launch_s, update_s = (host[name] for name in HOST_COLUMNS)
    if (prompts % 1 != 0).any() or any((column < 0).any() for column in host.values()):
        raise RecordError(f"'{path}' leaves out how many prompts a step has, or has values below 0 or a part of one")
    known = ~np.isnan(launch_s + update_s)
    if ks := live_engine(record).graph_ks:  # a step at another budget took the host otherwise than one of its size
        known &= np.isin(steps["k_exec"], ks)
    num_seqs = prompts + num_decode
    columns = (num_prefill, num_prefill + num_decode, num_seqs.astype(int), launch_s, update_s)
    return [HostTime(*row) for row in zip(*(column[known].tolist() for column in columns), strict=True)]

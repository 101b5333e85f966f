"""The host of the machine at hand, recovered from the times a record keeps of engines whose host is known."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run as cli
from simmoe.commands.host import host_of, with_host
from simmoe.commands.validate import simulate_like
from simmoe.errors import ProfileError
from simmoe.live.driving.recording import HOST_FILE, host_csv_gz
from simmoe.live.engine.steps import StepRecord
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.profiles.fitting.host_times import LEAST_STEPS, HostTime, on_host
from simmoe.profiles.recorded_steps import read_recording
from simmoe.profiles.table import HostShare, MixedHost, StepTable
from simmoe.records import RunRecord, read_record, write_record
from simmoe.simulator.config import FrontEndConfig
from tests.support.live_record import as_live

PROFILE = "olmoe-1b-7b-split4-h200"
SLOW = {"full": HostShare(5e-3, 6e-5), "piecewise": HostShare(16e-3, 6e-5), "eager": HostShare(40e-3, 6e-5)}
UPDATE = HostShare(5e-4, 2e-5)


def slow_table() -> StepTable:
    """Return the shipped table on a host that is known, and slow."""
    return replace(load_profile(PROFILE).table, host=SLOW, update=UPDATE)


def times(table: StepTable, number: int = 3000, noise: float = 0.0) -> list[HostTime]:
    """Return the host's times of steps of every launch path; noise is of their logarithms."""
    rng = np.random.default_rng(3)
    largest = table.captured_sizes[-1] if table.captured_sizes else 0
    found = []
    for _ in range(number):
        decodes = int(rng.integers(1, 120))
        prompts = int(rng.integers(0, 3)) * int(rng.random() < 0.3)
        prompt_tokens = prompts * 1500 + (largest if prompts and rng.random() < 0.3 else 0)
        tokens, seqs = prompt_tokens + decodes, prompts + decodes
        path = "eager" if tokens > largest else "piecewise" if prompts else "full"
        share, update = table.host[path], table.update
        update_s = update.base_s + update.per_seq_s * seqs
        launch_s = share.base_s + share.per_seq_s * seqs - update_s
        factor = rng.lognormal(-(noise**2) / 2, noise, 2) if noise else (1.0, 1.0)
        found.append(HostTime(prompt_tokens, tokens, seqs, launch_s * factor[0], update_s * factor[1]))
    return found


def test_a_steady_host_is_found_exactly() -> None:
    table = slow_table()
    found = on_host(load_profile(PROFILE).table, times(table))
    for path, share in table.host.items():
        assert found.host[path] == pytest.approx(share, rel=1e-9)
    assert found.update == pytest.approx(table.update, rel=1e-9)
    assert replace(found, host=table.host, update=table.update) == table  # nothing else changes


def test_of_a_host_that_wanders_the_mean_is_found_and_stalls_are_none_of_it() -> None:
    table = slow_table()
    stalled = times(table, noise=0.2)
    stalled[::50] = [time._replace(launch_s=time.launch_s + 0.4) for time in stalled[::50]]
    found = on_host(load_profile(PROFILE).table, stalled)
    for seqs in (10, 100):
        for path, share in table.host.items():
            expected_s = share.base_s + share.per_seq_s * seqs
            assert found.host[path].base_s + found.host[path].per_seq_s * seqs == pytest.approx(expected_s, rel=0.03)


def test_a_path_that_no_step_took_keeps_its_constant() -> None:
    table = load_profile(PROFILE).table
    found = on_host(table, [time for time in times(slow_table()) if time.num_tokens <= table.captured_sizes[-1]])
    assert found.host["eager"] == pytest.approx((table.host["eager"].base_s, SLOW["eager"].per_seq_s), rel=1e-9)


def test_without_graphs_all_steps_are_of_one_path() -> None:
    table = slow_table().without_graphs()
    found = on_host(load_profile(PROFILE).table.without_graphs(), times(table))
    assert found.host == {"eager": pytest.approx(SLOW["eager"], rel=1e-9)}


def test_few_steps_tell_nothing() -> None:
    own = times(slow_table())
    decodes = [time for time in own if not time.num_prefill_tokens][: LEAST_STEPS - 1]
    with pytest.raises(ProfileError, match="record some ten seconds"):
        on_host(slow_table(), decodes + [time for time in own if time.num_prefill_tokens])


def loop(launch_s: float, update_s: float, device_s: list[float]) -> list[StepRecord]:
    """Return steps as vLLM's loop makes them: the next but one is composed once a step is taken in."""
    composed_s, device_free_s, steps = [0.0, launch_s], 0.0, list[StepRecord]()
    for i, takes_s in enumerate(device_s):
        launched_s = composed_s[i] + launch_s
        device_free_s = max(device_free_s, composed_s[i]) + takes_s
        next_launched_s = composed_s[i + 1] + launch_s
        output_s = max(device_free_s, next_launched_s)
        composed_s.append(output_s + update_s)
        schedule_end_s = composed_s[i] + 0.1 * launch_s
        steps.append(
            StepRecord(
                i, composed_s[i], schedule_end_s, output_s, output_s + update_s, 0, 0, 0, 20, 20_000, 32, 32, 640, 0,
                20, 0, composed_s[i], device_free_s, launched_s - schedule_end_s,
            )
        )  # fmt: skip
    return steps


@pytest.mark.parametrize("device_ms", [(1.0,), (9.0,), (1.0, 9.0, 4.0)])
def test_the_hosts_own_time_is_told_from_its_waiting_for_the_device(device_ms: tuple[float, ...]) -> None:
    launch_s, update_s = 0.003, 0.0005
    device_s = [1e-3 * device_ms[i % len(device_ms)] for i in range(30)]
    content = host_csv_gz({0: loop(launch_s, update_s, device_s), 1: loop(launch_s, update_s, device_s)})
    assert content is not None
    rows = [line.split(",") for line in gzip.decompress(content).decode().splitlines()[1:]]
    assert len(rows) == 60
    for rank in (rows[:30], rows[30:]):
        assert [row[1] for row in rank[:2]] == ["", ""] and rank[-1][2] == ""
        assert {float(row[1]) for row in rank[2:]} == {launch_s}
        assert [float(row[2]) for row in rank[:-1]] == pytest.approx([update_s] * 29, abs=1e-6)


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_recording_of_the_same_steps_tells_the_same(tmp_path: Path, backend: str) -> None:
    steps = loop(0.003, 0.0005, [1e-3 * (1 + i % 7) for i in range(60)])
    content = host_csv_gz({0: steps}, backend)
    assert content is not None
    rows = [line.split(",")[1:] for line in gzip.decompress(content).decode().splitlines()[1:]]
    columns = [name for name in StepRecord._fields if name != "schedule_start_s"]
    head = {"format": "simmoe-recording", "version": 1, "steps": ["start_s", *columns]}
    lines = [head, {"recording": "load"}]
    lines += [["step", step.schedule_start_s, *(getattr(step, name) for name in columns)] for step in steps]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = [(step.launch_s, step.update_s) for step in read_recording(path, [], (), backend)]
    shown = [["" if value is None else f"{value:.6f}" for value in step] for step in told]
    # a recording tells of taking a step in only where two more follow it
    assert shown[:-2] == rows[:-2]
    assert sum(update_s is not None for _, update_s in told) == 58


def test_an_idle_engines_wait_for_work_is_not_the_hosts() -> None:
    steps = loop(0.003, 0.0005, [0.004] * 10)
    later = [
        step._replace(**{name: getattr(step, name) + 0.05 for name in step._fields if name in _TIMES})
        for step in steps[5:]
    ]
    content = host_csv_gz({0: steps[:5] + later})
    assert content is not None
    launches = [line.split(",")[1] for line in gzip.decompress(content).decode().splitlines()[1:]]
    assert launches == ["", "", "0.003000", "0.003000", "0.003000", "", "", "0.003000", "0.003000", "0.003000"]


_TIMES = ("schedule_start_s", "schedule_end_s", "output_s", "update_end_s", "device_start_s", "device_end_s")


def test_a_worker_that_does_not_tell_leaves_no_file() -> None:
    assert host_csv_gz({0: [step._replace(launch_s=None) for step in loop(0.003, 0.0005, [0.004] * 10)]}) is None


@pytest.fixture
def records(tmp_path: Path) -> tuple[Path, Path]:
    """Two records of engines on the slow host, as live runs leave them: one to be told by, one to be compared."""
    profile, times_s = Profile(slow_table()), load_profile(PROFILE).front_end
    front_end = FrontEndConfig(ingress_s=times_s.ingress_s, egress_s=times_s.egress_s)
    folders = []
    for name, seed in (("other", "5"), ("live", "6")):
        options = ["--rate", "30", "--requests", "100", "--seed", seed, "--record-steps", "--profile", PROFILE]
        assert cli(["run", *options, "--policy", "fifo", "--out", str(tmp_path / f"{name}-was")]) == 0
        live = as_live(read_record(tmp_path / f"{name}-was"))
        slow, _ = simulate_like(live, profile, front_end)
        files = {HOST_FILE: _host_file(slow)}
        folders.append(write_record(tmp_path / name, RunRecord(slow.requests, live.manifest, slow.steps, files)))
    return folders[0], folders[1]


def _host_file(record: RunRecord) -> bytes:
    """Return what the host took for each step of a simulated run; a step's prompts are one."""
    steps = record.steps
    assert steps is not None
    lines = ["num_prefill_seqs,launch_s,update_s"]
    largest = load_profile(PROFILE).table.captured_sizes[-1]
    for prompt_tokens, decodes in zip(steps["num_prefill_tokens"], steps["num_decode_tokens"], strict=True):
        seqs = int(decodes) + int(prompt_tokens > 0)
        share = SLOW["eager" if prompt_tokens + decodes > largest else "piecewise" if prompt_tokens else "full"]
        update_s = UPDATE.base_s + UPDATE.per_seq_s * seqs
        launch_s = share.base_s + share.per_seq_s * seqs - update_s
        lines.append(f"{int(prompt_tokens > 0)},{launch_s:.9f},{update_s:.9f}")
    return gzip.compress(("\n".join(lines) + "\n").encode())


def test_with_the_host_of_another_run_the_slow_machine_is_simulated_without_error(
    records: tuple[Path, Path], tmp_path: Path
) -> None:
    other, live = records
    errors = {}
    for name, options in {"profile": [], "host": ["--host-from", str(other)]}.items():
        out = tmp_path / name
        arguments = ["validate", "--live", str(live), "--profile", PROFILE, *options, "--out", str(out)]
        assert cli(arguments) == 0
        content = json.loads((out / "compare" / "compare.json").read_text())
        assert content["causes"]["counterfactual"]  # the simulated run can be repeated with its host
        errors[name] = {(row["metric"], row["statistic"]): row["error"] for row in content["differences"]}
        assert ("host" in read_record(out / "sim").manifest["profile"]) == (name == "host")
    for metric in ("ttft", "tpot"):
        assert errors["profile"][metric, "mean"] < -0.05
        assert errors["host"][metric, "mean"] == pytest.approx(0, abs=1e-4)
    told = read_record(tmp_path / "host" / "sim").manifest["profile"]["host"]
    assert told == host_of(other, load_profile(PROFILE))
    assert with_host(load_profile(PROFILE), told).table.host["full"] == pytest.approx(SLOW["full"], rel=1e-6)


def test_a_record_without_the_hosts_times_is_refused(
    records: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, live = records
    options = ["validate", "--live", str(live), "--profile", PROFILE, "--host-from", str(other)]
    lines = gzip.decompress((other / HOST_FILE).read_bytes()).decode().splitlines()
    (other / HOST_FILE).write_bytes(gzip.compress(("\n".join(lines[:-1]) + "\n").encode()))
    assert cli([*options, "--out", str(tmp_path / "short")]) == 3
    assert f"is not of the record's {len(lines) - 1} steps" in capsys.readouterr().err
    for wrong, message in (
        ("1,x,0.001", "' line 2: launch_s is 'x'; it must be a finite number"),
        ("1,nan,0.001", "' line 2: launch_s is 'nan'; it must be a finite number"),
        ("1,0.001", "' line 2: update_s is None; it must be a finite number"),
        (",0.001,0.001", "' leaves out how many prompts a step has, or has values below 0"),
        ("1,0.001,-0.001", "' leaves out how many prompts a step has, or has values below 0"),
    ):
        spoilt = [lines[0], wrong, *lines[2:]]
        (other / HOST_FILE).write_bytes(gzip.compress(("\n".join(spoilt) + "\n").encode()))
        assert cli([*options, "--out", str(tmp_path / "spoilt")]) == 3
        assert f"{HOST_FILE}{message}" in capsys.readouterr().err
    (other / HOST_FILE).write_text("no gzip")
    assert cli([*options, "--out", str(tmp_path / "broken")]) == 3
    assert "cannot read" in capsys.readouterr().err
    (other / HOST_FILE).unlink()
    assert cli([*options, "--out", str(tmp_path / "none")]) == 3
    assert "keeps no times of its host" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_prompts_launched_apart_from_decodes_have_the_hosts_time_too() -> None:
    """Where a profile tells them apart; 1,000 of a table's tokens and more beside decodes take 25 ms."""
    slow = slow_table()
    apart = MixedHost(1000, HostShare(25e-3, 6e-5))
    largest = slow.captured_sizes[-1]

    def launched_apart(time: HostTime) -> HostTime:
        if not 1000 < time.num_prefill_tokens < time.num_tokens <= largest:
            return time
        share, update = apart.share, slow.update
        update_s = update.base_s + update.per_seq_s * time.num_seqs
        return time._replace(launch_s=share.base_s + share.per_seq_s * time.num_seqs - update_s)

    known = [launched_apart(time) for time in times(slow)]
    known += [time._replace(num_prefill_tokens=500) for time in times(slow) if time.num_prefill_tokens == 1500]
    shipped = replace(load_profile(PROFILE).table, mixed_host=MixedHost(1000, HostShare(1.0, 0.0)))
    found = on_host(shipped, known)
    assert found.mixed_host is not None and found.mixed_host.above_tokens == 1000
    assert found.mixed_host.share == pytest.approx(apart.share, rel=1e-9)
    assert found.host["piecewise"] == pytest.approx(slow.host["piecewise"], rel=1e-9)
    # on a profile: what a manifest keeps of it is put in its place
    shares = {**found.host, "update": found.update, "mixed_host": found.mixed_host.share}
    told = {"shares": {name: share._asdict() for name, share in shares.items()}}
    assert with_host(Profile(shipped), told).table.mixed_host == found.mixed_host

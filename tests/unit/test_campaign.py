"""The campaign's runner, with stub jobs for real: placement, what is done or failed, limits, interrupts, archives."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "campaign"
NAMES = ("job", "pace", "pack", "plan", "runner")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks/ is in the repository alone")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The campaign's modules by name, ``main`` among them; its folder is on the path for the length of a test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("campaign_main", FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    yield SimpleNamespace(main=main, **{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


def stub(modules: Any, name: str, program: str, **options: Any) -> Any:
    """Return a job that runs a Python program: ``job`` is its folder, ``say`` adds a line to what all jobs said."""
    start = (
        "import fcntl, os, pathlib, signal, subprocess, sys\n"
        "job = pathlib.Path(sys.argv[1])\n"
        f"def say(text): os.write(os.open(job.parent / 'said', os.O_WRONLY | os.O_APPEND | os.O_CREAT),"
        f" f'{name} {{text}}\\n'.encode())\n"
    )
    options = {"makes": ("made",), "expected_s": 1.0, "least_s": 0.0, **options}
    return modules.job.Job(name, ("{python}", "-c", (start + program).replace("{", "{{").replace("}", "}}"), "{job}"),
                           **options)  # fmt: skip


DONE = "say('on ' + os.environ['CUDA_VISIBLE_DEVICES']); (job / 'made').write_text('x')\n"
#: Blocks, with a child, until it is stopped; called again, it makes what it should.
BLOCK = (
    "lock = open(job.parent / 'lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
    "if (job / 'begun').exists(): (job / 'made').write_text('x'); sys.exit()\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], pass_fds=[lock.fileno()])\n"
    "(job / 'begun').write_text('x')\n"
    "(job.parent / 'fifo').write_text(str(os.getpid()))\n"
    "signal.pause()\n"
)
#: Waits until BLOCK has begun.
MEET = "open(job.parent / 'fifo').read(1)\n"


def said(out: Path) -> list[str]:
    return (out / "said").read_text().splitlines()


def campaign(modules: Any, jobs: list[Any], gpus: list[str], out: Path, **options: Any) -> Any:
    out.mkdir(exist_ok=True)
    made = modules.runner.Campaign(jobs, gpus, out, lambda line: None, **options)
    made.run()
    return made


def wait_until_all_are_dead(out: Path) -> None:
    """Return once nobody has the lock that a blocking job and its child hold while they live."""
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX)"
    subprocess.run([sys.executable, "-c", program, str(out / "lock")], check=True, timeout=60)


def state(out: Path, name: str) -> str:
    return str(json.loads((out / name / "job.json").read_text())["state"])


@pytest.mark.parametrize("seed", range(5))
def test_jobs_go_on_gpus_of_their_own(modules: Any, tmp_path: Path, seed: int) -> None:
    """Any plan on any number of GPUs: in order, on as many as asked, none twice at once, all done."""
    draw = random.Random(seed)
    gpus = [str(gpu) for gpu in range(draw.randint(1, 3))]
    begin = "say('begins ' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
    end = "say('ends ' + os.environ['CUDA_VISIBLE_DEVICES']); (job / 'made').write_text('x')\n"
    jobs = [stub(modules, f"j{i}", begin + end, num_gpus=draw.randint(1, 3)) for i in range(8)]
    done = campaign(modules, jobs, gpus, tmp_path)
    busy: set[str] = set()
    for line in said(tmp_path):
        name, what, on = line.split()
        number = next(job.num_gpus for job in jobs if job.name == name)
        assert len(on.split(",")) == number and set(on.split(",")) <= set(gpus)
        assert bool(busy & set(on.split(","))) == (what == "ends")
        busy = busy ^ set(on.split(","))
    assert not busy
    for job in jobs:
        fits = job.num_gpus <= len(gpus)
        assert done.told[job.name] == ("done" if fits else f"needs {job.num_gpus} GPUs")
        assert (tmp_path / job.name / "made").exists() == fits


def test_two_one_card_jobs_run_side_by_side(modules: Any, tmp_path: Path) -> None:
    """Either waits for the other."""
    os.mkfifo(tmp_path / "fifo")
    jobs = [
        stub(modules, "a", "open(job.parent / 'fifo', 'w').write('x')\n" + DONE),
        stub(modules, "b", MEET + DONE),
        stub(modules, "both", DONE, num_gpus=2),
        stub(modules, "last", DONE),
    ]
    campaign(modules, jobs, ["4", "7"], tmp_path)
    assert sorted(said(tmp_path)[:2]) == ["a on 4", "b on 7"]
    assert said(tmp_path)[2:] == ["both on 4,7", "last on 4"]


def test_behind_a_job_that_waits_for_cards_only_those_go_first_that_do_not_keep_it_waiting(
    modules: Any, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    jobs = [
        stub(modules, "runs", MEET + DONE, expected_s=1000.0),
        stub(modules, "both", DONE, num_gpus=2, expected_s=1000.0),
        stub(modules, "longer", DONE, expected_s=2000.0),
        stub(modules, "shorter", DONE + "open(job.parent / 'fifo', 'w').write('x')\n", expected_s=500.0),
    ]
    campaign(modules, jobs, ["0", "1"], tmp_path)
    assert [line.split()[0] for line in said(tmp_path)] == ["shorter", "runs", "both", "longer"]


def test_done_jobs_are_skipped_and_failing_ones_stop_nobody_and_go_last(modules: Any, tmp_path: Path) -> None:
    """One that fails at once is tried once more at once: its card may have been busy with the job before."""
    jobs = [
        stub(modules, "bad", "say('tried'); sys.exit(3)"),
        stub(modules, "busy", "if (job / 'x').exists(): " + DONE + "else: (job / 'x').write_text('x'); sys.exit(3)"),
        stub(modules, "good", DONE),
        stub(modules, "part", "say('tried')"),
    ]
    first = campaign(modules, jobs, ["0"], tmp_path)
    assert first.told == {"bad": "failed", "busy": "done", "good": "done", "part": "unfinished"}
    assert said(tmp_path) == ["bad tried", "bad tried", "busy on 0", "good on 0", "part tried"]
    (tmp_path / "said").unlink()
    second = campaign(modules, jobs, ["0"], tmp_path)
    assert second.told["good"] == "done before"
    assert said(tmp_path) == ["part tried", "bad tried", "bad tried"]
    (tmp_path / "good" / "made").unlink()
    assert campaign(modules, jobs, ["0"], tmp_path).told["good"] == "done", "what it made was gone"


@pytest.mark.parametrize("deaf", [False, True])
def test_at_the_limit_what_runs_is_stopped_and_goes_on_in_the_next_call(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    os.mkfifo(tmp_path / "fifo")
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" * deaf + BLOCK
    jobs = [
        stub(modules, "long", program, resumes=True),
        stub(modules, "short", MEET + DONE),
        stub(modules, "later", DONE, num_gpus=2),
    ]
    # the time is up once the short one has ended, which is after the long one has begun
    over = tmp_path / "short" / "made"
    clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: 1000.0 * over.exists()})
    with monkeypatch.context() as patch:
        patch.setattr(modules.runner, "time", clock)
        if deaf:
            patch.setattr(modules.runner, "GRACE_S", 0.0)
        first = campaign(modules, jobs, ["0", "1"], tmp_path, limit_s=100.0)
    assert first.told == {"long": "stopped", "short": "done", "later": "no time left"}
    wait_until_all_are_dead(tmp_path)
    assert campaign(modules, jobs, ["0", "1"], tmp_path).told == {
        "long": "done", "short": "done before", "later": "done",
    }  # fmt: skip
    assert len(json.loads((tmp_path / "long" / "job.json").read_text())["slices"]) == 2


def test_nothing_starts_that_cannot_end_in_time(modules: Any, tmp_path: Path) -> None:
    left_s = 100.0
    limit_s = left_s + modules.runner.STOPPING_S
    jobs = [
        stub(modules, "whole", DONE, expected_s=left_s + 1),
        stub(modules, "resumes", DONE, expected_s=left_s + 1, resumes=True, least_s=left_s / 2),
        stub(modules, "too-late", DONE, expected_s=1.0, resumes=True, least_s=left_s + 1),
        stub(modules, "fits", DONE, expected_s=left_s / 2),
    ]
    told = campaign(modules, jobs, ["0"], tmp_path, limit_s=limit_s).told
    assert told == {"whole": "no time left", "resumes": "done", "too-late": "no time left", "fits": "done"}


def test_a_command_is_told_what_is_left_and_the_environment_goes_before_the_plans(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAMPAIGN_GIVEN", "mine")
    program = "import os, sys; print(sys.argv[2], os.environ['CAMPAIGN_GIVEN'], os.environ['CAMPAIGN_PLANNED'])"
    environment = {"CAMPAIGN_GIVEN": "plan", "CAMPAIGN_PLANNED": "plan"}
    job = modules.job.Job("told", ("{python}", "-c", program, "{job}", "{left_s}"), (), 1.0, environment=environment)
    campaign(modules, [job], ["0"], tmp_path, limit_s=500.0)
    seconds, *rest = (tmp_path / "told" / "job.log").read_text().split()
    assert rest == ["mine", "plan"]
    most_s = 500.0 - modules.runner.STOPPING_S - modules.runner.ENDING_S
    assert most_s / 2 < int(seconds) <= most_s


def test_a_job_gets_the_cpus_of_its_gpus(modules: Any, tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    program = "say(sorted(os.sched_getaffinity(0))); (job / 'made').write_text('x')"
    campaign(modules, [stub(modules, "a", program)], ["5"], tmp_path, cpus={"5": {cpu}})
    assert said(tmp_path) == [f"a [{cpu}]"]
    assert os.sched_getaffinity(0) >= {cpu}


@pytest.mark.parametrize(("pace", "tables"), [(8.0, "host too slow"), (22.0, "done")])
def test_jobs_that_want_a_fast_host_are_left_out_on_a_slow_one(
    modules: Any, tmp_path: Path, pace: float, tables: str
) -> None:
    jobs = [stub(modules, "table", DONE, fast_host=True), stub(modules, "layer", DONE)]
    sampled = modules.pace.Pace(sample=lambda: pace, every_s=0.0)
    told = campaign(modules, jobs, ["0"], tmp_path, min_pace=15.0, pace=sampled).told
    assert told == {"table": tables, "layer": "done"}
    assert modules.pace.turns_per_second() > 0


DRIVER = """
import importlib.util, sys
sys.path.insert(0, {folder!r})
spec = importlib.util.spec_from_file_location("campaign_main", {folder!r} + "/__main__.py")
main = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main)
from job import Job
plan = [Job(name, tuple(command), ("made",), 1.0, resumes=True, least_s=0.0) for name, command in {plan!r}]
sys.exit(main.main(plan, {argv!r}))
"""


def driven(jobs: list[Any], out: Path) -> subprocess.Popen[str]:
    """Start a campaign as a program of its own, on one GPU."""
    plan = [(job.name, job.command) for job in jobs]
    program = DRIVER.format(folder=str(FOLDER), plan=plan, argv=["--out", str(out), "--gpus", "0"])
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_its_children_are_dead_and_it_can_go_on(modules: Any, tmp_path: Path, how: signal.Signals) -> None:
    os.mkfifo(tmp_path / "fifo")
    jobs = [stub(modules, "first", DONE), stub(modules, "long", BLOCK)]
    running = driven(jobs, tmp_path)
    (tmp_path / "fifo").read_text()  # once the long one has begun
    running.send_signal(how)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    wait_until_all_are_dead(tmp_path)
    assert [state(tmp_path, job.name) for job in jobs] == ["done", "stopped"]
    assert "first  done" in printed and "long   stopped" in printed
    assert printed.endswith((tmp_path / "packed" / "campaign.log").read_text()), "the table too"
    again = driven(jobs, tmp_path)
    printed, _ = again.communicate()
    assert again.returncode == 0, printed
    assert "first  done before" in printed and "long   done" in printed


def test_interrupted_again_and_again_it_stops_all_that_runs(modules: Any, tmp_path: Path) -> None:
    """Also while it notes and packs what it has stopped."""
    for name in ("one", "other"):
        os.mkfifo(tmp_path / f"{name}.fifo")
    block = (
        "lock = open(job.parent / 'lock', 'w'); fcntl.flock(lock, fcntl.LOCK_SH)\n"
        "open(f'{job}.fifo', 'w').write('x'); signal.pause()\n"
    )
    meet = "for name in ('one', 'other'): open(job.parent / f'{name}.fifo').read(1)\n"
    jobs = [stub(modules, "one", block), stub(modules, "other", block), stub(modules, "last", meet + DONE)]

    def press(folders: Any) -> None:
        if (tmp_path / "last" / "made").exists():
            signal.raise_signal(signal.SIGINT)

    made = modules.runner.Campaign(jobs, ["0", "1", "2"], tmp_path, lambda line: None, packed=press)
    before = signal.signal(signal.SIGINT, made.interrupt)
    try:
        made.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert made.is_interrupted and made.told == {"one": "stopped", "other": "stopped", "last": "done"}
    wait_until_all_are_dead(tmp_path)


def test_killed_it_leaves_whole_archives_from_which_another_machine_goes_on(modules: Any, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    os.mkfifo(here / "fifo")
    jobs = [stub(modules, "first", DONE), stub(modules, "long", BLOCK)]
    running = driven(jobs, here)
    blocking = int((here / "fifo").read_text())
    running.kill()
    running.communicate()
    os.killpg(blocking, signal.SIGKILL)
    wait_until_all_are_dead(here)
    with tarfile.open(here / "packed" / "gpu0.tar.gz") as archive:
        archive.extractall(there, filter="data")
    assert (there / "first" / "made").read_text() == "x"
    assert campaign(modules, jobs[:1], ["0"], there).told == {"first": "done before"}
    assert state(here, "long") == "stopped", "as good as stopped: the next call goes on with it"


@pytest.mark.parametrize("seed", range(5))
def test_archives_hold_every_file_once_within_the_size(modules: Any, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    most_bytes = 30_000
    files = {}
    for number in range(draw.randint(1, 30)):
        path = tmp_path / "out" / f"job{number % 4}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = draw.randbytes(draw.randint(0, 20_000)) if draw.random() < 0.5 else b"x" * draw.randint(0, 10**6)
        path.write_bytes(data)
        files[str(path.relative_to(tmp_path / "out"))] = data
    folders = {"0": [tmp_path / "out" / name for name in ("job2", "job0")], "1": [tmp_path / "out" / "job1"]}
    for of_gpus in (folders, {"0": folders["0"]}):
        written = modules.pack.pack(tmp_path / "out", of_gpus, tmp_path / "packed", most_bytes)
        assert set(written) == set((tmp_path / "packed").iterdir()), "no archive of before is left, and no part of one"
        found: list[tuple[str, bytes]] = []
        for path in written:
            assert path.stat().st_size <= most_bytes
            with tarfile.open(path) as archive:
                found += [(entry.name, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
        chosen = {path.name for of_gpu in of_gpus.values() for path in of_gpu}
        assert sorted(found) == sorted((name, data) for name, data in files.items() if name.split("/")[0] in chosen)


@pytest.mark.parametrize("num_written", range(3))
def test_killed_while_it_packs_it_has_lost_nothing_that_was_packed(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    """A file moves to the next archive as one before it grows, and to another GPU's with its job."""
    first, second = tmp_path / "job0", tmp_path / "job1"
    for path in (first / "a", first / "b", second / "c"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(random.Random(str(path)).randbytes(5_000))
    packed = tmp_path / "packed"

    def found() -> set[str]:
        names: set[str] = set()
        for path in packed.glob("gpu*.tar.gz"):
            with tarfile.open(path) as archive:
                names |= set(archive.getnames())
        return names

    modules.pack.pack(tmp_path, {"0": [first, second]}, packed, 20_000)
    assert found() == {"job0/a", "job0/b", "job1/c"}
    (first / "a").write_bytes(random.Random(0).randbytes(15_000))
    write, left = modules.pack._write, iter(range(num_written))

    def killed(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return write(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(modules.pack, "_write", killed)
        modules.pack.pack(tmp_path, {"0": [first], "1": [second]}, packed, 20_000)
    assert found() == {"job0/a", "job0/b", "job1/c"}
    whole = modules.pack.pack(tmp_path, {"0": [first], "1": [second]}, packed, 20_000)
    assert len(whole) == 3 and set(packed.iterdir()) == set(whole), "what was half written is gone, too"


def test_files_that_vanish_while_they_are_packed_are_left_out(modules: Any, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    kept, gone = tmp_path / "job" / "kept", tmp_path / "job" / "gone"
    kept.write_text("x")
    assert modules.pack._parts([gone, kept], 10**6) == [[(kept, b"x")]]


def test_cpus_are_shared_out_by_whole_cores(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.main, "physical_cores", lambda allowed: [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert modules.main.shares(["0", "1"]) == {"0": {0, 4, 1, 5}, "1": {2, 6, 3, 7}}
    assert modules.main.shares(["3"]) == {"3": set(range(8))}


def test_unknown_names_are_refused_and_others_listed(
    modules: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [stub(modules, "first", DONE), stub(modules, "second", DONE)]
    with pytest.raises(SystemExit, match="2"):
        modules.main.main(jobs, ["--out", str(tmp_path), "--only", "frist"])
    assert "did you mean 'first'" in capsys.readouterr().err
    assert modules.main.main(jobs, ["--out", str(tmp_path), "--only", "second", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "second" in shown and "first" not in shown
    assert modules.main.main(jobs, ["--out", str(tmp_path), "--dry-run"]) == 0
    assert len(capsys.readouterr().out.split(str(tmp_path / "first"))) == 2
    monkeypatch.setenv("GIVEN", "mine")
    job = replace(jobs[0], environment={"GIVEN": "plan", "PLANNED": "a b"})
    assert modules.main.main([job], ["--out", str(tmp_path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"PLANNED='a b' {sys.executable} ")
    assert not list(tmp_path.iterdir())

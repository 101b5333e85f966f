"""Where threads run: no main thread shares a physical core with any other, whatever the topology."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.errors import LiveError
from simmoe.live.measure import pinning

# a main thread and one other, until standard input ends
TWO_THREADS = """
import sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
"""


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_main_threads_share_no_core(num_cores: int, threads: int, num_main: int, adjacent: bool) -> None:
    """Siblings are numbered next to each other on some machines, by halves on others."""
    cores = [
        tuple(core * threads + i if adjacent else core + i * num_cores for i in range(threads))
        for core in range(num_cores)
    ]
    if num_cores < num_main + pinning.OTHERS:
        with pytest.raises(LiveError, match=rf"use {num_cores}: .* without --pin"):
            pinning.places(cores, num_main)
        return
    where = pinning.places(cores, num_main)
    core_of = {cpu: core for core in cores for cpu in core}
    own = [core_of[cpu] for cpu in where.own]
    assert len(set(own)) == num_main
    assert not set(own) & {core_of[cpu] for cpu in where.others}
    assert len(where.others) == (num_cores - num_main) * threads


@pytest.mark.parametrize(("text", "cpus"), [("0", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("1,17", {1, 17})])
def test_a_kernels_list_of_cpus(text: str, cpus: set[int]) -> None:
    assert pinning.parse_cpus(text) == cpus


def test_siblings_outside_the_allowed_set_are_left_out(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert pinning.physical_cores({0, 1, 4, 6}, tmp_path) == [(0, 4), (1,), (6,)]
    assert pinning.physical_cores({0, 9}, tmp_path) == [(0,), (9,)]  # a CPU the kernel says nothing of


def test_the_threads_of_a_process_are_pinned() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU: nothing to tell apart")
    with subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert child.pid in pinning.descendants(os.getpid())
        assert pinning.title(child.pid) == ""
        pinning.pin({child.pid: cpus[0]}, [], cpus[1:])
        affinity = {
            int(task.name): os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{child.pid}/task").iterdir()
        }
        assert affinity.pop(child.pid) == {cpus[0]}
        assert list(affinity.values()) == [set(cpus[1:])]
        child.stdin.close()


def test_without_an_engine_there_is_nothing_to_pin() -> None:
    with pytest.raises(LiveError, match="found \\[\\]"):
        pinning.pin_engine(1)

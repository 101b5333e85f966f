"""Which graphs are captured and which a step finds, with vLLM's own dispatcher and wrappers, and no device beneath."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.errors import LiveError
from simmoe.live.engine import graph_banks
from simmoe.live.engine.graph_memory import GIB, CapturedGraphs, GraphMemory, bound_bytes
from simmoe.live.engine.transport import EngineOptions

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]

K_MAX = 8
LEFT = SimpleNamespace(free=20 * GIB, total=100 * GIB, peak=12 * GIB, current=10 * GIB)
"""Of a device: 90% of it less 80 in use and 2 of activations are 8 GiB."""


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a class of runners as the plug-in leaves vLLM's, on a device of LEFT."""
    from tests.live.banked import Runner

    class Keyed(Runner):
        pass

    memory = {"allocated_bytes.all.peak": LEFT.peak, "allocated_bytes.all.current": LEFT.current}
    monkeypatch.setattr("torch.accelerator.get_memory_info", lambda: (LEFT.free, LEFT.total))
    monkeypatch.setattr("torch.accelerator.memory_stats", lambda: memory)
    monkeypatch.setattr(graph_banks, "set_k", lambda config, k: setattr(config.model, "k", k))
    monkeypatch.setattr(graph_banks, "_least_of_all", int)
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1")
    graph_banks.key_graphs(Keyed)
    graph_banks.key_graphs(Keyed)  # harmless again
    return Keyed


def captured(runner: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Estimate and capture as vLLM does when it starts; return the budgets captured."""
    monkeypatch.setattr(graph_banks, "_wrappers", lambda: runner.wrappers)
    runner.profile_cudagraph_memory()
    assert not hasattr(runner, "simmoe_banks"), "profiling touches no bank"
    before = len(runner.calls)
    runner.capture_model()
    banks: CapturedGraphs = runner.simmoe_banks.captured
    assert [k for k, _ in runner.calls[before:]] == sorted(banks.ks, reverse=True), "the largest first, a bank a k"
    return banks.ks


def test_a_bank_a_budget_and_both_holders_switch(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = keyed({"captured_ks": [2, 4, 8], "graph_memory_gib": 8}, [GIB] * 9)
    assert captured(runner, monkeypatch) == (2, 4, 8)
    assert runner.calls[0] == (8, True)
    for k in (4, 2, 8, 3, 8, 2, 1, 4):
        runner.simmoe_banks.select(k)
        has_bank = k in (2, 4, 8)
        assert runner.dispatched(4, 1) == ({k} if has_bank else set())  # a decode: whole-model
        assert runner.dispatched(4, None) == ({k} if has_bank else set())  # with prompts: piecewise
        assert not runner.dispatched(5, None), "above the largest captured size"


def test_graphs_left_aside_stay_aside_whatever_is_selected(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof of k asks the same engine without its graphs, and points without graphs are of many budgets."""
    from simmoe.live.measure.worker import MeasuringWorker

    runner = keyed({"captured_ks": [2, 8], "graph_memory_gib": 8}, [GIB] * 9)
    captured(runner, monkeypatch)
    worker: Any = SimpleNamespace(model_runner=runner)
    MeasuringWorker.set_graphs(worker, False)
    for k in (8, 2, 3, 8):
        runner.simmoe_banks.select(k)
        assert not runner.dispatched(4, 1) and not runner.dispatched(4, None)
    for k in (3, 2):
        MeasuringWorker.set_graphs(worker, False)
        runner.simmoe_banks.select(k)
        MeasuringWorker.set_graphs(worker, True)
        assert runner.dispatched(4, 1) == runner.dispatched(4, None) == ({2} if k == 2 else set())


def test_after_capture_the_model_and_its_graphs_are_of_the_largest_budget(
    keyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's warm-up and dummy steps name no budget."""
    runner = keyed({"captured_ks": [2, 8], "graph_memory_gib": 8}, [GIB] * 9)
    captured(runner, monkeypatch)
    assert (runner.model.k, runner.dispatched(4, 1), runner.dispatched(4, None)) == (8, {8}, {8})


@pytest.mark.parametrize(
    ("options", "sizes", "expected"),
    [
        # estimate, then each bank: 1 GiB each within 4
        ({"graph_memory_gib": 4}, [1, 1, 1, 1, 1], (5, 6, 7, 8)),
        # every budget, where nothing stands against it
        ({"graph_memory_gib": 100}, [1] * 9, tuple(range(1, 9))),
        # banks larger than estimated: the second makes two of 3; no third of the same within 8
        ({"graph_memory_gib": 8}, [1, 3, 3], (7, 8)),
        # banks smaller than estimated: as many as fit
        ({"graph_memory_gib": 3}, [2, 1, 1, 1], (6, 7, 8)),
        # the first does not fit by vLLM's own estimate: none
        ({"graph_memory_gib": 1.5}, [2], ()),
        # a quarter of the 8 GiB that are left
        ({}, [1, 1, 1], (7, 8)),
        ({"captured_ks": [1, 4, 8]}, [1, 1, 1], (4, 8)),
    ],
)
def test_the_largest_budgets_are_captured_as_far_as_the_bound_goes(
    keyed: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    sizes: list[int],
    expected: tuple[int, ...],
) -> None:
    runner = keyed(options, [size * GIB for size in sizes])
    assert captured(runner, monkeypatch) == expected
    assert runner.simmoe_banks.captured.taken_bytes == sum(sizes[1:]) * GIB
    for k in range(1, K_MAX + 1):
        runner.simmoe_banks.select(k)
        assert runner.dispatched(3, 1) == runner.dispatched(3, None) == ({k} & set(expected))


def test_memory_set_aside_is_that_of_the_banks_to_be_captured(keyed: Any) -> None:
    for options, bank, reserved in (
        ({"graph_memory_gib": 4}, 1, 4),
        ({"graph_memory_gib": 3.9}, 1, 3),
        ({"graph_memory_gib": 100}, 1, 8),
        ({"graph_memory_gib": 1}, 2, 0),
        ({"captured_ks": [8], "graph_memory_gib": 100}, 2, 2),
        ({}, 1, 2),
    ):
        assert keyed(options, [bank * GIB]).profile_cudagraph_memory() == reserved * GIB


def test_without_an_estimate_the_bound_is_of_what_is_still_free(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "0")
    runner = keyed({}, [4 * GIB] * 9)
    monkeypatch.setattr(graph_banks, "_wrappers", lambda: runner.wrappers)
    assert runner.profile_cudagraph_memory() == 0
    assert not runner.calls, "vLLM captures nothing to learn what nobody asks"
    runner.capture_model()
    # 20 GiB free, 2 of them for activations: three quarters of 18 hold three banks of 4
    assert runner.simmoe_banks.captured == CapturedGraphs((6, 7, 8), 12 * GIB, int(13.5 * GIB))


def test_workers_capture_as_far_as_the_one_with_least_room(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = iter([5, 4, -1])
    monkeypatch.setattr(graph_banks, "_least_of_all", lambda room: next(rooms))
    assert captured(keyed({"graph_memory_gib": 100}, [GIB] * 9), monkeypatch) == (7, 8)


AGREE = """
import sys
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment
from simmoe.live.engine.graph_banks import _least_of_all
rank, where = int(sys.argv[1]), sys.argv[2]
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(2, rank, f"file://{where}", rank, "gloo")
print(_least_of_all(-3 << 40 if rank else 5 << 40))
"""


def test_workers_agree_over_vllms_own_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AGREE]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "rendezvous")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [text.split()[-1] for text in told] == [str(-3 << 40)] * 2


@pytest.mark.parametrize("options", [None, {"captured_ks": [2, 8]}])
def test_an_engine_of_another_scheduler_is_left_as_it_is(keyed: Any, options: Any) -> None:
    runner = keyed(options, [GIB, 2 * GIB], scheduler=object)
    assert runner.profile_cudagraph_memory() == GIB
    assert runner.capture_model() == 2 * GIB
    assert runner.calls == [(8, True), (8, False)]
    assert not hasattr(runner, "simmoe_banks")


def test_graphs_that_no_bank_holds_are_refused(keyed: Any) -> None:
    runner = keyed({}, [])
    runner.cudagraph_manager.use_breakable_cg = True
    with pytest.raises(LiveError, match="breakable CUDA graphs are not keyed by k"):
        runner.capture_model()


@given(st.integers(0, 40), st.lists(st.integers(1, 9), max_size=12), st.integers(0, 9))
def test_the_bound_holds_unless_a_bank_is_larger_than_all_before_it(
    bound: int, banks: list[int], estimate: int
) -> None:
    memory = GraphMemory(bound, estimate)
    for size in banks:
        expected = max(memory.taken, default=estimate)
        if memory.taken_bytes + expected > bound:
            assert not memory.has_room()
            break
        assert memory.has_room()
        memory.taken.append(size)
        assert memory.taken_bytes <= bound + max(0, size - expected)
    reserved = memory.reserved_bytes(len(banks))
    assert reserved <= bound
    assert not estimate or reserved % estimate == 0
    assert bound_bytes(0, bound, 0.25) <= bound / 4


# ----------------------------------------------------------------------------------------------- worker and scheduler


def test_a_step_without_graphs_runs_at_its_own_budget_or_where_so_chosen_at_the_next() -> None:
    from tests.live.banked import Budgets

    some = CapturedGraphs((4, 6, 8), 3 * GIB, 4 * GIB)
    exact, rounding = Budgets([some]), Budgets([some], uncaptured_k="next")
    assert [exact.runs_at(k) for k in range(1, 9)] == list(range(1, 9))
    assert [rounding.runs_at(k) for k in range(1, 9)] == [4, 4, 4, 4, 6, 6, 8, 8]
    nothing = Budgets([CapturedGraphs((), 0, 0)], uncaptured_k="next")
    assert [nothing.runs_at(k) for k in range(1, 9)] == list(range(1, 9))
    assert exact.captured_graphs() == {"captured_ks": [4, 6, 8], "graph_gib": 3.0, "graph_memory_gib": 4.0}


def test_what_was_captured_is_said_in_one_line() -> None:
    from simmoe.live.engine.scheduler import described

    some = CapturedGraphs((6, 8), 3 * GIB, int(3.5 * GIB))
    line = "CUDA graphs at 2 of 8 budgets, k = 6, 8; 3.00 of at most 3.50 GiB; a step at another k "
    assert described(some, EngineOptions(K_MAX)) == line + "runs without graphs, at that k (uncaptured_k: eager)"
    rounding = EngineOptions(K_MAX, uncaptured_k="next")
    assert described(some, rounding) == line + "runs at the next of them (uncaptured_k: next)"
    every = CapturedGraphs(tuple(range(1, 9)), 3 * GIB, 4 * GIB)
    assert described(every, rounding).endswith("3.00 of at most 4.00 GiB")
    none = described(CapturedGraphs((), 0, GIB), rounding)
    assert "0 of 8 budgets, none;" in none and "at that k" in none


def test_workers_that_captured_apart_are_refused() -> None:
    """Their bytes may differ, their budgets may not: one would replay where another launches kernels."""
    from tests.live.banked import Budgets

    Budgets([CapturedGraphs((8,), 5, 9), CapturedGraphs((8,), 6, 9)])
    with pytest.raises(LiveError, match="different budgets"):
        Budgets([CapturedGraphs((8,), 5, 9), CapturedGraphs((4, 8), 6, 9)])


def test_fewer_graphs_than_asked_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.live.banked import Budgets

    said: list[str] = []
    logger = SimpleNamespace(info=lambda *_: said.append("info"), warning=lambda *_: said.append("warning"))
    monkeypatch.setattr("simmoe.live.engine.scheduler.logger", logger)
    Budgets([CapturedGraphs((8,), 5, 9)])
    Budgets([CapturedGraphs((4, 8), 5, 9)], captured_ks=(4, 8))
    Budgets([None])  # an eager engine says nothing
    assert said == ["warning", "info"]


def test_a_worker_switches_before_the_step_and_tells_what_it_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from simmoe.live.engine.worker import install as install_worker

    ran: list[int] = []
    selected: list[int] = []
    monkeypatch.setattr(Worker, "execute_model", lambda self, output: ran.append(output.simmoe_k))
    monkeypatch.setattr("simmoe.live.engine.worker.set_k", lambda config, k: None)
    install_worker()
    worker = object.__new__(Worker)
    worker.vllm_config = None
    banks = SimpleNamespace(select=selected.append, captured=CapturedGraphs((8,), 1, 2))
    worker.model_runner = SimpleNamespace(simmoe_banks=banks)
    for k in (3, 3, 8, None, 3):
        worker.execute_model(SimpleNamespace(simmoe_k=k))
    assert ran == [3, 3, 8, None, 3]
    assert selected == [3, 8, 3], "a change of k alone costs something"
    assert worker.simmoe_captured_graphs() == ((8,), 1, 2)
    worker.model_runner = SimpleNamespace()
    assert worker.simmoe_captured_graphs() is None

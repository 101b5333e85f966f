"""That an engine samples for every number of sequences before it serves; without a device."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.live.engine.row_warm_up import ROWS_OF_A_KERNEL, install, row_counts, warm_up_rows

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]

HIDDEN_SIZE = 4


class Runner:
    """A model runner that notes what it is to sample for."""

    is_pooling_model = False
    is_last_pp_rank = True
    device = "cpu"

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, scheduler: type | None = None) -> None:
        import torch

        self.dtype = torch.bfloat16
        self.max_num_reqs, self.max_num_tokens = max_num_seqs, max_num_batched_tokens
        self.model_config = SimpleNamespace(get_hidden_size=lambda: HIDDEN_SIZE)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler))
        self.rows: list[int] = []

    def _dummy_sampler_run(self, hidden_states: Any) -> None:
        rows, width = hidden_states.shape
        assert (width, hidden_states.dtype) == (HIDDEN_SIZE, self.dtype)
        assert hidden_states.is_contiguous(), "as a step's are, or the library picks another kernel"
        self.rows.append(rows)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)


@given(st.integers(1, 5000))
def test_both_ends_of_every_class_up_to_the_limit(limit: int) -> None:
    rows = row_counts(limit)
    assert rows == sorted(set(rows)) and rows[0] == 1 and rows[-1] <= limit
    ends = {end for low in range(1, limit + 1, ROWS_OF_A_KERNEL) for end in (low, low + ROWS_OF_A_KERNEL - 1)}
    assert {end for end in ends if end <= limit} <= set(rows)
    assert len(rows) <= 1024 + 2 * (limit // ROWS_OF_A_KERNEL + 1), "bounded"


@pytest.mark.parametrize(("seqs", "tokens", "limit"), [(1, 8, 1), (100, 8192, 100), (64, 16, 16), (1030, 8192, 1030)])
def test_no_more_rows_than_a_step_may_have(seqs: int, tokens: int, limit: int) -> None:
    warm_up_rows(runner := Runner(seqs, tokens))
    assert runner.rows == row_counts(limit)


@pytest.mark.parametrize("unlike", [{"is_pooling_model": True}, {"is_last_pp_rank": False}])
def test_a_worker_that_samples_nothing_has_nothing_to_warm_up(unlike: dict[str, bool]) -> None:
    runner = Runner(16, 16)
    vars(runner).update(unlike)
    warm_up_rows(runner)
    assert runner.rows == []


def test_it_follows_vllm_s_own_warm_up_in_engines_of_simmoe_s_schedulers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import gpu_worker

    from simmoe.live.engine.scheduler import BudgetMixin

    calls: list[Any] = []
    monkeypatch.setattr(gpu_worker, "warmup_kernels", lambda *args: calls.append(args))
    install()
    install()  # harmless again
    for scheduler, rows in ((BudgetMixin, [1, 2, 3]), (object, [])):
        runner = Runner(3, 8, scheduler)
        gpu_worker.warmup_kernels(runner, "execute", "sample")
        assert calls.pop() == (runner, "execute", "sample") and not calls
        assert runner.rows == rows


def test_vllm_has_what_is_called() -> None:
    """On a CPU no worker gets there: that the names and their parameters are vLLM's is all that can be seen."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    worker = inspect.getsource(gpu_worker.Worker.compile_or_warm_up_model)
    assert 0 < worker.index("warmup_kernels(") < worker.index("capture_model(")
    assert list(inspect.signature(GPUModelRunner._dummy_sampler_run).parameters) == ["self", "hidden_states"]
    source = inspect.getsource(GPUModelRunner.__init__)
    for name in ("is_pooling_model", "is_last_pp_rank", "device", "dtype", "max_num_reqs", "max_num_tokens"):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name

"""Hypothesis strategies for small worlds in which everything happens: preemption, chunking, rejection, bursts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from simmoe.profiles.shape import DecodeLine, LinearStepCost, StepParts, StepShape
from simmoe.simulator.config import EXECUTOR_BACKENDS, EngineConfig
from simmoe.traces.workload import Workload

K_MAX = 8


@st.composite
def workloads(draw: st.DrawFn, max_requests: int = 14, hashes: bool = False) -> Workload:
    """Up to ``max_requests`` requests whose arrivals bunch up, coincide, and leave gaps."""
    size = draw(st.integers(1, max_requests))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.0173, 0.3]), min_size=size - 1, max_size=size - 1))

    def column(low: int, high: int) -> npt.NDArray[np.int64]:
        return np.array(draw(st.lists(st.integers(low, high), min_size=size, max_size=size)), dtype=np.int64)

    prompts = column(1, 60)
    prefix = None
    if hashes:
        families = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        prefix = [
            tuple(100 * family + block for block in range(-(-int(prompt) // 8)))
            for family, prompt in zip(families, prompts, strict=True)
        ]
    return Workload(
        request_id=[str(row) for row in range(size)],
        arrival_s=np.concatenate(([0.0], np.cumsum(gaps))),
        prompt_tokens=prompts,
        output_tokens=column(1, 40),
        k_qos=column(1, K_MAX),
        prefix_hashes=prefix,
        prefix_block_tokens=8,
    )


@st.composite
def engine_configs(draw: st.DrawFn, /, **fixed: Any) -> EngineConfig:
    """Engines with little room: every limit binds sooner or later."""
    max_num_seqs = draw(st.integers(1, 8))
    settings: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 70)),
        "enable_chunked_prefill": draw(st.booleans()),
        "block_size": draw(st.sampled_from([1, 2, 4])),
        "num_gpu_blocks": draw(st.integers(8, 60)),
        "async_scheduling": draw(st.booleans()),
        "distributed_executor_backend": draw(st.sampled_from(EXECUTOR_BACKENDS)),
        "watermark": draw(st.sampled_from([0.0, 0.05])),
        "captured_ks": draw(st.sampled_from([(), (K_MAX,), (2, 3, K_MAX)])),
        "uncaptured_k": draw(st.sampled_from(["eager", "next"])),
    }
    return EngineConfig(**{**settings, **fixed})


class HostedStepCost(LinearStepCost):
    """A linear cost on the device beside a host that takes long over prompts, and over the output of each sequence.

    ``wait_share`` of the launch of a decode-only step is over before the device can begin it.
    """

    def __init__(
        self,
        launch_prompt_s: float,
        launch_decode_s: float,
        update_seq_s: float,
        wait_share: float = 0.0,
        **linear: float,
    ) -> None:
        super().__init__(**linear)
        self._launch_s = {True: launch_prompt_s, False: launch_decode_s}
        self.update_seq_s = update_seq_s
        self.wait_s = wait_share * launch_decode_s

    def step_s(self, shape: StepShape, /) -> float:
        device_s, host_s, *_ = self.parts_s(shape)
        return max(device_s, host_s)

    def parts_s(self, shape: StepShape, /) -> StepParts:
        update_s = self.update_seq_s * (shape.num_prefill_seqs + shape.num_decode_seqs)
        launch_s = self._launch_s[shape.num_prefill_tokens > 0]
        wait_s = 0.0 if shape.num_prefill_tokens else self._wait_s(launch_s + update_s, update_s)
        return StepParts(super().step_s(shape), launch_s + update_s, update_s, wait_s)

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        update_s = self.update_seq_s * num_decode_seqs
        line = super().decode_line(num_decode_seqs, k_exec)
        host_s = self._launch_s[False] + update_s
        return line._replace(floor_s=host_s, update_s=update_s, wait_s=self._wait_s(host_s, update_s))

    def _wait_s(self, host_s: float, update_s: float) -> float:
        return min(self.wait_s, host_s - update_s)  # no more than there is to launch, to the bit


def costs(hosted: bool = True) -> st.SearchStrategy[HostedStepCost]:
    """Step costs in which budgets, tokens and KV all show, and in some a host that keeps up or does not.

    Args:
        hosted: false: the host takes no time, and a token tells the end of its step on the device.
    """
    return st.builds(
        HostedStepCost,
        launch_prompt_s=st.sampled_from([0.0, 0.003, 0.0201] if hosted else [0.0]),
        launch_decode_s=st.sampled_from([0.0, 0.0017, 0.0051] if hosted else [0.0]),
        update_seq_s=st.sampled_from([0.0, 0.0004, 0.0031] if hosted else [0.0]),
        wait_share=st.sampled_from([0.0, 0.7, 1.0] if hosted else [0.0]),
        base_s=st.sampled_from([1e-4, 0.004, 0.0113]),
        per_pair_s=st.sampled_from([0.0, 1e-5, 3.3e-6]),
        per_kv_s=st.sampled_from([0.0, 1e-6, 7.7e-7]),
    )

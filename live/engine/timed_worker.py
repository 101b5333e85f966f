"""A vLLM worker that keeps a device clock: when the device began each step and when it was done with it."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from simmoe.live.engine.device_clock import CudaTimeline, DeviceClock, DeviceTimes, HostTimeline

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    PlatformWorker = Worker


class TimedWorker(PlatformWorker):  # type: ignore[misc]
    """Named by ``worker_cls``; ``drain_device_times`` is called through ``collective_rpc``."""

    _clock: DeviceClock | None = None

    def drain_device_times(self) -> list[DeviceTimes]:
        """Return when the device ran the steps since the last call."""
        return self._device_clock().drain()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the forward pass; a step that computes something is timed."""
        step = getattr(scheduler_output, "simmoe_step", None)
        if step is not None:
            self._device_clock().begin(step)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and mark the end of the step."""
        output = super().sample_tokens(grammar_output)
        self._device_clock().end()
        return output

    def _device_clock(self) -> DeviceClock:
        if self._clock is None:
            self._clock = DeviceClock(HostTimeline() if current_platform.is_cpu() else CudaTimeline())
        return self._clock

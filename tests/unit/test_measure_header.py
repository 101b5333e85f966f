"""Which of the environment a sample file's header keeps."""

from __future__ import annotations

import pytest

from simmoe.live.measure.header import environment

KEPT = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0", "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}  # fmt: skip
LEFT_OUT = {
    "VLLM_CACHE_ROOT": "/tmp/cache", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_HOST_IP": "10.0.0.1", "NCCL_DEBUG": "INFO",
    "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": "1", "CUDA_HOME": "/usr/local/cuda",
    "HOME": "/root", "LANG": "C",
}  # fmt: skip


def test_settings_are_kept_and_places_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEPT, **LEFT_OUT}.items():
        monkeypatch.setenv(name, value)
    found = environment()
    assert {name: found.get(name) for name in KEPT} == KEPT
    assert not found.keys() & LEFT_OUT.keys()
    assert list(found) == sorted(found)

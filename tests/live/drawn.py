"""An engine that says which weights were drawn: they are gone once vLLM has packed them for the CPU."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader import register_model_loader

from simmoe.live.measure.dummy_weights import ScaledDummyLoader
from simmoe.live.measure.worker import MeasuringWorker


class Drawn(NamedTuple):
    """A parameter, or a part of one, as it was drawn."""

    shape: tuple[int, ...]
    mean: float
    deviation: float
    digest: str


_drawn: list[dict[str, Drawn]] = []


@register_model_loader("simmoe-dummy-told")
class TellingLoader(ScaledDummyLoader):
    """Draws the weights twice, and keeps what they were each time."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        _drawn.clear()
        for _ in range(2):
            super().load_weights(model, model_config)
            _drawn.append({name: _told(piece) for name, piece in _pieces(model)})


class TellingWorker(MeasuringWorker):
    """Named by ``worker_cls``."""

    def drawn(self) -> list[dict[str, Drawn]]:
        """Return what was drawn, by parameter, the first and the second time."""
        return _drawn


def _pieces(model: Any) -> Any:
    """Yield every parameter by its name; queries, keys and values apart."""
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, QKVParallelLinear):
            sizes = [module.num_heads, module.num_kv_heads, module.num_kv_heads]
            parts = parameter.data.split([heads * module.head_size for heads in sizes])
            yield from ((f"{name} {which}", part) for which, part in zip("qkv", parts, strict=True))
        else:
            yield name, parameter.data


def _told(tensor: torch.Tensor) -> Drawn:
    values = tensor.float()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return Drawn(tuple(tensor.shape), float(values.mean()), float(values.std(correction=0)), digest)

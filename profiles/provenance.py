"""What a table's provenance must hold where it has it: the headers of its sample files, its errors, its estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Fields of a sample file's header that readers of a table rest on, with their types.
_RUN: dict[str, type | tuple[type, ...]] = {
    "model": str, "model_config": dict, "weights": str, "dtype": str, "card": str, "num_cards": int, "driver": str,
    "clocks": dict, "versions": dict, "kernels": dict, "graphs": str, "k_check": str, "captured_sizes": list,
    "engine_flags": dict, "async_scheduling": bool, "date": str, "command": str, "notes": list,
}  # fmt: skip

_NUMBER = (int, float)

_RESIDUAL: dict[str, type | tuple[type, ...]] = {
    "kind": str, "clock": str, "source": str, "num_samples": int, "bias": _NUMBER, "median": _NUMBER, "p95": _NUMBER
}  # fmt: skip

_ESTIMATE: dict[str, type | tuple[type, ...]] = {
    "model": str, "model_config": dict, "weights": str, "card": dict, "num_cards": int, "engine_flags": dict,
    "learned": dict, "held_out": list,
}  # fmt: skip

_CARD: dict[str, type | tuple[type, ...]] = {
    "name": str, "driver_name": str, "bf16_flop_s": _NUMBER, "memory_byte_s": _NUMBER, "num_sms": int, "source": str
}  # fmt: skip

_LEARNED: dict[str, type | tuple[type, ...]] = {
    "tables": list, "device": dict, "pair_compute": _NUMBER, "kv_memory": _NUMBER
}  # fmt: skip

_HELD_OUT: dict[str, type | tuple[type, ...]] = {
    "table": str, "held_out": str, "steps": str, "sizes": str, "bound_by": str, "number": int,
    "bias": _NUMBER, "median": _NUMBER, "p95": _NUMBER,
}  # fmt: skip


def provenance_faults(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a provenance, in words; nothing of one that lacks a part."""
    fit, estimate = provenance.get("fit", {}), provenance.get("estimate")
    yield from _list_faults(provenance.get("runs", []), _RUN, "runs")
    if isinstance(fit, dict):
        yield from _list_faults(fit.get("residuals", []), _RESIDUAL, "fit.residuals")
    else:
        yield f"fit is {fit!r}, no JSON object"
    if estimate is not None:
        faults = list(_object_faults(estimate, _ESTIMATE, "estimate"))
        yield from faults
        if not faults:
            yield from _object_faults(estimate["card"], _CARD, "estimate.card")
            yield from _object_faults(estimate["learned"], _LEARNED, "estimate.learned")
            yield from _list_faults(estimate["held_out"], _HELD_OUT, "estimate.held_out")
            device, tables = estimate["learned"].get("device", {}), estimate["learned"].get("tables", [])
            yield from _object_faults(device, dict.fromkeys(device, _NUMBER), "estimate.learned.device")
            if not all(isinstance(name, str) for name in tables):
                yield f"estimate.learned.tables is {tables!r}, no names"


def _list_faults(value: Any, types: Mapping[str, type | tuple[type, ...]], where: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{where} is {value!r}, no list"
        return
    for place, item in enumerate(value):
        yield from _object_faults(item, types, f"{where}[{place}]")


def _object_faults(value: Any, types: Mapping[str, type | tuple[type, ...]], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is {value!r}, no JSON object"
        return
    for key, kind in types.items():
        if key not in value:
            yield f"{where} has no {key}"
        elif not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind is not bool):
            yield f"{where}.{key} is {value[key]!r}"
        elif key == "num_cards" and value[key] < 1:
            yield f"{where}.{key} is {value[key]}, no number of cards"

"""Prefix caching by budget: KV computed at one k is not KV at another, so a request's k salts its blocks' hashes."""

from __future__ import annotations

import functools
from typing import Any

from simmoe.live.engine.transport import request_k


def salted(salt: str | None, k: int) -> str:
    """Return the salt of a request of budget k that has one of its own, or none."""
    return f"k={k}" if salt is None else f"k={k},{salt}"


def install() -> None:
    """Make engine cores with a budget scheduler salt each request by its k, beside a salt of its own. Idempotent.

    It is the k asked for: what a block was computed at may be more, as a step runs at the largest k of its requests.
    """
    from vllm.v1.engine.core import EngineCore

    from simmoe.live.engine.scheduler import BudgetMixin

    original = EngineCore.preprocess_add_request
    if hasattr(original, "simmoe"):
        return

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if isinstance(self.scheduler, BudgetMixin):
            k = request_k(request.sampling_params, self.scheduler.options.default_k)
            request.cache_salt = salted(request.cache_salt, k)
        return original(self, request)

    preprocess_add_request.simmoe = True  # type: ignore[attr-defined]
    EngineCore.preprocess_add_request = preprocess_add_request

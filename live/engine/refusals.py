"""A request that the batch policy gives no place in its queue is refused; the engine that hosts the policy goes on."""

from __future__ import annotations

import functools
from typing import Any

from simmoe.errors import PolicyError


def install() -> None:
    """Make engine processes answer such a request with an error, where vLLM's would stop with it. Idempotent.

    An engine in one's own process raises it to whoever sent the request.
    """
    from vllm.logger import init_logger
    from vllm.v1.engine.core import EngineCoreProc

    logger = init_logger(__name__)
    original = EngineCoreProc.add_request
    if hasattr(original, "simmoe"):
        return

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, request, *args, **kwargs)
        except PolicyError as error:
            logger.error("request %s is refused: %s", request.request_id, error)
            self._send_error_outputs_to_client([request.request_id], request.client_index)

    add_request.simmoe = True  # type: ignore[attr-defined]
    EngineCoreProc.add_request = add_request

"""``simmoe serve`` over stub engines that it starts, watches and restarts itself."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simmoe.commands.serve import LOG_FORMAT, PolicyErrors
from simmoe.errors import SimmoeError
from simmoe.live.server.router import RouterOptions
from simmoe.live.server.serving import Serving, serve
from simmoe.live.server.upstream import Address
from simmoe.policies.registry import parse_policy


@dataclass(frozen=True)
class StubLaunch:
    """Stub engines instead of vLLM's."""

    num_ranks: int
    is_broken: bool = False
    """Whether an engine ends as soon as it is started."""

    def command(self, rank: int, uds: str) -> list[str]:
        """Return the stub's command."""
        if self.is_broken:
            return [sys.executable, "-c", "raise RuntimeError('no weights')"]
        return [sys.executable, "-m", "tests.support.stub_engine", "--uds", uds]

    def environment(self, rank: int) -> dict[str, str]:
        """Return this process's own."""
        return dict(os.environ)

    def described(self) -> dict[str, Any]:
        """Say who they are."""
        return {"target": {"model": "stub"}}

    def recordings(self) -> list[Path]:
        """Record nothing."""
        return []

    async def warm_up(self, address: Address, facts: Mapping[str, Any]) -> None:
        """Do nothing: a stub's first answer is like any other."""


def main() -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--policy", default="queue-aware")
    parser.add_argument("--max-inflight", type=int, default=64)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--record-decisions", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    serving = Serving(
        choice=parse_policy(args.policy),
        prefill_s=lambda n, k: n * k * 1e-6,
        decisions=args.record_decisions,
        options=RouterOptions(max_inflight=args.max_inflight, api_keys=args.api_key),
        launch=StubLaunch(args.replicas, args.broken),
        port=0,
        on_ready=lambda url: print(f"serving stubs at {url}/v1", flush=True),
        on_policy_error=PolicyErrors(),
    )
    try:
        return serve(serving)
    except SimmoeError as error:
        print(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""The entry point vLLM loads in its front end, its engine cores and its workers."""

from __future__ import annotations


def register() -> None:
    """Install simmoe's hooks into this process; harmless to call again, inert where no budget is named."""
    from simmoe.live.engine import graph_banks, scheduler, transport, worker

    transport.install_validation()
    scheduler.install_utility()
    worker.install()
    graph_banks.install()

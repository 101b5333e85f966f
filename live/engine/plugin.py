"""The entry point vLLM loads in its front end, its engine cores and its workers."""

from __future__ import annotations


def register() -> None:
    """Install simmoe's hooks into this process; harmless to call again, inert where no budget is named."""
    from simmoe.live.engine import graph_banks, prefix_salt, scheduler, transport, worker
    from simmoe.live.refactor import vllm_complex_gate

    transport.install_validation()
    scheduler.install_utility()
    prefix_salt.install()
    worker.install()
    graph_banks.install()
    vllm_complex_gate.register()

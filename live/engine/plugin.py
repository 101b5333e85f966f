"""The entry point vLLM loads in its front end, its engine cores and its workers."""

from __future__ import annotations


def register() -> None:
    """Install simmoe's hooks into this process; harmless to call again, inert where no budget is named.

    In a vLLM it does not know it says so and installs nothing: an engine that uses none of simmoe is not disturbed, one
    that names a scheduler of simmoe's is refused when that is imported.
    """
    from simmoe.live.engine.versions import installed_vllm, why_unsupported

    if reason := why_unsupported(installed_vllm()):
        from vllm.logger import init_logger

        init_logger(__name__).warning("simmoe's plug-in is not installed: %s", reason)
        return
    from simmoe.live.engine import graph_banks, prefix_salt, refusals, row_warm_up, scheduler, transport, worker
    from simmoe.live.refactor import vllm_complex_gate

    transport.install_validation()
    scheduler.install_utility()
    refusals.install()
    prefix_salt.install()
    worker.install()
    graph_banks.install()
    row_warm_up.install()
    vllm_complex_gate.register()

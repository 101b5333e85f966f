"""The options that say where cells run, shared by ``sweep`` and ``search``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from simmoe.commands.sweeping.executor import Executor, local_executor
from simmoe.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])


def executor_options(command: Command) -> Command:
    """Add ``--jobs``, ``--executor`` and ``--ray-address`` to a command."""
    options = (
        click.option("--jobs", type=int, help="Processes on this machine.  [default: every core]"),
        click.option(
            "--executor",
            type=click.Choice(["local", "ray"]),
            default="local",
            show_default=True,
            help="Where simulations run: this machine's cores, or a Ray cluster.",
        ),
        click.option(
            "--ray-address",
            metavar="ADDRESS",
            help="A running Ray cluster; 'auto': the one of this machine.  [default: start one on --jobs cores]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_executor(options: dict[str, Any]) -> Executor:
    """Remove the options of ``executor_options`` from a command's keyword arguments and return what they choose.

    Raises:
        UsageError: a value out of range, or options that contradict each other.
        MissingDependency: Ray is asked for and not installed.
    """
    jobs, kind, address = (options.pop(name) for name in ("jobs", "executor", "ray_address"))
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs is {jobs}; it must be at least 1")
    if address is not None and kind != "ray":
        raise UsageError("--ray-address needs --executor ray")
    if address is not None and jobs is not None:
        raise UsageError("--jobs and --ray-address contradict each other: a running cluster has its own cores")
    cores = jobs or os.cpu_count() or 1
    if kind == "local":
        return local_executor(cores)
    from simmoe.commands.sweeping.ray_executor import RayExecutor

    return RayExecutor(address, cores)

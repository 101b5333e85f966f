"""The ``simmoe`` command: finds a subcommand, runs it, turns failures into one line and an exit code.

Subcommands live in ``simmoe.commands``, one module each, and are imported only when they run: ``simmoe --help`` costs
the import of click and nothing else.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import click

from simmoe import __version__
from simmoe.ending import end_despite_threads
from simmoe.errors import Interrupted, OutputError, SimmoeError, UsageError, did_you_mean

#: name -> ("module:attribute", one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "sweep": ("simmoe.commands.sweep:sweep", "Rates x policies x seeds: which policy, at which load."),
    "search": ("simmoe.commands.search:search", "The highest rate at which latency objectives hold; tuning."),
    "run": ("simmoe.commands.run:run", "Simulate one workload under one policy and write its run record."),
    "compare": ("simmoe.commands.compare:compare", "Two run records of one workload: how far apart, and why."),
    "validate": ("simmoe.commands.validate:validate", "A live run, the same simulated, and the two compared."),
    "traces": ("simmoe.commands.traces:traces", "List, describe, fetch and convert request traces."),
    "policies": ("simmoe.commands.policies:policies", "List policies; check one against the protocol."),
    "profile": ("simmoe.commands.profile:profile", "Measure, check, estimate and plot step-cost tables T(n, k)."),
    "serve": ("simmoe.commands.serve:serve", "Serve a model with a routing budget a request: N engines, one endpoint."),
    "live": ("simmoe.commands.live:live", "Replay a workload against live engines and write its run record."),
    "refactor": ("simmoe.commands.refactor:refactor", "Split a checkpoint's experts and rebuild its gate."),
    "eval": ("simmoe.commands.eval:eval_", "Perplexity or downstream tasks of a checkpoint at any budget."),
}

#: How a stream fails that takes no more; what is written to a named file reports its own failures.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

# numpy's BLAS starts a thread a core and lets them spin for a while; nothing here multiplies matrices that large.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are first used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        gc.disable()
        try:
            command = getattr(importlib.import_module(module), attribute)
        finally:
            gc.freeze()  # what is imported stays: searching it for garbage again and again is 5% of a short run
            gc.enable()
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise UsageError(f"no command '{args[0]}'{did_you_mean(args[0], COMMANDS)}; see 'simmoe --help'")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="simmoe")
def cli() -> None:
    """Simulate, then prove on a live engine, MoE serving with a routing budget (top-k) a request."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; never returns. Exit codes are drawn in :mod:`simmoe.errors`."""
    exit_code = 1  # Python's, for a failure that is no SimmoeError
    _open_streams()
    try:
        exit_code = run(argv)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said and done: Python's own end is not to be cut short
    except KeyboardInterrupt:  # between the two
        exit_code = Interrupted.exit_code
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_despite_threads(exit_code, _tell)
        # Python ends by killing itself with SIGINT if a KeyboardInterrupt, caught or not, has left the last text to be
        # executed; what is imported has many.
        exec("")
    sys.exit(exit_code)


def run(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code, with failures printed on stderr as one line."""
    try:
        result: Any = cli.main(args=argv, prog_name="simmoe", standalone_mode=False)
        sys.stdout.flush()
    except SimmoeError as error:
        _tell(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        with suppress(OSError):
            error.show()
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        _tell("interrupted")
        return Interrupted.exit_code
    except click.ClickException as error:
        where = f" (see '{error.ctx.command_path} --help')" if isinstance(error, click.UsageError) and error.ctx else ""
        _tell(f"{error.format_message()}{where}")
        return error.exit_code
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        _give_up_stdout()
        if error.errno != errno.EPIPE:
            _tell(f"cannot write the output: {error.strerror}")
        return OutputError.exit_code
    return result if isinstance(result, int) else 0


def _tell(line: str) -> None:
    """Print a line on standard error, if that takes any more: Ctrl-C ends who reads it too."""
    with suppress(OSError):
        click.echo(f"simmoe: {line}", err=True)


def _open_streams() -> None:
    """Open the standard streams that are closed, as nothing, before other files get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives


def _give_up_stdout() -> None:
    """Send what is left of standard output nowhere if it takes no more, so that exiting is quiet."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

"""``simmoe policies``: what is installed, and whether a policy keeps the protocol."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simmoe.errors import DataError, PolicyError, SimmoeError
from simmoe.policies.loading import GROUPS, METHODS, Kind, describe, installed, load_named, pass_ctrl_c
from simmoe.policies.parameters import parameters_of
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import PolicyPart, parse_parts
from simmoe.reading import what_is_no_file

if TYPE_CHECKING:
    from simmoe.live.engine.decision_file import DecisionReader


@click.group()
def policies() -> None:
    """List policies; check one against the protocol."""


@policies.command("list")
def list_policies() -> None:
    """Show what is installed.

    Each policy with what it does, and its parameters with their defaults.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("what it does, and its parameters", overflow="fold")
    for kind in GROUPS:
        for name in installed(kind):
            summary, parameters = _describe(name)
            table.add_row(name, kind, summary)
            if parameters:
                table.add_row("", "", parameters, style="dim")
    Console(highlight=False, markup=False).print(table)


@policies.command("check")
@click.argument("policy")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="Ranks of the deployment checked for."
)
@click.option(
    "--k-max", type=click.IntRange(min=1), default=32, show_default=True, help="Largest budget of that deployment."
)
@click.option("--profile", metavar="NAME|FILE", help="Step-cost table that T(n, k) comes from; else a made-up one.")
@click.option(
    "--replay",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Ask the call a failed run saved, or every call a live run recorded, for the deployment it was made in.",
)
def check(policy: str, ranks: int, k_max: int, profile: str | None, replay: Path | None) -> None:
    """Run the conformance kit on a policy.

    POLICY is NAME or path/to/file.py:Class, with ,key=value parameters. Prints one line a check; the exit code is 4 if
    any fails.
    """
    from simmoe.policies.samples import SAMPLE_CONTEXT
    from simmoe.policies.testing import check_policy

    context = replace(SAMPLE_CONTEXT, num_ranks=ranks, k_max=k_max)
    if profile is not None:
        from simmoe.commands.notes import describe_profile
        from simmoe.profiles.catalog import load_profile

        loaded = load_profile(profile)
        click.echo(describe_profile(loaded), err=True)
        context = replace(context, prefill_s=loaded.cost(True).prefill_s)
    parts = parse_parts(policy)
    if replay is not None:
        _replay(parts, replay, context, profile)
        return
    failed = 0
    for part in parts:
        click.echo(f"{part.text} ({part.kind} policy)")
        told = ""
        for result in check_policy(part.build, context):
            if result.passed:
                click.echo(f"  ok    {result.name}")
                continue
            failed += 1
            click.echo(f"  FAIL  {result.name}: {'as above' if result.detail == told else result.detail}")
            told = result.detail
    if failed:
        raise PolicyError(f"'{policy}' fails {failed} check{'s' * (failed > 1)}; docs/policies.md says what each wants")


def _describe(name: str) -> tuple[str, str]:
    try:
        cls, _ = load_named(name)
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        return summary, ", ".join(str(parameter) for parameter in parameters_of(cls, name).values())
    except SimmoeError as error:
        return f"unusable: {error}", ""


def _replay(parts: list[PolicyPart], path: Path, context: PolicyContext, profile: str | None) -> None:
    from simmoe.live.engine.decision_file import DecisionReader
    from simmoe.policies.testing import ask
    from simmoe.policies.validate import call_from_json

    recorded = DecisionReader.kind_in(path)
    if recorded is not None:
        part = next((part for part in parts if part.kind == recorded), None)
        if part is None:
            raise DataError(f"'{path}' holds calls of a {recorded} policy; '{parts[0].text}' is none")
        _replay_recording(part, path, context, profile)
        return
    try:
        if what := what_is_no_file(path):
            raise DataError(f"'{path}' is {what}; give a file that a failed run or a live one wrote")
        saved: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read the saved call '{path}': {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON: {error}") from None
    call, deployment = call_from_json(saved, str(path))
    kind: Kind = "route" if saved["call"] == METHODS["route"] else "batch"
    for part in parts:
        if part.kind == kind:
            built = part.build(replace(context, **deployment))
            try:
                answer = ask(built, call)
            except PolicyError as error:
                raise PolicyError(f"policy '{part.text}': {error}") from error
            except BaseException as error:
                pass_ctrl_c(error)
                raise PolicyError(f"policy '{part.text}' raised at {describe(error, part.path)}") from error
            click.echo(f"{part.text} answers {answer}")
            return
    raise DataError(f"'{path}' holds a call of a {kind} policy; '{parts[0].text}' is none")


def _replay_recording(part: PolicyPart, path: Path, context: PolicyContext, profile: str | None) -> None:
    """Ask a policy every recorded call, T(n, k) from the recorded profile unless another is given."""
    from simmoe.live.engine.decisions import Recording
    from simmoe.live.engine.provenance import Provenance
    from simmoe.live.server.route_decisions import RouteRecording

    recording: DecisionReader = RouteRecording(path) if part.kind == "route" else Recording(path)
    profile = profile or recording.profile
    prefill_s = context.prefill_s
    if profile:
        from simmoe.profiles.catalog import load_profile

        prefill_s = load_profile(profile).cost(recording.async_scheduling).prefill_s
    deployed, now = recording.context(prefill_s), Provenance.of(part, profile)
    if isinstance(recording, RouteRecording):
        count = recording.replay(part.build, deployed, now)
    else:
        assert isinstance(recording, Recording)
        count = recording.replay(part.build(deployed), now)
    recorded = "".join(c if c.isprintable() else "?" for c in recording.policy)
    click.echo(f"{part.text} answers {count} calls as '{recorded}' did")

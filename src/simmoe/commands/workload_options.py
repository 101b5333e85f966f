"""The options that describe a workload, shared by every command that replays one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, overload

import click

from simmoe.errors import UsageError
from simmoe.traces.budgets import parse_mix
from simmoe.traces.spec import ARRIVALS, BUDGETS, WorkloadSpec

Command = TypeVar("Command", bound=Callable[..., Any])

_DEFAULTS = WorkloadSpec()

#: Names of the options' values, as ``workload_options`` passes them and ``spec_from_options`` takes them.
OPTION_NAMES = frozenset(f.name for f in fields(WorkloadSpec)) - {"k_max"}

_FILTER = (
    click.option(
        "--trace",
        metavar="NAME|FILE",
        default=_DEFAULTS.trace,
        show_default=True,
        help="A name of 'simmoe traces list', or a file.",
    ),
    click.option("--min-total-tokens", type=int, metavar="N", help="Leave out rows below N prompt + output tokens."),
    click.option("--max-total-tokens", type=int, metavar="N", help="Leave out rows above N prompt + output tokens."),
)
_CLIP = click.option(
    "--clip-total-tokens", type=int, metavar="N", help="Shorten prompts so that prompt + output fits N."
)
_ARRIVALS = (
    click.option(
        "--arrivals",
        metavar="|".join(ARRIVALS),
        help="Arrival process.  [default: poisson with a rate, else replay at the recorded times]",
    ),
    click.option("--cv", type=float, metavar="CV", help=f"Gamma gaps' variation.  [default: {_DEFAULTS.cv:g}]"),
    click.option("--on-s", type=float, metavar="S", help=f"Mean on phase of onoff.  [default: {_DEFAULTS.on_s:g}]"),
    click.option("--off-s", type=float, metavar="S", help=f"Mean off phase of onoff.  [default: {_DEFAULTS.off_s:g}]"),
)
_BUDGETS = (
    click.option(
        "--budgets",
        metavar="|".join(BUDGETS),
        help="Routing budgets k.  [default: as --mix, --k, --mu or --sigma imply, else the trace's k_qos, else normal]",
    ),
    click.option("--mu", type=float, metavar="K", help=f"Mean of normal budgets.  [default: {_DEFAULTS.mu:g}]"),
    click.option("--sigma", type=float, metavar="K", help=f"Their standard deviation.  [default: {_DEFAULTS.sigma:g}]"),
    click.option("--k", type=int, metavar="K", help="Budget of every request.  [default: the largest]"),
    click.option("--mix", metavar="K:WEIGHT,...", help="Weighted tiers, as in 4:0.2,16:0.5,32:0.3."),
)
_ONE_RUN = (
    click.option(
        "--rate", type=float, metavar="R", help="Mean requests a second; inf: all at once.  [default: as recorded]"
    ),
    click.option(
        "--seed", type=int, metavar="S", default=_DEFAULTS.seed, show_default=True, help="Of every random stream."
    ),
)


@overload
def workload_options(command: Command, /) -> Command: ...
@overload
def workload_options(*, one_run: bool = True, requests: int | None = None) -> Callable[[Command], Command]: ...
def workload_options(command: Any = None, /, *, one_run: bool = True, requests: int | None = None) -> Any:
    """Add the workload's options to a click command.

    Args:
        one_run: whether the command replays one workload and takes one ``--rate`` and ``--seed``; a sweep has its own.
        requests: the command's default for ``--requests``; None: every row.
    """
    if command is None:
        return functools.partial(workload_options, one_run=one_run, requests=requests)
    shown = "every row" if requests is None else str(requests)
    count = click.option(
        "--requests", type=int, metavar="N", default=requests, help=f"How many requests.  [default: {shown}]"
    )
    for option in reversed((*_FILTER, _CLIP, count, *_ARRIVALS, *(_ONE_RUN if one_run else ()), *_BUDGETS)):
        command = option(command)
    return command


def trace_options(command: Command) -> Command:
    """Add the options on a trace's rows and their lengths, without arrivals and budgets."""
    for option in reversed((*_FILTER[1:], _CLIP)):
        command = option(command)
    return command


def spec_from_options(k_max: int | None = None, **options: Any) -> WorkloadSpec:
    """Return the specification the options describe; an option that was not given takes the specification's default.

    Args:
        k_max: the deployment's largest budget.
        options: values as ``workload_options`` passes them, any subset.
    Raises:
        UsageError: a value out of range, or options that contradict each other.
    """
    unknown = set(options) - OPTION_NAMES
    assert not unknown, unknown
    given = {name: value for name, value in options.items() if value is not None}
    if "mix" in given and isinstance(given["mix"], str):
        given["mix"] = parse_mix(given["mix"])
    _only_with("budgets", given, {"mix": ("mix",), "fixed": ("k",), "normal": ("mu", "sigma")})
    if given.get("arrivals") is not None:
        _only_with("arrivals", given, {"gamma": ("cv",), "onoff": ("on_s", "off_s")})
    elif loose := [name for name in ("cv", "on_s", "off_s") if name in given]:
        raise UsageError(f"{_flag(loose[0])} needs --arrivals {'gamma' if loose[0] == 'cv' else 'onoff'}")
    if k_max is not None:
        given["k_max"] = k_max
    return WorkloadSpec(**given)


def _only_with(choice: str, given: dict[str, Any], parameters: dict[str, tuple[str, ...]]) -> None:
    """Let given parameters imply the choice they belong to, and refuse parameters of another choice."""
    implied = {
        value: next(n for n in names if n in given) for value, names in parameters.items() if set(names) & set(given)
    }
    chosen = given.get(choice)
    if chosen is None and len(implied) > 1:
        first, second = list(implied.values())[:2]
        raise UsageError(f"{_flag(first)} and {_flag(second)} contradict each other; give one, or {_flag(choice)}")
    for value, name in implied.items():
        if chosen is not None and chosen != value:
            raise UsageError(f"{_flag(name)} needs {_flag(choice)} {value}, not {chosen}")
        given[choice] = value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""``simmoe profile check``: predicted against measured on recorded runs that took no part in the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simmoe.errors import LimitError, UsageError
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile, recording_path
from simmoe.profiles.checking.checked_steps import DECODE_ONLY, WITH_PROMPTS, CheckedStep, checked_steps
from simmoe.profiles.checking.verdicts import (
    Errors,
    Limits,
    Verdict,
    errors_by,
    host_spread,
    served_host_spread,
    verdicts,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_DEFAULTS = Limits()


def _number(context: click.Context, option: click.Parameter, percent: float) -> float:
    """Refuse what compares with nothing: a limit that is not a number would never be exceeded."""
    if percent != percent:
        raise click.BadParameter("nan is no limit", context, option)
    return percent


def _limit(name: str, default: float, what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        f"--{name}",
        type=click.FloatRange(0, 1000, min_open=True),
        callback=_number,
        default=default * 100,
        show_default=True,
        help=f"Limit of {what}, percent.",
    )


@click.command(short_help="Predicted against measured on recorded runs.")
@click.argument("profile", required=False)
@click.argument("recordings", nargs=-1, type=click.Path(path_type=Path))
@_limit("bias", _DEFAULTS.bias, "the mean error, either way")
@_limit("median", _DEFAULTS.median, "the median absolute error")
@_limit("p95", _DEFAULTS.p95, "the 95th percentile of the absolute error")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Picture of predicted against measured (.png, .svg, .pdf)."
)
def check(
    profile: str | None, recordings: tuple[Path, ...], bias: float, median: float, p95: float, plot: Path | None
) -> None:
    """Hold PROFILE (a name, or a table's path) to RECORDINGS of its engine that took no part in its fit.

    A shipped profile is checked on the recording beside it when none is given. Steps with prompt tokens and decode-only
    steps are held to the limits apart; above the captured sizes the host's own spread, where larger, is the limit.
    Exits with 9 where a limit is exceeded.
    """
    from rich.console import Console
    from rich.markup import escape

    from simmoe.commands.profile_plot import check_name

    loaded = load_profile(profile or DEFAULT_PROFILE)
    if plot is not None:
        check_name(plot)
    paths = recordings or tuple(filter(None, [recording_path(profile or DEFAULT_PROFILE)]))
    if not paths:
        raise UsageError(f"no recording ships with '{loaded.name}'; name a recording of its engine")
    limits = Limits(bias / 100, median / 100, p95 / 100)
    steps, calibration = checked_steps(loaded.table, paths)
    spread = host_spread(loaded.table, calibration)
    found = verdicts(steps, limits, spread)

    console = Console(highlight=False)
    console.print(f"[bold]{escape(loaded.label)}[/bold] on {escape(', '.join(path.name for path in paths))}")
    console.print(_verdict_table(found))
    if any(verdict.launch == "eager" for verdict in found):
        console.print(f"above the captured sizes the same step varied by {spread:.1%}: the limit there, where larger")
    served_spread, served = served_host_spread(calibration)
    if served:
        console.print(
            f"captured steps that the host decides varied by {served_spread:.1%} in {served:,} steps recorded to "
            f"calibrate it: no limit is raised for that"
        )
    if calibration:
        console.print(f"{len(calibration):,} further steps, recorded to calibrate the host in the fit, are left out")
    for table in (*_host_tables(steps), *_blame_tables(steps)):
        console.print(table)
    if plot is not None:
        _draw(plot, steps, limits, loaded.label)
        click.echo(f"wrote {plot}", err=True)
    absent = [kind for kind in (WITH_PROMPTS, DECODE_ONLY) if all(step.steps != kind for step in steps)]
    for kind in absent:
        click.echo(
            f"note: no {'decode-only step' if kind == DECODE_ONLY else 'step with prompts'} was recorded: not checked",
            err=True,
        )
    failed = [f"{v.steps}, {v.launch}: {', '.join(v.above)}" for v in found if v.above]
    if failed:
        raise LimitError(f"'{loaded.name}' is further off than allowed: {'; '.join(failed)}")


def _verdict_table(found: Sequence[Verdict]) -> Table:
    right = ("number", "bias", "limit", "median", "limit", "p95", "limit", "")
    table = _table(
        "predicted / measured - 1 of steps with prompts and of decode-only steps", ("steps", "launched"), right
    )
    for verdict in found:
        errors, limits = verdict.errors, verdict.limits
        bias = (f"{errors.bias:+z.2%}", f"{limits.bias:.1%}")
        median = (f"{errors.median:.2%}", f"{limits.median:.1%}")
        p95 = (f"{errors.p95:.2%}", f"{limits.p95:.1%}")
        outcome = "[red]above[/red]" if verdict.above else "within"
        table.add_row(verdict.steps, verdict.launch, f"{errors.number:,}", *bias, *median, *p95, outcome)
    return table


def _host_tables(steps: Sequence[CheckedStep]) -> Iterator[Table]:
    """Yield, where the host was clocked, how far off the rest is: predicted with what the host took for each step."""
    groups: dict[tuple[str, str], list[CheckedStep]] = {}
    for step in sorted(steps, key=lambda step: (step.steps != WITH_PROMPTS, step.launch)):
        if step.clocked is not None:
            groups.setdefault((step.steps, step.launch), []).append(step)
    if groups:
        right = ("number", "bias", "median", "p95", "host p10", "median", "p90", "table's")
        table = _table("with the host's own time for each step, as recorded", ("steps", "launched"), right)
        for names, group in groups.items():
            clocked = [step.clocked for step in group if step.clocked is not None]
            errors = Errors.of([s._replace(predicted_s=c.predicted_s) for s, c in zip(group, clocked, strict=True)])
            values = (f"{errors.bias:+z.2%}", f"{errors.median:.2%}", f"{errors.p95:.2%}")
            took = [_quantile([c.host_s for c in clocked], share) for share in (0.1, 0.5, 0.9)]
            host = [f"{1e3 * s:.1f} ms" for s in (*took, _quantile([c.table_host_s for c in clocked], 0.5))]
            table.add_row(*names, f"{errors.number:,}", *values, *host)
        yield table


def _quantile(values: Sequence[float], share: float) -> float:
    import numpy as np

    return float(np.quantile(values, share))


def _blame_tables(steps: Sequence[CheckedStep]) -> Iterator[Table]:
    """Yield where the error lies: by recorded load, then by size that ran and what most of the predicted time is."""
    right = ("number", "bias", "median", "p95", "off by", "of")
    ordered = sorted(steps, key=lambda step: (step.steps != WITH_PROMPTS, step.size_rank, step.part))
    by_part = errors_by(ordered, lambda step: (step.steps, step.size_class, step.part))
    by_load = errors_by(
        sorted(steps, key=lambda step: step.steps != WITH_PROMPTS), lambda step: (step.steps, step.load)
    )
    what = "by size and by what most of the predicted time is (grid: tokens and experts)"
    for title, left, groups in (
        ("by recorded load", ("steps", "load"), by_load),
        (what, ("steps", "tokens", "mostly"), by_part),
    ):
        table = _table(title, left, right)
        for names, errors in groups.items():
            values = (f"{errors.bias:+z.1%}", f"{errors.median:.1%}", f"{errors.p95:.1%}")
            off = f"{errors.predicted_s - errors.measured_s:+z.2f} s"
            table.add_row(*names, f"{errors.number:,}", *values, off, f"{errors.measured_s:.2f} s")
        yield table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _draw(out: Path, steps: Sequence[CheckedStep], limits: Limits, label: str) -> None:
    from simmoe.commands.profile_plot import drawn

    kinds = [kind for kind in (WITH_PROMPTS, DECODE_ONLY) if any(step.steps == kind for step in steps)]
    with drawn(out, (5.6 * len(kinds), 4.9)) as figure:
        for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            _scatter(axes, [step for step in steps if step.steps == kind], limits)
            axes.set_title("steps with prompt tokens" if kind == WITH_PROMPTS else "decode-only steps")
        figure.suptitle(f"{label}: recorded steps that took no part in the fit", fontsize="medium")


def _scatter(axes: Axes, steps: Sequence[CheckedStep], limits: Limits) -> None:
    import numpy as np

    from simmoe.commands.profile_plot import log_axis, shade

    times = [1e3 * seconds for step in steps for seconds in (step.predicted_s, step.measured_s)]
    ends = np.array([0.9 * min(times), 1.1 * max(times)])
    axes.fill_between(ends, ends * (1 - limits.p95), ends * (1 + limits.p95), color="0.88", label=f"±{limits.p95:.0%}")
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    ks = sorted({step.k for step in steps})
    for index, k in enumerate(ks):
        measured, predicted = zip(*[(1e3 * s.measured_s, 1e3 * s.predicted_s) for s in steps if s.k == k], strict=True)
        axes.scatter(
            measured, predicted, s=4, alpha=0.35, linewidths=0, color=[shade(index, len(ks))], label=f"k = {k}"
        )
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set(xlabel="measured, ms a step", ylabel="predicted, ms a step", xlim=ends, ylim=ends)
    axes.grid(alpha=0.3)
    legend = axes.legend(fontsize="small", markerscale=3)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)

"""``simmoe validate``: a live run, the simulator with the same workload, limits and profile, and the two compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from simmoe.analysis.compare import Pairing
from simmoe.commands.compare import FILES, compare
from simmoe.commands.front_end import front_end_times, read_clocks
from simmoe.commands.host import host_doubts, host_of, with_host
from simmoe.commands.joining import read_loop
from simmoe.commands.live import drive
from simmoe.commands.live import run as live_run
from simmoe.commands.notes import describe_extrapolation, describe_profile, versions
from simmoe.commands.out_folder import claim_folder, refuse_empty
from simmoe.commands.out_table import refuse_blank
from simmoe.commands.record_folder import record_folder
from simmoe.commands.recorded_config import captured_sizes, live_engine, require_k_max, require_same_k_max, whole_number
from simmoe.commands.without_effect import refuse_given
from simmoe.errors import LiveError, RecordError, SimmoeError, UsageError
from simmoe.live.server.launch import EngineLaunch, read_k_max
from simmoe.policies.registry import PolicyChoice, parse_policy
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.profiles.weights import are_others, described, weights_of_table
from simmoe.record_checks import read_checked
from simmoe.records import RunRecord, write_record
from simmoe.simulator.config import FrontEndConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload
from simmoe.writing import check_place


@click.pass_context
def _validate(
    context: click.Context,
    /,
    live: str | None,
    out: str,
    profile: str,
    policy_profile: str | None,
    host_from: str | None,
    **options: Any,
) -> None:
    """Run live, simulate the same, compare.

    Options are those of 'simmoe live run'; with --live RECORD, of them --profile alone. DIR gets live/, sim/ and
    compare/.
    """
    if live is None and not (options["model"] or options["url"]):
        raise UsageError("give --live RECORD of a live run, or --model DIR or --url URL to run one")
    if live is not None:
        refuse_given(_OF_A_RUN, "is for a live run now, and --live names the record of one; leave one of them out")
    folder = Path(out)
    loaded = load_profile(profile)
    if options["model"]:  # its engines take minutes to start
        require_same_k_max(loaded, read_k_max(Path(options["model"])), "the live engines")
    believed = load_profile(policy_profile or profile)
    if live is not None or options["url"]:  # a run of engines of its own says it itself
        click.echo(describe_profile(loaded), err=True)
    if policy_profile:
        click.echo(f"policies' {describe_profile(believed)}", err=True)
    host = host_of(Path(host_from), loaded) if host_from else None
    # what cannot be written is told before any work
    with claim_folder(folder / "compare", "comparison") as compared, ExitStack() as held:
        for name in FILES:
            check_place(compared / name, "the comparison", "choose another --out")
        sim: Path | None = None
        if live is None:
            sim = held.enter_context(record_folder(str(folder / "sim")))
            live = str(folder / "live")
            try:
                drive(
                    out=live, profile=profile, before_starting=partial(_require_times, loaded),
                    before_sending=partial(_require_simulable, loaded), **options,
                )  # fmt: skip
            except LiveError:
                if not (folder / "live" / "manifest.json").exists():
                    raise
                # it was recorded, its TTFT not to be reported: the rest is compared, and 'compare' refuses again
        record = read_checked(live)
        found = doubts(record, loaded, believed)
        for doubt in found if host is None else [*found, *host_doubts(host, record, Path(live))]:
            click.echo(doubt, err=True)
        if sim is None:
            sim = held.enter_context(record_folder(str(folder / "sim"), {"live": record.manifest}))
        clocks = read_clocks(Path(live))
        if clocks is None:
            click.echo("the record keeps no clocks of its front ends: their times are the profile's", err=True)
        front_end = None if clocks is None else front_end_times(record, clocks, read_loop(Path(live), record))
        simulated, note = simulate_like(record, loaded, front_end, believed, host)
        # paths stay such, so that the run can be repeated
        simulated.manifest["profile"]["name"] = profile
        simulated.manifest["policy_profile"]["name"] = policy_profile or profile
        Pairing.of(simulated, record)  # nothing is left of what cannot be compared
        write_record(sim, simulated)
        if note:
            click.echo(note, err=True)
        context.invoke(compare, first=str(sim), second=live, out=str(folder / "compare"))


_OWN = {"out"}

#: Of a live run, what its record tells.
_OF_A_RUN = {parameter.name for parameter in live_run.params if parameter.name} - {"out", "profile"}

validate = click.Command(
    "validate",
    callback=_validate,
    help=_validate.__doc__,
    params=[
        click.Option(
            ["--out"],
            metavar="DIR",
            required=True,
            callback=refuse_empty,
            help="Folder for both records and their comparison.",
        ),
        click.Option(
            ["--live"], metavar="RECORD", callback=refuse_blank, help="A live run's record, in place of a run now."
        ),
        click.Option(
            ["--policy-profile"],
            metavar="PROFILE",
            callback=refuse_blank,
            help="What the live run's policies took T(n, k) from.  [default: --profile]",
        ),
        click.Option(
            ["--host-from"],
            metavar="RECORD",
            callback=refuse_blank,
            help="Another live run on the same machine, to tell how fast its host is.  [default: the profile's host]",
        ),
        *(parameter for parameter in live_run.params if parameter.name not in _OWN),
    ],
)


def _require_times(profile: Profile, launch: EngineLaunch) -> None:
    """Refuse engines that will have graphs where the profile has no times of any; whether they did, they tell later.

    Raises:
        UsageError: as :func:`simulate_like`.
    """
    if launch.captures_graphs:
        profile.captured_at((1,))


def _require_simulable(profile: Profile, live: RunRecord) -> None:
    """Refuse engines that could not be simulated once they had run.

    Args:
        profile: what the simulated steps are to take.
        live: what is known of the engines, as a record without requests.
    Raises:
        LiveError: they are at a URL and do not tell what they are.
        RecordError, UsageError: as :func:`simulate_like`.
    """
    manifest = live.manifest
    told = {
        "its engines' limits": (manifest.get("config") or {}).get("engine"),
        "the policy they run": (manifest.get("policy") or {}).get("given"),
    }
    if missing := " and ".join(what for what, value in told.items() if not value):
        raise LiveError(
            f"{manifest['target']['url']} does not tell {missing}, which the simulator needs; validate against a "
            f"'simmoe serve --model DIR --record-steps', or give --model DIR here ('simmoe live run --url' drives any)"
        )
    simulated_as(live, profile)


def doubts(live: RunRecord, profile: Profile, believed: Profile) -> list[str]:
    """Return in what a live run was not as it is simulated, a line each.

    Args:
        live: the live run's record.
        profile: what the simulated steps take.
        believed: what the simulated policies take T(n, k) from.
    """
    found = []
    theirs = live.manifest.get("profile") or {}
    told = theirs.get("sha256") or believed.sha256
    if told != believed.sha256:
        found.append(
            f"the live policies took T(n, k) from another state of profile '{theirs.get('name')}' "
            f"(sha256 {told[:12]}) than the simulated ones do; --policy-profile names it"
        )
    facts = next(iter((live.manifest.get("engines") or {}).values()), None)
    size = facts.get("vocab_size") if isinstance(facts, dict) else None
    run: Mapping[str, Any] = next(iter(profile.provenance.get("runs", [])), {})
    own_size = (profile.provenance.get("estimate") or run).get("model_config", {}).get("vocab_size")
    if None not in (size, own_size) and size != own_size:
        found.append(
            f"the live engines' model has a vocabulary of {size} tokens, that of profile '{profile.name}' {own_size}: "
            f"the profile is of another model; --profile names the model's own"
        )
    weights, own = (live.manifest.get("target") or {}).get("weights"), weights_of_table(profile.provenance)
    if weights and own and are_others(weights, own):
        found.append(
            f"the live engines had weights {described(weights)}, profile '{profile.name}' is of {described(own)}; "
            f"what steps of few tokens take depends on how they are routed"
        )
    return found


def simulate_like(
    live: RunRecord,
    profile: Profile,
    front_end: FrontEndConfig | None = None,
    believed: Profile | None = None,
    host: Mapping[str, Any] | None = None,
    fast_forward: bool = True,
) -> tuple[RunRecord, str]:
    """Simulate a live run's workload under its policy, within its engines' limits.

    Args:
        live: the live run's record.
        profile: step times, and the front end's where ``front_end`` does not say.
        front_end: delays of the front end.
        believed: what the live policies took T(n, k) from; None: ``profile``.
        host: the host's shares of a step, from :func:`~simmoe.commands.host.host_of`; None: those of ``profile``.
        fast_forward: see :class:`~simmoe.simulator.config.SimConfig`; not for a cost that changes from step to step.
    Returns:
        The simulated record, its steps kept, and what the profile had to extrapolate.
    Raises:
        RecordError: the record does not say what engines or what policy it had.
        UsageError: the profile is of another k_max, or knows no graphs where the live engines had some.
    """
    manifest = live.manifest
    config, choice, sizes = simulated_as(live, profile)
    config = replace(config, front_end=front_end or config.front_end, fast_forward=fast_forward)
    requests = live.requests
    workload = Workload(
        request_id=[str(name) for name in requests["request_id"]],
        arrival_s=requests["arrival_s"],
        prompt_tokens=requests["prompt_tokens"],
        output_tokens=requests["output_tokens"],
        k_qos=requests["k_qos"],
    )
    engine = config.engine
    cost = with_host(profile, host).captured_at(sizes).keyed_cost(engine.async_scheduling, engine.graph_ks)
    believed = believed or profile
    result = simulate(workload, config, cost, choice.batch, choice.route, prefill_s=believed.cost().prefill_s)
    simulated: dict[str, Any] = {
        "kind": "run",
        "versions": versions(),
        "workload": manifest.get("workload"),
        "config": config.as_dict(),
        "profile": {
            "name": profile.name,
            "status": profile.status,
            "sha256": profile.sha256,
            "captured_sizes": None if sizes is None else list(sizes),
        },
        "policy_profile": {"name": believed.name, "status": believed.status, "sha256": believed.sha256},
        "policy": manifest["policy"],
        "live": manifest,
        "extrapolated": dict(cost.extrapolated),
    }  # fmt: skip
    if host:
        simulated["profile"]["host"] = host
    return result.record(simulated), describe_extrapolation(cost.extrapolated) or ""


def simulated_as(live: RunRecord, profile: Profile) -> tuple[SimConfig, PolicyChoice, tuple[int, ...] | None]:
    """Return as what a live run's engines are simulated: their configuration, their policy, the sizes of their graphs.

    Raises:
        RecordError: the record does not say what engines or what policy it had.
        UsageError: the profile is of another k_max, or knows no graphs where the live engines had some.
    """
    manifest = live.manifest
    policy = (manifest.get("policy") or {}).get("given")
    if manifest.get("kind") != "live":
        raise RecordError("the record to simulate is no live run's; record a run of 'simmoe live run'")
    if not (manifest.get("config") or {}).get("engine") or not policy:
        raise RecordError("the record does not say which engines and policy it had; record a run of 'simmoe live run'")
    require_k_max(live, profile, "the live engines")
    config = SimConfig(
        num_ranks=whole_number(live, "num_ranks"),
        k_max=profile.k_max,
        k_granularity=profile.k_granularity,
        engine=live_engine(live),
        front_end=FrontEndConfig(ingress_s=profile.front_end.ingress_s, egress_s=profile.front_end.egress_s),
        record_steps=True,
    )
    try:
        choice = parse_policy(policy)
    except SimmoeError as error:
        raise type(error)(f"the live run's policy cannot be simulated: {error}") from None
    sizes = captured_sizes(live)
    profile.captured_at(sizes)
    return config, choice, sizes

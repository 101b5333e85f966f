"""``simmoe serve``: N engines behind one OpenAI-compatible endpoint that hosts a route policy."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from simmoe.commands.evidence import save_evidence
from simmoe.commands.graph_options import GRAPH_OPTIONS, graph_options, take_graphs
from simmoe.commands.notes import describe_profile
from simmoe.commands.without_effect import refuse_given
from simmoe.errors import MissingDependency, PolicyError, UsageError
from simmoe.live.engine.versions import check_vllm
from simmoe.live.server.stall import STALL_TIMEOUT_S
from simmoe.policies.registry import PolicyChoice, parse_parts, parse_policy
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile

_ENGINE_OPTIONS = (
    "replicas", "default_k", *GRAPH_OPTIONS, "max_num_seqs", "max_num_batched_tokens", "record_steps", "log_dir",
    "vllm_arguments",
)  # fmt: skip

LOG_FORMAT = "%(asctime)s simmoe: %(message)s"

Command = TypeVar("Command", bound=Callable[..., Any])


def stall_timeout_option(text: str) -> Callable[[Command], Command]:
    """Add ``--stall-timeout-s`` to a command."""
    return click.option(
        "--stall-timeout-s",
        type=click.FloatRange(min=1),
        default=STALL_TIMEOUT_S,
        show_default=True,
        callback=_refuse_nan,
        help=text,
    )


def _refuse_nan(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise UsageError(f"{parameter.opts[0]} is nan; give seconds, or inf")
    return value


@click.command()
@click.option("--model", metavar="DIR", help="Folder of the model the engines load.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Engines, one a GPU.")
@click.option("--url", "urls", multiple=True, metavar="URL", help="An engine that runs elsewhere, instead of --model.")
@click.option(
    "--policy", default="queue-aware", show_default=True, metavar="POLICY", help="See 'simmoe policies list'."
)
@click.option("--profile", default=DEFAULT_PROFILE, show_default=True, help="Step-cost profile T(n, k) comes from.")
@click.option("--default-k", type=int, help="Budget of a request that names none.  [default: the largest]")
@click.option("--k-max", type=click.IntRange(min=1), help="Largest budget, where engines at --url do not tell.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option(
    "--api-key", "api_keys", multiple=True, metavar="KEY", help="Clients must bring one of these; or VLLM_API_KEY."
)
@click.option(
    "--max-inflight", type=click.IntRange(min=1), help="Requests in flight, then 429.  [default: 2048 a replica]"
)
@graph_options
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="Requests that may run at once on an engine.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), help="Tokens one step may compute.")
@click.option("--record-steps", is_flag=True, help="Engines keep their steps until 'simmoe live run --url' takes them.")
@click.option(
    "--record-decisions",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Keep all that policies saw and answered there, to replay.",
)
@click.option(
    "--drain-timeout-s",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Longest drain after SIGTERM.",
)
@stall_timeout_option("An engine with requests that makes no step for so long is dead; inf: never.")
@click.option("--log-dir", metavar="DIR", type=click.Path(path_type=Path), help="Where the engines' output goes.")
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED)
def serve(
    model: str | None,
    replicas: int,
    urls: Sequence[str],
    policy: str,
    profile: str,
    default_k: int | None,
    k_max: int | None,
    host: str,
    port: int,
    api_keys: Sequence[str],
    max_inflight: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    record_steps: bool,
    record_decisions: Path | None,
    drain_timeout_s: float,
    stall_timeout_s: float,
    log_dir: Path | None,
    vllm_arguments: Sequence[str],
    **options: Any,
) -> int:
    """Serve a model with a routing budget a request.

    Arguments after '--' are arguments of 'vllm serve' for the engines.
    """
    if bool(model) == bool(urls):
        raise UsageError("give --model DIR for engines started here, or --url URL for engines that run elsewhere")
    if urls:
        refuse_given(_ENGINE_OPTIONS, "is for engines started here; those at --url have their own")
    else:
        refuse_given(("k_max",), "is for engines at --url; those started here take what their model does")
    graphs = take_graphs(options)
    if not math.isfinite(drain_timeout_s):
        raise UsageError(f"--drain-timeout-s is {drain_timeout_s}; give seconds")
    if "" in api_keys:
        raise UsageError("--api-key is empty; leave it out to ask for none")
    choice = parse_policy(policy)
    if urls and any(part.kind == "batch" for part in parse_parts(policy)):
        raise UsageError(f"'{choice.batch_name}' is a batch policy, which engines at --url have of their own")
    if choice.clairvoyant:
        raise UsageError(f"policy '{policy}' is clairvoyant: it needs output lengths, which nobody knows here")
    require_server_packages(needs_vllm=model is not None)

    from simmoe.live.server.launch import EngineLaunch, read_k_max
    from simmoe.live.server.router import RouterOptions
    from simmoe.live.server.serving import Serving
    from simmoe.live.server.serving import serve as run_server
    from simmoe.live.server.upstream import Address

    counts = Counter(map(Address.parse, urls))
    if twice := next((address for address, count in counts.items() if count > 1), None):
        raise UsageError(f"--url {twice} is given twice; an engine is one replica")
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    loaded = load_profile(profile)
    click.echo(describe_profile(loaded), err=True)
    prefill_s = loaded.cost().prefill_s
    launch = None
    if model is not None:
        folder = Path(model)
        largest = read_k_max(folder)
        check_default_k(default_k, largest)
        launch = EngineLaunch(
            model=folder,
            choice=choice,
            k_max=largest,
            default_k=default_k or 0,
            num_ranks=replicas,
            profile=profile,
            **graphs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            record_steps=record_steps,
            decisions="" if record_decisions is None else str(record_decisions),
            further=vllm_arguments,
        )
        launch.check_devices()
        launch.check_options()
        launch.check_policy(prefill_s)
    num_ranks = replicas if launch else len(urls)
    keys = list(api_keys) or [key for key in (os.environ.get("VLLM_API_KEY"),) if key]
    serving = Serving(
        choice=choice,
        prefill_s=prefill_s,
        profile=profile,
        decisions=record_decisions,
        options=RouterOptions(max_inflight=max_inflight or 2048 * num_ranks, api_keys=keys),
        launch=launch,
        urls=urls,
        k_max=k_max,
        host=host,
        port=port,
        log_dir=log_dir,
        drain_timeout_s=drain_timeout_s,
        stall_timeout_s=stall_timeout_s,
        on_ready=lambda url: click.echo(f"serving {model or ', '.join(urls)} at {url}/v1 ({_text(num_ranks, choice)})"),
        on_policy_error=PolicyErrors(),
    )
    return run_server(serving)


def require_server_packages(*, needs_vllm: bool) -> None:
    """Make sure that what the server imports is installed.

    Raises:
        MissingDependency: it is not.
        LiveError: vLLM is, in a version that simmoe does not work inside.
    """
    if needs_vllm:
        if find_spec("vllm") is None:
            raise MissingDependency("engines need vLLM: pip install 'simmoe[live]', or 'simmoe[live-cpu]' for the CPU")
        check_vllm()
    for package in ("httptools", "uvloop", "prometheus_client"):
        if find_spec(package) is None:
            raise MissingDependency(f"the server needs {package}: pip install 'simmoe[serve]' (vLLM brings it too)")


def check_default_k(default_k: int | None, k_max: int) -> None:
    """Make sure that a default budget is one of the model's.

    Raises:
        UsageError: it is not.
    """
    if default_k is not None and not 1 <= default_k <= k_max:
        raise UsageError(f"--default-k is {default_k}; this model takes 1 to {k_max}")


class PolicyErrors:
    """Logs each failure of the route policy, and saves the call of the first."""

    def __init__(self) -> None:
        self._is_saved = False

    def __call__(self, error: PolicyError) -> None:
        told = error if self._is_saved else save_evidence(error, None)
        self._is_saved = True
        logging.getLogger(__name__).error("%s", told)


def _text(num_ranks: int, choice: PolicyChoice) -> str:
    return f"{num_ranks} replica{'s' * (num_ranks > 1)}, {choice.text}"

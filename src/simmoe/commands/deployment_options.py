"""The deployment on the command line: profile, ranks, engine and front end, shared by ``run`` and ``sweep``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import click

from simmoe.analysis.metrics import Slo
from simmoe.profiles.catalog import DEFAULT_PROFILE, Profile, load_profile
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig

Command = TypeVar("Command", bound=Callable[..., Any])

_ENGINE = EngineConfig()
_FRONT_END = FrontEndConfig()
_SIM = SimConfig()


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """What the user typed about the deployment; None leaves the choice to the profile."""

    profile: str = DEFAULT_PROFILE
    """Name or path of the step-cost profile."""
    ranks: int = _SIM.num_ranks
    """Independent data-parallel engines."""
    max_num_seqs: int = _ENGINE.max_num_seqs
    """Requests that may be running at once on a rank."""
    max_num_batched_tokens: int = _ENGINE.max_num_batched_tokens
    """Tokens one step may compute."""
    num_gpu_blocks: int | None = None
    """KV blocks of a rank."""
    block_size: int | None = None
    """Tokens a KV block holds; with another size and no num_gpu_blocks, the profile's KV memory is divided anew."""
    chunked_prefill: bool = _ENGINE.enable_chunked_prefill
    """Whether a prompt may be computed over several steps."""
    prefix_caching: bool = _ENGINE.enable_prefix_caching
    """Whether equal leading blocks of equal budget are computed once."""
    async_scheduling: bool = _ENGINE.async_scheduling
    """Whether the next step is composed while one runs."""
    publish_interval_s: float = _FRONT_END.publish_interval_s
    """How often ranks' counts reach the front end; 0: always fresh."""
    num_front_ends: int = _FRONT_END.num_front_ends
    """Front ends that share the ranks."""
    ingress_s: float | None = None
    """From arrival to the rank's queue."""
    egress_s: float | None = None
    """From the end of a step to the client having its token."""
    k_granularity: int | None = None
    """Budgets run at multiples of this: N for the original of a model split by N."""


class Deployment(NamedTuple):
    """A resolved deployment."""

    profile_name: str
    """As load_profile takes it."""
    profile: Profile
    config: SimConfig


def resolve_deployment(options: DeploymentOptions, **sim: Any) -> Deployment:
    """Load the profile and fill in what the options leave to it.

    Args:
        options: what the user typed.
        sim: further fields of SimConfig (record_steps, fast_forward).
    Raises:
        UsageError: a value no engine accepts.
        ProfileError: the profile cannot be read.
    """
    profile = load_profile(options.profile)
    block_size = profile.block_size if options.block_size is None else options.block_size
    num_gpu_blocks = options.num_gpu_blocks
    if num_gpu_blocks is None:
        num_gpu_blocks = profile.num_gpu_blocks
        if block_size >= 1 and block_size != profile.block_size:
            num_gpu_blocks = profile.num_gpu_blocks * profile.block_size // block_size
    engine = EngineConfig(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        enable_chunked_prefill=options.chunked_prefill,
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        enable_prefix_caching=options.prefix_caching,
        async_scheduling=options.async_scheduling,
        distributed_executor_backend=profile.distributed_executor_backend,
    )
    front_end = FrontEndConfig(
        publish_interval_s=options.publish_interval_s,
        num_front_ends=options.num_front_ends,
        ingress_s=profile.front_end.ingress_s if options.ingress_s is None else options.ingress_s,
        egress_s=profile.front_end.egress_s if options.egress_s is None else options.egress_s,
    )
    config = SimConfig(
        num_ranks=options.ranks,
        k_max=profile.k_max,
        k_granularity=profile.k_granularity if options.k_granularity is None else options.k_granularity,
        engine=engine,
        front_end=front_end,
        **sim,
    )
    return Deployment(options.profile, profile, config)


def deployment_options(*, ranks: int) -> Callable[[Command], Command]:
    """Add the deployment's options to a command; ``ranks`` is its own default for ``--ranks``."""
    default = DeploymentOptions(ranks=ranks)
    from_profile = "the profile's"

    def option(name: str, help_text: str, **kwargs: Any) -> Callable[[Command], Command]:
        field = name.split("/", 1)[0].removeprefix("--").replace("-", "_")
        value = getattr(default, field)
        shown = from_profile if value is None else True
        return click.option(name, default=value, show_default=shown, help=help_text, **kwargs)

    decorators = [
        option("--profile", "Step-cost profile: a name or a path."),
        option("--ranks", "Independent data-parallel engines.", type=int),
        option("--max-num-seqs", "Requests that may run at once on a rank.", type=int),
        option("--max-num-batched-tokens", "Tokens one step may compute.", type=int),
        option("--num-gpu-blocks", "KV blocks of a rank.", type=int),
        option("--block-size", "Tokens a KV block holds.", type=int),
        option("--chunked-prefill/--no-chunked-prefill", "Compute a prompt over several steps."),
        option("--prefix-caching/--no-prefix-caching", "Reuse KV of equal prefixes of equal budget."),
        option("--async-scheduling/--no-async-scheduling", "Compose the next step while one runs."),
        option("--publish-interval-s", "How often ranks' counts reach the front end.", type=float),
        option("--num-front-ends", "Front ends that share the ranks.", type=int),
        option("--ingress-s", "Delay from arrival to the rank's queue.", type=float),
        option("--egress-s", "Delay from a step's end to the client.", type=float),
        option("--k-granularity", "Budgets run at multiples of this (4: a model split by 4, unsplit).", type=int),
    ]

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def slo_options(command: Command) -> Command:
    """Add ``--slo-ttft`` and ``--slo-tpot`` to a command."""
    tpot = click.option("--slo-tpot", type=float, help="Goodput: longest TPOT allowed, seconds.")
    ttft = click.option("--slo-ttft", type=float, help="Goodput: longest TTFT allowed, seconds.")
    return ttft(tpot(command))


def take_deployment(options: dict[str, Any]) -> DeploymentOptions:
    """Remove the deployment's options from a command's keyword arguments and return them."""
    return DeploymentOptions(**{field.name: options.pop(field.name) for field in fields(DeploymentOptions)})


def take_slo(options: dict[str, Any]) -> Slo:
    """Remove the objectives from a command's keyword arguments and return them."""
    return Slo(ttft_s=options.pop("slo_ttft"), tpot_s=options.pop("slo_tpot"))

"""The policies a sweep or a search compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simmoe.commands.deployment_options import Deployment
from simmoe.errors import UsageError
from simmoe.policies.registry import PolicyChoice, parse_policy
from simmoe.simulator.simulation import policy_context

DEFAULT_POLICIES = ("fixed-k", "fifo", "tiers", "lanes")

#: vLLM+K, which others are compared with where it is among them.
BASELINE = "fifo"


#: More seeds than this narrow no interval that matters.
MOST_SEEDS = 10_000


def check_seeds(seeds: int) -> None:
    """Refuse a number of seeds that is out of range.

    Raises:
        UsageError: it is.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UsageError(f"--seeds is {seeds}; it must be in 1..{MOST_SEEDS} (5 or more for intervals worth having)")


def parse_choices(texts: Iterable[str]) -> dict[str, PolicyChoice]:
    """Parse policies, by the text they were given as; every name must mean another policy.

    Raises:
        UsageError, PolicyError: as parse_policy, or a policy is given twice.
    """
    choices: dict[str, PolicyChoice] = {}
    for text in texts:
        choice = parse_policy(text)
        for other, known in choices.items():
            if known.text == choice.text:
                raise UsageError(f"--policy '{text}' is the same policy as '{other}' ({choice.text}); give it once")
        choices[text.strip()] = choice
    return choices


def build_once(choices: Mapping[str, PolicyChoice], deployment: Deployment) -> None:
    """Build every policy for the deployment, so that a parameter that does not suit it shows before any work.

    Raises:
        UsageError, PolicyError: a constructor refuses or fails; the message names the policy.
    """
    config = deployment.config
    context = policy_context(config, deployment.profile.cost(async_scheduling=config.engine.async_scheduling))
    for choice in choices.values():
        choice.batch(context)
        choice.route(context)


def baseline_of(choices: Mapping[str, PolicyChoice]) -> str:
    """Return the name of the policy that others are compared with: vLLM+K, else the first."""
    baseline = parse_policy(BASELINE).text
    return next((name for name, choice in choices.items() if choice.text == baseline), next(iter(choices)))

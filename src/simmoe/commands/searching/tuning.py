"""A policy's parameters tuned for the highest rate that holds, by Optuna's tree-structured Parzen estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from simmoe.commands.searching.bisection import Outcome
from simmoe.commands.searching.capacity import CapacitySearch
from simmoe.commands.searching.ranges import Range, Variation
from simmoe.errors import MissingDependency, UsageError

#: Trials proposed together. Fixed, so that the trials do not depend on how many cores there are.
TRIALS_A_ROUND = 8


class Trial(NamedTuple):
    """One set of parameters and what it achieved."""

    policy: str
    rates_per_s: tuple[float, ...]
    """[num_seeds] highest rate that held."""

    @property
    def score(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.rates_per_s))


def tune(search: CapacitySearch, variation: Variation, guess: float, seeds: Sequence[int], trials: int) -> list[Trial]:
    """Return every trial in order, the policy as given first; deterministic.

    Args:
        search: how a rate is found.
        variation: the policy and what varies.
        guess: the given policy's saturation rate.
        seeds: seeds of every trial.
        trials: how many sets of parameters to try, the given one not counted.
    Raises:
        MissingDependency: Optuna is not installed.
        UsageError: the objective holds at every rate tried for the policy as given.
        SimmoeError: a simulation failed.
    """
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    distributions = {r.name: _distribution(optuna, r) for r in variation.ranges}
    given = search.run({variation.policy: guess}, seeds, "tuning")[variation.policy]
    if any(bisection.outcome is Outcome.ALWAYS for bisection in given):
        raise UsageError(
            f"the objective holds at every rate tried for '{variation.policy}': there is nothing to tune; "
            "give a tighter SLO or more --requests"
        )
    found = {variation.policy: tuple(bisection.low for bisection in given)}
    done = [Trial(variation.policy, found[variation.policy])]
    guess = max(done[0].score, guess / 8)
    while len(done) <= trials:
        asked = [study.ask(distributions) for _ in range(min(TRIALS_A_ROUND, trials + 1 - len(done)))]
        texts = [variation.text({r.name: r.rounded(trial.params[r.name]) for r in variation.ranges}) for trial in asked]
        found |= _rates(search, {text: guess for text in texts if text not in found}, seeds)
        for trial, text in zip(asked, texts, strict=True):
            done.append(Trial(text, found[text]))
            study.tell(trial, done[-1].score)
    return done


def import_optuna() -> Any:
    """Return the module.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingDependency("--vary needs optuna; pip install 'simmoe[search]'") from None
    return optuna


def _rates(search: CapacitySearch, guesses: dict[str, float], seeds: Sequence[int]) -> dict[str, tuple[float, ...]]:
    ended = search.run(guesses, seeds, "tuning")
    return {policy: tuple(bisection.low for bisection in found) for policy, found in ended.items()}


def _distribution(optuna: Any, values: Range) -> Any:
    kinds = optuna.distributions
    if values.choices:
        return kinds.CategoricalDistribution(values.choices)
    if values.whole:
        return kinds.IntDistribution(int(values.low), int(values.high), log=values.log)
    return kinds.FloatDistribution(values.low, values.high, log=values.log)

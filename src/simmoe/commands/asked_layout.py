"""What the profile commands may be asked of a model and its cards, refused alike before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.errors import UsageError


def require_budgets(budgets: Sequence[int], k_max: int) -> None:
    """Refuse ``--budgets`` beyond the model's largest."""
    if budgets and max(budgets) > k_max:
        raise UsageError(f"--budgets has {max(budgets)}; this model runs k from 1 to {k_max}")


def require_cards(tensor_parallel: int, expert_parallel: bool) -> None:
    """Refuse ``--expert-parallel`` on one card."""
    if expert_parallel and tensor_parallel == 1:
        raise UsageError("--expert-parallel spreads experts over cards: say how many with --tensor-parallel")

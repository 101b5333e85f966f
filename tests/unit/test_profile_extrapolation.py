"""Beyond a measured grid steps follow the card, not the noise between its last two points."""

from __future__ import annotations

import numpy as np
import pytest

from simmoe.profiles.catalog import load_profile, profile_names
from simmoe.profiles.estimating.binding import roofline_of
from simmoe.profiles.grid import Grid
from simmoe.profiles.step_cost import prompt_shape

MEASURED = [name for name in profile_names() if load_profile(name).status == "measured"]


@pytest.mark.parametrize("name", MEASURED)
def test_beyond_the_grid_a_step_keeps_to_its_share_of_the_roofline(name: str) -> None:
    """No faster than the card allows, nor twice as slow beside it as the largest step measured."""
    profile = load_profile(name)
    cost, roofline, last = profile.cost(), roofline_of(profile.table), profile.table.prefill.sizes[-1]
    assert roofline is not None
    for k in profile.table.prefill.ks:
        shares = [roofline.bound_s(prompt_shape(n, k)) / cost.prefill_s(n, k) for n in (last, 2 * last, 16 * last)]
        assert max(shares) < 1
        assert all(0.5 < share / shares[0] < 2 for share in shares), (k, shares)


def test_noise_in_the_last_points_hardly_moves_what_lies_beyond() -> None:
    """A grid with 2% of noise, fine to its end as measured ones are; twice and eight times its last size."""
    rng = np.random.default_rng(0)
    sizes, ks = list(range(512, 8193, 512)), [1, 2, 4, 8, 16, 20, 24, 28, 32]
    true = np.array([[1e-3 + 1e-6 * n * (1 + k / 8) for k in ks] for n in sizes])
    for _ in range(50):
        seen = true * rng.uniform(0.99, 1.01, true.shape)
        seen = np.maximum.accumulate(np.maximum.accumulate(seen, axis=0), axis=1)
        grid = Grid(sizes, ks, seen.tolist(), [])
        for n in (16384, 65536):
            for k in (1, 8, 32, 64):
                assert grid.seconds(n, k) == pytest.approx(1e-3 + 1e-6 * n * (1 + k / 8), rel=0.1)

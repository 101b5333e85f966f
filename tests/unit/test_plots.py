"""The sweep's picture: the same bytes from the same grid, whatever the user's matplotlib is set to."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

from simmoe.analysis.grid import SweepGrid
from simmoe.analysis.plots import plot_sweep
from simmoe.errors import OutputError

METRICS = (
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "request_throughput_per_s",
    "goodput_per_s",
    "executed_k",
    "requested_k",
)


def make_grid(num_policies: int = 3, num_seeds: int = 2, scale: float = 1.0) -> SweepGrid:
    policies = tuple(f"policy-{i}" for i in range(num_policies))
    cells = [
        (rate, policy, seed, {name: scale * (rate + seed + 3 * policies.index(policy)) for name in METRICS})
        for rate, policy, seed in itertools.product((5.0, 10.0, 20.0), policies, range(num_seeds))
    ]
    return SweepGrid.build(cells, policies, policies[0], dict.fromkeys(policies, 15.0))


def test_equal_grids_give_equal_bytes_whatever_the_settings(tmp_path: Path) -> None:
    plot_sweep(tmp_path / "a.png", make_grid(), "a sweep", goodput=True)
    with matplotlib.rc_context({"font.size": 30.0, "axes.facecolor": "red", "savefig.dpi": 30}):
        plot_sweep(tmp_path / "b.png", make_grid(), "a sweep", goodput=True)
        assert matplotlib.rcParams["font.size"] == 30.0, "the caller's settings come back"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (1485, 836) and not image.info.keys() & {"Software", "Creation Time"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(make_grid(num_policies=12), id="more policies than colours"),
        pytest.param(make_grid(num_seeds=1), id="one seed"),
        pytest.param(make_grid(num_policies=1), id="one policy"),
        pytest.param(make_grid(scale=math.nan), id="nothing finished"),
    ],
)
def test_every_shape_of_grid_is_drawn(grid: SweepGrid, tmp_path: Path) -> None:
    plot_sweep(tmp_path / "sweep.png", grid, "a sweep")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(OutputError, match=r"a-file/sweep.png': (File exists|Not a directory)"):
        plot_sweep(tmp_path / "a-file" / "sweep.png", make_grid(), "a sweep")

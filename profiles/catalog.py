"""Profiles by name or path."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simmoe.errors import ProfileError, UsageError, did_you_mean
from simmoe.profiles.keyed_cost import KeyedStepCost
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import StepTable
from simmoe.profiles.table_file import read_table

if TYPE_CHECKING:
    from simmoe.profiles.layer_times import LayerTimes

DEFAULT_PROFILE = "olmoe-1b-7b-split4-h200"

_DATA = Path(__file__).parent / "data"


class FrontEndTimes(NamedTuple):
    """What the front end adds to the engine's own clock."""

    ingress_s: float
    """From arrival to the engine core's queue."""
    egress_s: float
    """From a step's output having been taken in to the client."""


class Profile:
    """A step-cost table and what belongs to it."""

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.name = table.name
        self.status = table.status
        """'measured', 'estimated' or 'synthetic'."""
        self.sha256 = table.sha256
        """Of the table file."""
        self.k_max = table.k_max
        self.k_granularity = table.k_granularity
        self.block_size = table.block_size
        self.num_gpu_blocks = table.num_gpu_blocks
        self.distributed_executor_backend = table.distributed_executor_backend
        # a table's is measured from the end on the device, of a step of one sequence
        update_s = table.update.base_s + table.update.per_seq_s
        self.front_end = FrontEndTimes(table.ingress_s, max(0.0, table.egress_s - update_s))
        self.provenance: Mapping[str, Any] = table.provenance
        self._surfaces = Surfaces.of(table)

    @property
    def label(self) -> str:
        """The name, with what it is when that is not measured."""
        return self.name if self.status == "measured" else f"{self.name} ({self.status})"

    def cost(self, async_scheduling: bool = True) -> ProfileStepCost:
        """Return a fresh step cost: one a run, since it counts what it extrapolated."""
        return ProfileStepCost(self._surfaces, async_scheduling)

    def keyed_cost(self, async_scheduling: bool, graph_ks: Collection[int]) -> ProfileStepCost | KeyedStepCost:
        """Return a fresh step cost of an engine that has graphs at some budgets alone.

        Args:
            async_scheduling: whether the host composes a step while the device runs the one before.
            graph_ks: budgets with graphs; empty: every one.
        """
        cost = self.cost(async_scheduling)
        if not graph_ks or not self.table.captured_sizes:
            return cost
        return KeyedStepCost(cost, self.captured_at(()).cost(async_scheduling), graph_ks)

    def captured_at(self, sizes: Sequence[int] | None) -> Profile:
        """Return the profile of the same engine, had its graphs been captured at other sizes.

        A larger step launches its kernels one by one, which a profile has times of too.

        Args:
            sizes: token counts, ascending; empty: no graphs; None: the profile's own.
        Raises:
            UsageError: sizes, but the profile was measured without graphs.
        """
        table = self.table
        if sizes is None or tuple(sizes) == table.captured_sizes:
            return self
        if not sizes:
            return Profile(table.without_graphs())
        if not table.captured_sizes:
            raise UsageError(f"profile '{self.name}' was measured without graphs; there are no times of any")
        return Profile(replace(table, captured_sizes=tuple(sizes)))


def profile_names() -> list[str]:
    """Return the names of the profiles that ship with simmoe."""
    return sorted(path.stem for path in _DATA.glob("*.json"))


def profile_path(name_or_path: str) -> Path:
    """Return the table file of a shipped profile, or the path given.

    Raises:
        UsageError: neither a shipped profile nor a path.
    """
    if not name_or_path.strip():
        raise UsageError("the profile's name is empty; give a name that 'simmoe profile list' shows, or leave it out")
    shipped = _DATA / f"{name_or_path}.json"
    if name_or_path in profile_names():
        return shipped
    path = Path(name_or_path)
    if path.suffix == ".json" or len(path.parts) > 1:
        return path
    raise UsageError(
        f"no profile '{name_or_path}'{did_you_mean(name_or_path, profile_names())}; give a name that "
        f"'simmoe profile list' shows, or the path of a .json table"
    )


def recording_path(name: str) -> Path | None:
    """Return the recorded run that ships beside a profile, kept out of its fit; None without."""
    path = _DATA / "raw" / f"{name}-recording.jsonl.gz"
    return path if name in profile_names() and path.exists() else None


def layer_times_of(name_or_path: str, table: StepTable) -> LayerTimes | None:
    """Return the MoE layer's own times measured with a table: 'NAME-layer.json' beside it, or among the raw data.

    Raises:
        ProfileError: the file cannot be read, or is of another model, card or layout.
    """
    from simmoe.profiles.layer_times import read_layer_times

    path = profile_path(name_or_path)
    folder = _DATA / "raw" if path.parent == _DATA else path.parent
    path = folder / f"{path.stem}-layer.json"
    if not path.exists():
        return None
    times = read_layer_times(path)
    for run in table.provenance.get("runs", [])[:1]:
        spread = bool(run["engine_flags"].get("enable_expert_parallel"))
        of = _layer_of(times.model, times.num_cards, times.expert_parallel, times.card)
        if of != (table_of := _layer_of(run["model"], run["num_cards"], spread, run["card"])):
            raise ProfileError(f"'{path}' is of {of}, the table beside it of {table_of}")
    return times


def _layer_of(model: str, num_cards: int, expert_parallel: bool, card: str) -> str:
    return f"{model} on {'' if num_cards == 1 else f'{num_cards} '}{card}{', whole experts on each' * expert_parallel}"


def load_profile(name_or_path: str = DEFAULT_PROFILE) -> Profile:
    """Load a shipped profile by name, or a table file by path.

    Raises:
        UsageError: no profile has that name.
        ProfileError: the file cannot be read, or breaks a rule of the format.
    """
    return Profile(read_table(profile_path(name_or_path)))

"""The step-cost table: what it holds, in which units.

=============  ===========================================================================================
``prefill``    device seconds of a step with prompt tokens, by the tokens that run and k; attention left out
``decode``     device seconds of a decode-only step, by sequences and k; attention to KV left out
``decode_kv``  seconds a KV token attended to adds to a decode-only step, by sequences
``attention``  seconds a query-key pair, a sequence and having both kinds add to a step with prompt tokens
``real_share`` share of what a captured size costs above the one before that only a step's real tokens cost
``host``       the host's share by launch path
``mixed_host`` the same of a captured step whose prompts and decodes are launched apart; may be absent
``update``     of it, what comes after the device is done, before the next step but one is composed; may be absent
``graph_tail`` how long before the end of its launch the device can begin a decode-only step's graph; may be absent
=============  ===========================================================================================

Values never fall as sizes or k grow. :mod:`simmoe.profiles.table_file` keeps it on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: 'measured' on the card named; 'estimated' from datasheet rates; 'synthetic' made up, for tests.
STATUSES = ("measured", "estimated", "synthetic")

#: How kernels are launched: a decode-only step replays one full graph, a step with prompt tokens replays pieces around
#: attention, and a step above the captured sizes launches kernels one by one.
PATHS = ("full", "piecewise", "eager")

#: table -> its columns with their units, in order.
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "prefill": (
        ("num_tokens", "tokens"),
        ("k", "experts"),
        ("device_s", "s"),
        ("spread_s", "s"),
        ("repetitions", "count"),
    ),
    "decode": (
        ("num_seqs", "sequences"),
        ("k", "experts"),
        ("device_s", "s"),
        ("spread_s", "s"),
        ("repetitions", "count"),
    ),
    "decode_kv": (("num_seqs", "sequences"), ("per_kv_token_s", "s/token")),
    "attention": (
        ("prefill_pair_s", "s/pair"),
        ("prefill_seq_s", "s/sequence"),
        ("mixed_seq_s", "s/sequence"),
        ("mixed_kv_token_s", "s/token"),
        ("mixed_step_s", "s"),
        ("mixed_decode_share", "share"),
    ),
    "real_share": (("kind", "name"), ("size", "tokens"), ("share", "share")),
    "host": (("path", "name"), ("base_s", "s"), ("per_seq_s", "s/sequence")),
    "mixed_host": (("above_tokens", "tokens"), ("base_s", "s"), ("per_seq_s", "s/sequence")),
    "update": (("base_s", "s"), ("per_seq_s", "s/sequence")),
    "graph_tail": (("tail_s", "s"),),
}

#: Tables a file may lack, where nothing was recorded that tells them.
OPTIONAL = ("mixed_host", "update", "graph_tail")


class Cell(NamedTuple):
    """One point of a grid."""

    device_s: float
    spread_s: float
    """p90 - p10 of the repetitions."""
    repetitions: int
    """0 where the point was not measured but filled from its neighbours."""


@dataclass(frozen=True, slots=True)
class GridTable:
    """Points on a full grid."""

    sizes: tuple[int, ...]
    ks: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    """[num_sizes][num_ks]"""

    @property
    def seconds(self) -> list[list[float]]:
        """[num_sizes][num_ks] device seconds."""
        return [[cell.device_s for cell in row] for row in self.cells]


class Attention(NamedTuple):
    """What attention and sequences add to a step with prompt tokens."""

    prefill_pair_s: float
    prefill_seq_s: float
    mixed_seq_s: float
    """A decode sequence in a mixed step."""
    mixed_kv_token_s: float
    """A KV token a decode sequence of a mixed step attends to."""
    mixed_step_s: float = 0.0
    """Once, in a step that both computes prompt tokens and decodes."""
    mixed_decode_share: float = 0.0
    """Of what its decoding sequences take alone, KV left out, above the least decode step of the grid: they touch
    experts that the prompt tokens do not, and ever fewer new ones as they grow in number."""


class HostShare(NamedTuple):
    """The host's own time a step: ``base_s + per_seq_s * sequences``."""

    base_s: float
    per_seq_s: float


class MixedHost(NamedTuple):
    """The host's time of a captured step with more than so many prompt tokens beside decodes.

    Latent attention launches the kernels of both there; a prompt of no more tokens it takes as it does decodes, and
    other attention has one kernel for all tokens of a step.
    """

    above_tokens: int
    share: HostShare

    def is_apart(self, num_prefill_tokens: int, num_decode_seqs: int) -> bool:
        """Return whether a step launches its prompts apart from its decodes."""
        return num_decode_seqs > 0 and num_prefill_tokens > self.above_tokens


class RealShare(NamedTuple):
    """How much cheaper a step is that its captured size pads, by the sizes' grid.

    Each row is a captured size with a share: of what the size costs above the captured one before, so much is the cost
    of real tokens (their experts, their sampling), the rest of the padded size. Linear between rows, flat outside them.
    """

    prefill: tuple[tuple[int, float], ...] = ((1, 0.0),)
    decode: tuple[tuple[int, float], ...] = ((1, 0.0),)


#: Steps cost what their captured size does.
ALL_PADDED = RealShare()

#: A share of the host that was not measured.
NO_SHARE = HostShare(0.0, 0.0)


def executor_of(num_cards: int) -> str:
    """Return how vLLM runs an engine's workers: 'uni', the one in the loop's own process; 'mp', each in its own."""
    return "mp" if num_cards > 1 else "uni"


@dataclass(frozen=True, slots=True)
class StepTable:
    """A whole table file."""

    name: str
    status: str
    """One of STATUSES."""
    summary: str
    """One line: model, card, execution mode."""
    k_max: int
    k_granularity: int
    """Budgets run at multiples of this, in sub-expert units."""
    block_size: int
    num_gpu_blocks: int
    ingress_s: float
    """From arrival to the engine core's queue."""
    egress_s: float
    """From the end of a step to the client."""
    captured_sizes: tuple[int, ...]
    captured_ks: tuple[int, ...]
    prefill: GridTable
    decode: GridTable
    decode_kv: tuple[tuple[int, float], ...]
    attention: Attention
    host: Mapping[str, HostShare]
    """By launch path; 'eager' alone when nothing was captured."""
    provenance: Mapping[str, Any]
    real_share: RealShare = ALL_PADDED
    update: HostShare = NO_SHARE
    """What the host takes, once a step is done and the next is launched, to take its tokens in before it composes the
    next but one; 0 where it was not recorded. Within its share; beside it where workers of their own launch, which
    is all of the share then."""
    mixed_host: MixedHost | None = None
    """Where prompts and decodes of a step are launched apart and that was timed; no less than the share of prompts."""
    graph_tail_s: float | None = None
    """A decode-only step's graph is launched whole, nearly at the end of the step's launch: the device can begin it so
    long before all is launched. None where it was not recorded: as if the device could begin when the host does."""
    sha256: str = ""
    """Of the file's bytes, when read from one."""

    @property
    def distributed_executor_backend(self) -> str:
        """How the engine's workers run, in vLLM's terms: 'mp', several in processes of their own; else 'uni'."""
        engines = [*self.provenance.get("runs", []), self.provenance.get("estimate", {})]
        return executor_of(max(engine.get("num_cards", 1) for engine in engines))

    @property
    def launches_apart(self) -> bool:
        """Whether workers launch steps while the engine's loop composes others and takes outputs in."""
        return self.distributed_executor_backend == "mp"

    def without_graphs(self) -> StepTable:
        """Return the same engine launching kernels one by one at every size, unpadded."""
        host = {"eager": self.host["eager"]}
        return replace(self, captured_sizes=(), captured_ks=(), host=host, mixed_host=None, graph_tail_s=None)

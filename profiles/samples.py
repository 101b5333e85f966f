"""Raw samples of step times: what a measuring run writes and a fit reads.

A file is JSON lines; it is written plain, and read gzipped too when its name ends in ``.gz``. The first line is the
header (everything that was true of the whole run), each further line one measured point: a step of one shape, repeated,
under one clock::

    {"format": "simmoe-samples", "version": 1, "card": "NVIDIA H200", ..., "async_scheduling": true}
    {"kind": "prefill", "num_prefill_tokens": 512, ..., "k": 8, "clock": "device", "median_s": 0.0051, ...}

One file is one engine: another engine setting (synchronous scheduling, other captured sizes) is another file, and a
fit takes as many as it is given. A row is flushed when it is written, so a run that stops leaves whole rows, and
:class:`SampleWriter` opened on such a file says which points are done.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from simmoe.errors import OutputError, ProfileError
from simmoe.profiles.reading import build, parse_json, read_text
from simmoe.profiles.shape import StepShape
from simmoe.writing import write_whole

FORMAT = "simmoe-samples"
VERSION = 2
#: Version 1 had no held clock.
READ_VERSIONS = (1, 2)

Kind = Literal["prefill", "decode", "mixed"]
Mode = Literal["graphs", "eager"]
Clock = Literal["device", "step", "host", "held"]

KINDS: tuple[str, ...] = get_args(Kind)
MODES: tuple[str, ...] = get_args(Mode)
CLOCKS: tuple[str, ...] = get_args(Clock)
STEP_CLOCKS = ("device", "output")
FRONT_END = ("ingress_s", "egress_s", "start_s")


@dataclass(frozen=True, slots=True)
class Sample:
    """One point: a step of this shape, run ``repetitions`` times after warm-up.

    Raises:
        ProfileError: a kind, mode or clock that does not exist; counts that contradict the kind; times that are not
            finite, not positive or not ordered p10 <= median <= p90.
    """

    kind: Kind
    """'prefill': prompt tokens only; 'decode': one token a sequence only; 'mixed': both."""
    num_prefill_tokens: int
    """Prompt tokens computed in the step, before any padding."""
    num_prefill_seqs: int
    """Prompts or chunks those tokens belong to."""
    prefill_kv_pairs: int
    """Query-key pairs of those tokens: a chunk of c after a context of h adds c*h + c*(c+1)//2."""
    num_decode_seqs: int
    """Sequences that compute one token, before any padding."""
    decode_kv_tokens: int
    """KV tokens those sequences attend to, the new one included, summed; over repetitions whose context grows, the
    value at the median step."""
    k: int
    """Routed experts a token that really ran (the k of the graph bank, not the k asked for)."""
    mode: Mode
    """How the step ran: 'graphs' replayed captured graphs, 'eager' launched kernels one by one, as an engine with
    graphs also does above its largest captured size."""
    clock: Clock
    """'step': from the end of the step before to the end of this one, the engine running as its header says, on the
    clock its header's ``step_clock`` names; 'device': from the device's first work for the step to the end of sampling,
    on the compute stream; 'held': the same where the device was made to wait until all of the step was launched, so
    that it is the kernels' time alone; 'host': the engine core's own time a step (schedule, prepare, launch, update),
    waits on the device left out."""
    repetitions: int
    """Times measured; the percentiles are over these."""
    median_s: float
    p10_s: float
    p90_s: float
    held_out: bool = False
    """Kept out of the fit, to check it."""

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("mode", MODES), ("clock", CLOCKS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ProfileError(f"{name} is '{value}'; it must be one of {', '.join(allowed)}")
        for name in _COUNTS:
            value = getattr(self, name)
            least = 1 if name in ("k", "repetitions") else 0
            if value < least:
                raise ProfileError(f"{name} is {value}; it must be at least {least}")
        if self.kind in ("prefill", "mixed"):
            tokens, seqs, pairs = self.num_prefill_tokens, self.num_prefill_seqs, self.prefill_kv_pairs
            if not (1 <= seqs <= tokens <= pairs):
                raise ProfileError(
                    f"a {self.kind} point has num_prefill_seqs {seqs}, num_prefill_tokens {tokens}, prefill_kv_pairs "
                    f"{pairs}; each must be at least 1 and none above the next"
                )
        elif self.num_prefill_tokens or self.num_prefill_seqs or self.prefill_kv_pairs:
            raise ProfileError(f"a decode point has {self.num_prefill_tokens} prefill tokens; call it mixed")
        if self.kind in ("decode", "mixed"):
            if not 1 <= self.num_decode_seqs <= self.decode_kv_tokens:
                raise ProfileError(
                    f"a {self.kind} point has num_decode_seqs {self.num_decode_seqs}, decode_kv_tokens "
                    f"{self.decode_kv_tokens}; each sequence attends to at least its own new token"
                )
        elif self.num_decode_seqs or self.decode_kv_tokens:
            raise ProfileError(f"a prefill point has {self.num_decode_seqs} decode sequences; call it mixed")
        for name in ("p10_s", "median_s", "p90_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ProfileError(f"{name} is {value}; it must be finite and above 0 seconds")
        if not self.p10_s <= self.median_s <= self.p90_s:
            raise ProfileError(f"p10_s {self.p10_s}, median_s {self.median_s}, p90_s {self.p90_s} are out of order")

    @property
    def shape(self) -> StepShape:
        """The step's shape, as a step-cost model is asked for it."""
        return StepShape(
            num_prefill_tokens=self.num_prefill_tokens,
            prefill_kv_pairs=self.prefill_kv_pairs,
            num_prefill_seqs=self.num_prefill_seqs,
            num_decode_seqs=self.num_decode_seqs,
            decode_kv_tokens=self.decode_kv_tokens,
            k_exec=self.k,
        )

    @property
    def key(self) -> tuple[StepShape, str, str]:
        """What makes two rows the same point: shape, mode and clock."""
        return self.shape, self.mode, self.clock


@dataclass(frozen=True, slots=True)
class SampleHeader:
    """What was true of the whole run; copied into the table's provenance."""

    model: str
    """The model as published and how it was changed, e.g. 'allenai/OLMoE-1B-7B-0924 split by 4'."""
    model_config: dict[str, Any]
    """The Hugging Face config values that decide the work: hidden_size, num_hidden_layers, num_experts, ..."""
    weights: str
    """By name, see :mod:`simmoe.profiles.weights`: they decide how tokens are routed, and so what small steps cost."""
    dtype: str
    k_max: int
    """Largest k the engine can run; its config's num_experts_per_tok."""
    k_granularity: int
    """Sub-expert units one k of this model is worth: 1 when split, N for the original model."""
    card: str
    """As the driver names it."""
    num_cards: int
    driver: str
    clocks: dict[str, float]
    """Seen while measuring: sm_mhz, mem_mhz, power_w, temperature_c and the like, with units in their names."""
    versions: dict[str, str]
    """vllm, torch, triton, cuda, python, ..."""
    kernels: dict[str, Any]
    """MoE and attention backend, and the tile configuration that ran."""
    captured_sizes: list[int]
    """Token counts graphs were captured at, ascending; a step up to the last runs padded to the next. Empty: none."""
    captured_ks: list[int]
    """Budgets graphs were captured at, ascending."""
    graphs: str
    """How graphs follow k: 'banks' (one bank a k in one engine), 'default' (vLLM's own sizes at the largest k alone),
    'engine' (an engine a k), 'none' (eager)."""
    k_check: str
    """How it was shown that the k named is the k that ran, and what was seen."""
    engine_flags: dict[str, Any]
    """max_num_batched_tokens, max_num_seqs, cudagraph_mode and whatever else was not vLLM's default."""
    async_scheduling: bool
    block_size: int
    num_gpu_blocks: int
    """KV blocks the engine had, its null block included."""
    date: str
    """ISO date."""
    command: str
    """The command that made the file, without machine paths."""
    step_clock: str = "output"
    """Where a step ends under the step clock: 'device' when the device has done with it, 'output' when the host saw its
    tokens, which is late by what the host was busy with."""
    front_end: dict[str, float] = field(default_factory=dict)
    """When measured: ingress_s, arrival to the engine core's queue; egress_s, end of a step (as the step clock has it)
    to the client; start_s, on an idle engine, from the start of scheduling to the device's first work."""
    notes: list[str] = field(default_factory=list)
    """Anything a reader of the numbers must know."""

    def __post_init__(self) -> None:
        for name, least in (("k_max", 1), ("k_granularity", 1), ("num_cards", 1), ("block_size", 1)):
            if getattr(self, name) < least:
                raise ProfileError(f"header: {name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("model", "weights", "card"):
            if not getattr(self, name).strip():
                raise ProfileError(f"header: {name} is empty; it says what was measured")
        if self.num_gpu_blocks < 2:
            raise ProfileError(f"header: num_gpu_blocks is {self.num_gpu_blocks}; an engine has at least 2")
        for name in ("captured_sizes", "captured_ks"):
            values = getattr(self, name)
            if any(b <= a for a, b in zip([0, *values], values, strict=False)):
                raise ProfileError(f"header: {name} is {values}; it must ascend from at least 1 without repeats")
        if self.captured_ks and self.captured_ks[-1] > self.k_max:
            raise ProfileError(f"header: captured_ks ends at {self.captured_ks[-1]}, above k_max {self.k_max}")
        if self.step_clock not in STEP_CLOCKS:
            raise ProfileError(f"header: step_clock is '{self.step_clock}'; it must be one of {', '.join(STEP_CLOCKS)}")
        unknown = set(self.front_end) - set(FRONT_END)
        if unknown:
            raise ProfileError(f"header: front_end has {sorted(unknown)}; it may hold {', '.join(FRONT_END)}")
        for name, value in self.front_end.items():
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"header: front_end.{name} is {value}; it must be finite and at least 0")


#: Header fields that may differ between the runs that made one file: a resumed run is the same engine another time.
PER_RUN_FIELDS = ("clocks", "date", "command", "front_end", "notes", "k_check", "num_gpu_blocks")

_COUNTS = (
    "num_prefill_tokens",
    "num_prefill_seqs",
    "prefill_kv_pairs",
    "num_decode_seqs",
    "decode_kv_tokens",
    "k",
    "repetitions",
)


class SampleWriter:
    """Appends samples to a plain file; a context manager.

    Opened on a file that exists, it goes on where that stopped: the header must name the same engine, and ``done``
    counts the rows of each point already there: a point measured in several passes has a row for each. A last row cut
    short by a kill is dropped.

    Raises:
        ProfileError: the file holds samples of another engine, or is no sample file.
        OutputError: the file cannot be written, or its name asks for gzip.
    """

    def __init__(self, path: str | os.PathLike[str], header: SampleHeader) -> None:
        self.path = Path(path)
        if self.path.suffix == ".gz":
            raise OutputError(f"cannot write samples to '{self.path}': rows are appended plain; compress it afterwards")
        self.done: Counter[tuple[StepShape, str, str]] = Counter()
        lines = [json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)})]
        if self.path.exists():
            old, samples = read_samples(self.path, allow_cut_row=True)
            for name in (f.name for f in fields(header) if f.name not in PER_RUN_FIELDS):
                if getattr(old, name) != getattr(header, name):
                    raise ProfileError(
                        f"'{self.path}' was measured with {name} {getattr(old, name)}, this engine has "
                        f"{getattr(header, name)}; write to another file"
                    )
            lines = [json.dumps({"format": FORMAT, "version": VERSION, **asdict(old)})]
            lines += [json.dumps(asdict(sample)) for sample in samples]
            self.done.update(sample.key for sample in samples)
        write_whole(self.path, ("\n".join(lines) + "\n").encode(), "the samples")
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write samples to '{self.path}': {error.strerror or error}") from error

    def write(self, sample: Sample) -> None:
        """Append one row and flush it."""
        self._file.write(json.dumps(asdict(sample)) + "\n")
        self._file.flush()
        self.done[sample.key] += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_samples(path: str | os.PathLike[str], *, allow_cut_row: bool = False) -> tuple[SampleHeader, list[Sample]]:
    """Read one file.

    Args:
        path: JSON lines, gzipped when the name ends in ``.gz``.
        allow_cut_row: drop a last line that is not whole JSON (a run was killed while writing it).
    Raises:
        ProfileError: names the file, the line and the field at fault.
    """
    name = os.fspath(path)
    text = read_text(path, "the sample file").split("\n")
    lines = [(number, line) for number, line in enumerate(text, start=1) if line.strip()]
    if not lines:
        raise ProfileError(f"'{name}' is empty; a sample file starts with a header line")
    records: list[tuple[int, dict[str, Any]]] = []
    for position, (number, line) in enumerate(lines):
        try:
            record = parse_json(line, f"'{name}' line {number}")
        except ProfileError:
            if allow_cut_row and position and position == len(lines) - 1:
                break
            raise
        if not isinstance(record, dict):
            raise ProfileError(f"'{name}' line {number} is not a JSON object")
        records.append((number, record))
    number, head = records[0]
    if head.pop("format", None) != FORMAT:
        raise ProfileError(f"'{name}' is no sample file: its first line does not say format '{FORMAT}'")
    version = head.pop("version", None)
    if version not in READ_VERSIONS:
        raise ProfileError(
            f"'{name}' has sample version {version}; this simmoe reads {', '.join(map(str, READ_VERSIONS))}"
        )
    header = build(SampleHeader, head, f"'{name}' line {number}")
    samples = []
    for number, record in records[1:]:
        sample = build(Sample, record, f"'{name}' line {number}")
        _check_row(header, sample, f"'{name}' line {number}")
        samples.append(sample)
    if version == 1 and any(sample.clock == "held" for sample in samples):
        raise ProfileError(f"'{name}' has sample version 1, which knows no clock 'held'; it needs version {VERSION}")
    return header, samples


def _check_row(header: SampleHeader, sample: Sample, where: str) -> None:
    """Refuse a point that the header's engine cannot have run."""
    if sample.k > header.k_max:
        raise ProfileError(f"{where}: k is {sample.k}; the header's k_max is {header.k_max}")
    largest = header.captured_sizes[-1] if header.captured_sizes else 0
    if sample.mode == "graphs" and sample.shape.num_tokens > largest:
        raise ProfileError(
            f"{where}: {sample.shape.num_tokens} tokens in mode 'graphs'; the header's captured_sizes end at {largest}"
        )

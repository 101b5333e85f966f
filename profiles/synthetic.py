"""A made-up engine with a known cost, and the samples it would give: the oracle of the fit, and the test-only table.

Its numbers are those of no card. It lets the simulator's tests load a complete profile, and lets a fit be checked
against the truth it must recover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simmoe.profiles.samples import Clock, Kind, Mode, Sample, SampleHeader
from simmoe.profiles.shape import StepShape

CAPTURED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BUDGETS = (1, 2, 4, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class SyntheticEngine:
    """Seconds by formula: a fixed part, tokens, routed pairs, experts touched, attention, and the host."""

    fixed_s: float = 1.5e-3
    token_s: float = 6e-7
    routed_s: float = 2e-7
    """A token-expert pair's arithmetic."""
    experts_s: float = 2.5e-3
    """Reading every expert's weights; a step reads the share that its pairs touch of 256."""
    decode_seq_s: float = 1e-6
    """Sampling for a sequence of a decode-only step."""
    pair_s: float = 2e-10
    prompt_s: float = 2e-5
    decode_kv_token_s: float = 2.5e-8
    mixed_seq_s: float = 2e-6
    mixed_kv_token_s: float = 3e-8
    host_s: tuple[float, float] = (1e-3, 2.5e-3)
    """Of a decode-only step, and of one with prompt tokens."""
    host_seq_s: float = 4e-6

    def device_s(self, shape: StepShape) -> float:
        """Return the device's seconds for a step up to the largest captured size."""
        size = next(c for c in CAPTURED_SIZES if c >= shape.num_tokens)
        touched = 1 - (1 - 1 / 256) ** (size * shape.k_exec)
        seconds = self.fixed_s + self.token_s * size + self.experts_s * touched
        seconds += self.routed_s * size * shape.k_exec
        if not shape.num_prefill_tokens:
            sampling = self.decode_seq_s * shape.num_decode_seqs
            return seconds + sampling + self.decode_kv_token_s * shape.decode_kv_tokens
        seconds += self.pair_s * shape.prefill_kv_pairs + self.prompt_s * shape.num_prefill_seqs
        return seconds + self.mixed_seq_s * shape.num_decode_seqs + self.mixed_kv_token_s * shape.decode_kv_tokens

    def host_share_s(self, shape: StepShape) -> float:
        """Return the host's seconds."""
        base_s = self.host_s[bool(shape.num_prefill_tokens)]
        return base_s + self.host_seq_s * (shape.num_prefill_seqs + shape.num_decode_seqs)

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds from step to step, scheduling asynchronously."""
        return max(self.device_s(shape), self.host_share_s(shape))

    def header(self) -> SampleHeader:
        """Return what a measuring run would say of this engine."""
        return SampleHeader(
            model="synthetic: no model",
            model_config={"num_experts": 256, "num_experts_per_tok": 32},
            weights="none",
            dtype="none",
            k_max=32,
            k_granularity=1,
            card="synthetic: no card",
            num_cards=1,
            driver="none",
            clocks={},
            versions={},
            kernels={},
            captured_sizes=list(CAPTURED_SIZES),
            captured_ks=list(BUDGETS),
            graphs="banks",
            k_check="by construction",
            engine_flags={},
            async_scheduling=True,
            block_size=16,
            num_gpu_blocks=24001,
            date="2026-01-01",
            command="simmoe.profiles.synthetic",
            front_end={"ingress_s": 0.004, "egress_s": 0.004},
            notes=["Made up by formula; the times are those of no card."],
        )

    def samples(self, noise: float = 0.0, seed: int = 0) -> list[Sample]:
        """Return the points a measuring run takes, each with relative log-normal ``noise``, under all three clocks."""
        rng = np.random.default_rng(seed)
        out: list[Sample] = []
        for shape, held_out in _plan():
            true_s: dict[Clock, float] = {
                "device": self.device_s(shape),
                "step": self.step_s(shape),
                "host": self.host_share_s(shape),
            }
            for clock, exact_s in true_s.items():
                seconds = float(exact_s * np.exp(noise * rng.standard_normal()))
                repeats = [seconds * (1 + noise * d) for d in (-1, 0, 1)]
                out.append(make_sample(shape, clock, "graphs", repeats, held_out))
        return out

    def held_samples(self, budgets: Sequence[int] = BUDGETS, noise: float = 0.0, seed: int = 0) -> list[Sample]:
        """Return the points of those budgets whose time the host decides, as a device that is held shows them."""
        rng = np.random.default_rng(seed)
        shapes = [shape for shape, held_out in _plan() if shape.k_exec in budgets and not held_out]
        hidden = [shape for shape in shapes if self.device_s(shape) < 1.2 * self.host_share_s(shape)]
        out = []
        for shape in hidden:
            seconds = float(self.device_s(shape) * np.exp(noise * rng.standard_normal()))
            out.append(make_sample(shape, "held", "graphs", [seconds * (1 + noise * d) for d in (-1, 0, 1)]))
        return out


def make_sample(shape: StepShape, clock: Clock, mode: Mode, seconds: Sequence[float], held_out: bool = False) -> Sample:
    """Return the sample of a shape from its repetitions."""
    kind: Kind = "decode" if not shape.num_prefill_tokens else "mixed" if shape.num_decode_seqs else "prefill"
    p10, median, p90 = np.quantile(np.asarray(seconds, dtype=np.float64), [0.1, 0.5, 0.9])
    return Sample(
        kind=kind,
        num_prefill_tokens=shape.num_prefill_tokens,
        num_prefill_seqs=shape.num_prefill_seqs,
        prefill_kv_pairs=shape.prefill_kv_pairs,
        num_decode_seqs=shape.num_decode_seqs,
        decode_kv_tokens=shape.decode_kv_tokens,
        k=shape.k_exec,
        mode=mode,
        clock=clock,
        repetitions=len(seconds),
        median_s=float(median),
        p10_s=float(p10),
        p90_s=float(p90),
        held_out=held_out,
    )


def _plan() -> list[tuple[StepShape, bool]]:
    """Return the shapes measured, and whether each is held out."""
    shapes: list[tuple[StepShape, bool]] = []
    for k in BUDGETS:
        for size in CAPTURED_SIZES:
            prompts = max(1, size // 512)
            shapes.append((StepShape(size, size * (size + 1) // 2, 1, 0, 0, k), False))
            if size >= 1024:
                each = size // prompts
                shapes.append((StepShape(size, prompts * each * (each + 1) // 2, prompts, 0, 0, k), False))
            if size <= 1024:
                shapes += [(StepShape(0, 0, 0, size, size * context, k), False) for context in (128, 1024)]
                shapes.append((StepShape(0, 0, 0, size, size * 512, k), True))
        for chunk, decodes in ((192, 64), (896, 128), (1984, 64)):
            for context in (256, 1024):
                pairs = chunk * (chunk + 1) // 2
                shapes.append((StepShape(chunk, pairs, 1, decodes, decodes * context, k), context == 256 and k == 8))
        shapes.append((StepShape(700, 700 * 701 // 2, 1, 0, 0, k), True))
    return shapes

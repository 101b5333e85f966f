"""Refactor the small model every way the documentation compares, and measure perplexity at every budget.

``python -m simmoe.live.training.study MODEL TOKENS OUT`` writes ``OUT/quality.jsonl`` (one line a model and budget),
``OUT/partitions.json`` (loss and captured mass of every partition and schedule) and the fine-tuned router rows
``OUT/gates-*.safetensors``. Stages run in the order of :data:`STAGES`; ``--stages`` picks some. Every line is on disk
as soon as it is known; a curve that is there is not measured again, and none is begun after ``--max-seconds``.

Calibration and evaluation take windows at even distances from the whole of the training and the test text, so every
source of the corpus has its share.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simmoe.live.evaluate.perplexity import gate_modules, perplexity, set_budget
from simmoe.live.refactor.anneal import DESCENT, PUBLISHED, Schedule
from simmoe.live.refactor.checkpoint import Checkpoint
from simmoe.live.refactor.engine import RefactorConfig, down_proj_of, load_model, plan, record_of, solve
from simmoe.live.refactor.families import GATE_TENSOR, family_of, moe_shape
from simmoe.live.refactor.finetune import FinetuneConfig, finetune
from simmoe.live.refactor.gates import ALLOCATIONS, allocation_table, calibrate, choose_gate_neurons
from simmoe.live.refactor.partition import captured_mass, group_masses, partition_loss
from simmoe.live.refactor.profiler import LayerProfile, coverage_report, profile_model
from simmoe.live.refactor.transform import PARTITION_FILE, write_refactored

STAGES = ("original", "complex", "linear", "finetuned", "controls", "partitions")

SCHEDULES = {
    "published": PUBLISHED,
    "descent": DESCENT,
    "spread-30ppm": Schedule.spread(30.0, 100_000),
    "spread-100ppm": Schedule.spread(100.0, 100_000),
    "spread-1000ppm": Schedule.spread(1000.0, 100_000),
}

_DRAWN = FinetuneConfig(learning_rate=1e-4, budget_schedule="mixed", k_start=1, micro_sequences=32)
FINETUNES = {
    "published": FinetuneConfig(learning_rate=1e-5, micro_sequences=32),
    "mixed": _DRAWN,
    "mixed-distilled": replace(_DRAWN, objective="distil"),
    "sandwich-distilled": replace(_DRAWN, objective="distil", budget_schedule="sandwich", micro_sequences=16),
}
CONTROLS = ("random", "contiguous", "greedy")
#: Recipe under which the controls are fine-tuned too.
CONTROL_RECIPE = "sandwich-distilled"
_MEASURED = {"model", "k", "perplexity", "mean_nll", "num_tokens"}


def spread_windows(tokens: np.ndarray[Any, Any], count: int, context: int) -> torch.Tensor:
    """[at most count * context] int64: windows at even distances from the whole of ``tokens``."""
    whole = len(tokens) // context
    chosen = np.linspace(0, whole - 1, min(count, whole)).round().astype(np.int64)
    return torch.from_numpy(tokens[: whole * context].reshape(whole, context)[chosen].astype(np.int64)).flatten()


class Study:
    """One run: the model, the held-out tokens, where results go."""

    def __init__(
        self,
        model: Path,
        tokens: Path,
        out: Path,
        *,
        test_tokens: int,
        tokens_per_expert: int,
        calibration_windows: int,
        max_seconds: float,
        recipes: Sequence[str],
        quick: bool,
    ) -> None:
        self.model, self.out, self.quick, self.recipes = model, out, quick, recipes
        self.ends = time.monotonic() + max_seconds
        self.calibration_windows = 8 if quick else calibration_windows
        self.scratch = Path(tempfile.mkdtemp(prefix="study-"))
        out.mkdir(parents=True, exist_ok=True)
        self.source = Checkpoint(model)
        self.context = int(self.source.config["max_position_embeddings"])
        self.shape = moe_shape(self.source.config, family_of(self.source.config))
        self.train = np.load(tokens / "train.npy", mmap_mode="r")
        self.test = spread_windows(np.load(tokens / "test.npy"), test_tokens // self.context, self.context)
        self._calibration_file = tokens / "train.npy"
        self.cuda = torch.cuda.is_available()
        self.config = RefactorConfig(
            schedule=Schedule(iterations=200) if quick else PUBLISHED,
            tokens_per_expert=256 if quick else tokens_per_expert,
        )
        self._profiles: list[LayerProfile] | None = None

    def load(self, path: Path) -> Any:
        """A bf16 model on the device at hand."""
        return load_model(path, **({"experts_implementation": "grouped_mm"} if self.cuda else {}))

    def late(self, job: str) -> bool:
        """Whether the time is up, said aloud."""
        if over := time.monotonic() > self.ends:
            print(f"no time for {job}", flush=True)
        return over

    def profiles(self) -> list[LayerProfile]:
        """Activations of the original model on training text."""
        if self._profiles is None:
            self._profiles = self.profile(spread_windows(self.train, self.calibration_windows, self.context))
            print(coverage_report(self._profiles), flush=True)
        return self._profiles

    def profile(self, tokens: torch.Tensor) -> list[LayerProfile]:
        """Activations of the original model on whole windows of ``tokens``."""
        whole = tokens.numel() // self.context * self.context
        batches = tokens[:whole].view(-1, self.context).split(32)
        found: list[LayerProfile] = profile_model(
            self.load(self.model), batches, tokens_per_expert=self.config.tokens_per_expert
        )
        return found

    def missing(self, name: str, budgets: Iterable[int], **more: Any) -> list[int]:
        """The budgets of one curve that are not on disk yet."""
        path = self.out / "quality.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        same = (row for row in rows if row["model"] == name and {k: row[k] for k in row.keys() - _MEASURED} == more)
        there = {row["k"] for row in same}
        return [k for k in budgets if k not in there]

    def record(self, name: str, model: Any, budgets: Iterable[int], **more: Any) -> None:
        """Measure one curve and append one line a budget."""
        began = time.monotonic()
        for k in self.missing(name, budgets, **more):
            set_budget(model, k)
            found = perplexity(model, self.test, context_tokens=self.context)
            row = {"model": name, "k": k, **more, "perplexity": round(found.perplexity, 5), "mean_nll": found.mean_nll,
                   "num_tokens": found.num_tokens}  # fmt: skip
            with (self.out / "quality.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{name} {more}: {time.monotonic() - began:.1f} s", flush=True)

    def refactored(self, name: str, config: RefactorConfig) -> Path:
        """Plan and write one refactored checkpoint under the scratch folder."""
        out = self.scratch / name
        plans, kappa = plan(self.profiles(), config, self.source, lambda line: None)
        write_refactored(self.source, out, plans, record_of(config, self.source, self._calibration_file, kappa))
        return out

    def budgets(self) -> range:
        """Every budget of the split model; a few of them in a quick run."""
        ceiling = self.shape.top_k * self.config.splits
        return range(1, ceiling + 1, 15) if self.quick else range(1, ceiling + 1)

    def run_partitions(self) -> None:
        """Loss and captured mass of every partition, and of annealing under every schedule and objective."""
        held_out = self.profile(self.test)
        rows: list[dict[str, Any]] = []
        variants = [(kind, replace(self.config, partition=kind)) for kind in ("contiguous", "random", "greedy")]
        for name, schedule in SCHEDULES.items():
            shorter = replace(schedule, iterations=self.config.schedule.iterations) if self.quick else schedule
            variants.append((f"annealed {name}", replace(self.config, schedule=shorter)))
        variants += [(f"annealed K_drop={k}", replace(self.config, k_drop=k)) for k in (1, 2, 3)]
        for name, config in variants:
            if self.late(f"partition {name}"):
                return
            began = time.monotonic()
            orders = [solve(profile, config) for profile in self.profiles()]
            elapsed = time.monotonic() - began
            rows.append({"partition": name, "seconds": round(elapsed, 2)})
            for text, profiles in (("calibration", self.profiles()), ("held_out", held_out)):
                masses = [group_masses(p.activations, o, 4).cpu() for p, o in zip(profiles, orders, strict=True)]
                rows[-1][text] = {
                    "loss": float(torch.cat([partition_loss(m) for m in masses]).mean()),
                    "loss_by_k_drop": [
                        float(torch.cat([partition_loss(m, k) for m in masses]).mean()) for k in (1, 2, 3)
                    ],
                    "captured": torch.cat([captured_mass(m) for m in masses]).mean(dim=0).tolist(),
                }
            print(json.dumps(rows[-1]), flush=True)
            (self.out / "partitions.json").write_text(json.dumps(rows, indent=1) + "\n")

    def run_original(self) -> None:
        """The unsplit model at every whole k."""
        self.record("original", self.load(self.model), range(1, self.shape.top_k + 1))

    def run_complex(self) -> None:
        """CG: every partition and allocation at every budget, equal shares by inner budget, high budgets in float32."""
        for partition in ("annealed", *CONTROLS):
            if self.late(f"CG {partition}"):
                return
            path = self.refactored(f"cg-{partition}", replace(self.config, partition=partition))
            tables = self._tables(path)
            if partition != "annealed":
                tables = {kind: tables[kind] for kind in ("marginal", "energy")}
            model = self.load(path)
            for kind, table in tables.items():
                self._allocate(model, table)
                self.record("CG", model, self.budgets(), partition=partition, allocation=kind)
            top_k, splits = self.shape.top_k, self.config.splits
            equal = {top_k * inner: [inner] * top_k for inner in range(1, splits + 1)}
            self._allocate(model, [equal.get(k, row) for k, row in enumerate(tables["marginal"], start=1)])
            self.record("CG", model, equal, partition=partition, allocation="equal")
            # bf16 rounds differently for every order of the neurons, by as much as the last sub-experts matter
            model = load_model(path, dtype="float32", experts_implementation="eager")
            for kind in ("marginal", "energy"):
                self._allocate(model, tables[kind])
                high = [k for k in self.budgets() if k > 3 * top_k]
                self.record("CG", model, high, partition=partition, allocation=kind, dtype="float32")

    def _tables(self, path: Path) -> dict[str, list[list[int]]]:
        """Every allocation of the partition in a CG checkpoint."""
        splits, top_k = self.config.splits, self.shape.top_k
        orders = [torch.from_numpy(o.astype(np.int64)) for o in np.load(path / PARTITION_FILE).values()]
        neurons = [
            choose_gate_neurons(p, o, splits, self.config.gate_neurons)
            for p, o in zip(self.profiles(), orders, strict=True)
        ]
        seen = calibrate(self.profiles(), orders, neurons, splits, top_k, down_proj_of(self.source))
        return {kind: allocation_table(kind, splits, top_k, seen) for kind in ALLOCATIONS}

    def run_linear(self) -> None:
        """LG before fine-tuning."""
        if not self.missing("LG", self.budgets(), partition="annealed") or self.late("LG"):
            return
        path = self.refactored("lg-annealed", replace(self.config, gate="linear"))
        self.record("LG", self.load(path), self.budgets(), partition="annealed")

    def run_finetuned(self) -> None:
        """LG on the learned partition after gate-only fine-tuning, by every recipe."""
        for name in self.recipes:
            self._finetune("annealed", name)

    def run_controls(self) -> None:
        """LG on the control partitions after gate-only fine-tuning, by one recipe."""
        for partition in CONTROLS:
            self._finetune(partition, CONTROL_RECIPE)

    def _finetune(self, partition: str, name: str) -> None:
        curve = {"partition": partition, "recipe": name}
        if not self.missing("LG fine-tuned", self.budgets(), **curve) or self.late(f"fine-tuning {curve}"):
            return
        base, out = self.scratch / f"lg-{partition}", self.scratch / f"lg-{partition}-{name}"
        if not base.exists():
            self.refactored(base.name, replace(self.config, gate="linear", partition=partition))
        recipe = replace(FINETUNES[name], context_tokens=self.context)
        if self.quick:
            recipe = replace(recipe, steps=2, sequences=2, micro_sequences=1)
        began = time.monotonic()
        finetune(base, self.train, out, recipe, load=self.load, say=lambda line: print(line, flush=True))
        print(f"fine-tuned {name} {partition} in {time.monotonic() - began:.1f} s", flush=True)
        self.record("LG fine-tuned", self.load(out), self.budgets(), **curve)
        self._keep_gates(out)

    def _keep_gates(self, path: Path) -> None:
        from safetensors.torch import save_file

        rows = {name: tensor for name, tensor in Checkpoint(path).tensors() if GATE_TENSOR.match(name)}
        save_file(rows, self.out / f"gates-{path.name}.safetensors")

    @staticmethod
    def _allocate(model: Any, table: list[list[int]]) -> None:
        for gate in gate_modules(model):
            gate.kappa = table


def main(argv: list[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path, help="folder of train.npy and test.npy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--test-tokens", type=int, default=131_072)
    parser.add_argument("--calibration-windows", type=int, default=1024)
    parser.add_argument("--tokens-per-expert", type=int, default=2048)
    parser.add_argument("--recipes", default=",".join(FINETUNES), help="of the stage finetuned")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all")
    options = parser.parse_args(argv)
    study = Study(
        options.model, options.tokens, options.out, max_seconds=options.max_seconds,
        recipes=options.recipes.split(","),
        test_tokens=options.test_tokens, calibration_windows=options.calibration_windows,
        tokens_per_expert=options.tokens_per_expert, quick=options.quick,
    )  # fmt: skip
    for stage in options.stages.split(","):
        print(f"== {stage}", file=sys.stderr, flush=True)
        getattr(study, f"run_{stage}")()


if __name__ == "__main__":
    main()

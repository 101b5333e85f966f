"""Make the live records of a validation experiment: ``python benchmarks/validation/record.py keyed --out records``.

``default-graphs`` needs one GPU, the other experiments two, and none more than ten minutes; vLLM 0.32 is needed
(``pip install 'simmoe[live]'``). Each run of the plan becomes a run record in its own folder; runs whose record is
there are skipped, so that a command that was cut short can be given again. With ``--limit-s`` no run is begun that
would not end in time. Where the plan names no saturation, and with ``--profile``, loads are shares of what is simulated
first. Analyse the records afterwards, on any machine: ``python benchmarks/validation/analyse.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from plan import EXPERIMENTS, POLICIES, Cell, Experiment

from simmoe.commands.notes import versions
from simmoe.live.driving.engines import LocalEngines, running_engines
from simmoe.live.driving.live_run import LiveResult, run_once
from simmoe.live.driving.manifest import engine_manifest
from simmoe.live.measure.engine import CAPTURED_KS
from simmoe.live.measure.models import write_model
from simmoe.live.server.launch import EngineLaunch, read_k_max
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.models import read_model, split_config
from simmoe.records import MANIFEST, write_record
from simmoe.traces.build import build_workload

MAX_MODEL_LEN = 16384

ENGINE = (
    *("--load-format", "simmoe-dummy"),
    *("--worker-cls", "simmoe.live.measure.worker.MeasuringWorker"),
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--gpu-memory-utilization", "0.87"),
    *("--moe-backend", "triton"),
    *("--kernel-config", json.dumps({"enable_jit_warmup": False})),
    "--skip-tokenizer-init",
)
"""As the profile was measured: weights of a trained scale, and a worker that times the device.

The engines are warmed up here, with what they will serve; vLLM's own warm-up of other kernels takes 24 s.
"""

ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}
"""Graphs fit into the eighth of a card that is left; to estimate them beforehand takes 13 s."""

GRAPH_MEMORY_GIB = 16.0
"""Of an H200: that eighth, less the largest step's activations."""

#: What a run takes beyond its arrivals: the last requests' decoding, the records, a breath.
DRAIN_S = 8.0
#: Requests a second of one engine in a burst, at the least.
BURST_RATE = 30.0


def main() -> None:
    """Record the runs of an experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--profile", help="another profile, by name or path")
    parser.add_argument("--model", type=Path, help="another model's folder, to try the script")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds to be done in")
    parser.add_argument("--seconds", type=float, help="arrivals of every run, to try the script")
    parser.add_argument("--rate", type=float, help="requests a second of every run, to try the script")
    parser.add_argument("--engine", type=shlex.split, help="arguments of vllm serve, instead of the experiment's own")
    arguments = parser.parse_args()
    deadline_s = time.monotonic() + arguments.limit_s
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    experiment = EXPERIMENTS[arguments.experiment]
    profile = arguments.profile or experiment.profile
    saturation = None if arguments.profile else experiment.saturation
    cells = experiment.cells(saturation or _simulated_saturation(experiment, profile))
    cells = [_tried(cell, arguments.rate, arguments.seconds) for cell in cells]
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or _write_model(experiment, Path(folder))
        launch = EngineLaunch(
            model=model,
            choice=parse_policy(POLICIES[cells[0].system]),
            k_max=read_k_max(model),
            num_ranks=experiment.num_ranks,
            profile=profile,
            graphs=experiment.graphs,
            captured_ks=_captured_ks(experiment, read_k_max(model)),
            graph_memory_gib=GRAPH_MEMORY_GIB,
            uncaptured_k="next",
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            record_steps=True,
            further=arguments.engine or ENGINE,
        )
        launch.check_devices()
        asyncio.run(_record(launch, cells, arguments.out, deadline_s))


def _simulated_saturation(experiment: Experiment, profile: str) -> dict[str, float]:
    from saturation import saturation

    return saturation(experiment, load_profile(profile))


def _captured_ks(experiment: Experiment, k_max: int) -> tuple[int, ...]:
    """Return the experiment's budgets as far as a model has them, its largest among them."""
    return (*(k for k in experiment.captured_ks or CAPTURED_KS if k < k_max), k_max)


def _write_model(experiment: Experiment, folder: Path) -> Path:
    config = split_config(read_model(experiment.model).config, experiment.split)
    return write_model(config, folder / f"{experiment.model}-split{experiment.split}", MAX_MODEL_LEN)


async def _record(launch: EngineLaunch, cells: Sequence[Cell], out: Path, deadline_s: float) -> None:
    begun_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun_s:6.1f} s] {text}", flush=True)

    async with running_engines(launch, load_profile(launch.profile).cost().prefill_s, say) as engines:
        facts = engines.facts[0]
        say(f"up: {facts['num_gpu_blocks']} KV blocks, budgets captured {facts['captured_ks']}")
        for cell in cells:
            folder = out / cell.name
            if (folder / MANIFEST).exists():
                say(f"{cell.name}: recorded before")
                continue
            if time.monotonic() + _takes_s(cell) > deadline_s:
                say(f"{cell.name}: no time left for it")
                continue
            result = await _run(launch, engines, cell)
            if result.is_interrupted:  # kept, it would be taken for the whole run
                say(f"{cell.name}: interrupted, not kept")
                raise KeyboardInterrupt
            write_record(folder, result.record)
            say(_summary(cell, result))


async def _run(launch: EngineLaunch, engines: LocalEngines, cell: Cell) -> LiveResult:
    choice = parse_policy(POLICIES[cell.system])
    await engines.host(choice, cell.num_ranks)
    workload = build_workload(cell.spec)
    manifest = engine_manifest(launch, choice, cell.num_ranks, cell.spec, workload.source, versions())
    load = None if math.isinf(cell.load) else cell.load
    manifest["experiment"] = {"cell": cell.name, "system": cell.system, "load": load, "graphs": launch.graphs}
    return await run_once(workload, engines, manifest, vocab_size=0, seed=cell.spec.seed)


def _takes_s(cell: Cell) -> float:
    arrivals_s = cell.requests / (BURST_RATE if math.isinf(cell.rate) else cell.rate)
    return arrivals_s + DRAIN_S


def _summary(cell: Cell, result: LiveResult) -> str:
    requests, manifest = result.record.requests, result.record.manifest
    done = requests["status"] == "finished"
    ttft_ms = 1e3 * (requests["first_token_s"] - requests["arrival_s"])[done]
    tpot_ms = (
        1e3
        * (requests["finished_s"] - requests["first_token_s"])[done]
        / np.maximum(1, requests["output_tokens"][done] - 1)
    )
    steps = result.record.steps
    k = steps["routed_slots"].sum() / (steps["num_prefill_tokens"] + steps["num_decode_tokens"]).sum() if steps else 0
    return (
        f"{cell.name}: {done.sum()} of {len(done)} finished in {manifest['end_s']:.1f} s, "
        f"TTFT {ttft_ms.mean():.1f} ms mean, {np.percentile(ttft_ms, 99):.1f} p99, TPOT {tpot_ms.mean():.2f} ms, "
        f"k {k:.1f}, send lag {1e3 * result.lag.mean_s:.2f} ms mean, {1e3 * result.lag.max_s:.1f} most"
        + "".join(f"; {count} {reason}" for reason, count in result.reasons.items())
    )


def _tried(cell: Cell, rate: float | None, seconds: float | None) -> Cell:
    """Return the cell at another rate, for another time."""
    if rate is None or seconds is None:
        return cell
    at = cell.rate if math.isinf(cell.rate) else rate
    requests = round(rate * seconds)
    return replace(cell, rate=at, requests=requests, spec=replace(cell.spec, rate=at, requests=requests))


if __name__ == "__main__":
    main()

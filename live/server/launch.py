"""How an engine of a deployment is started: vLLM's arguments, its environment, the card it runs on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from simmoe.errors import UsageError
from simmoe.live.engine.options import read_options
from simmoe.live.engine.policy_options import POLICY_KEY, PolicyOptions
from simmoe.live.engine.transport import CONFIG_KEY, EngineOptions
from simmoe.live.engine.versions import live_versions
from simmoe.live.measure.engine import CAPTURED_SIZES
from simmoe.live.server.additional_config import FLAG, with_given
from simmoe.live.server.upstream import Address
from simmoe.live.server.warm_up import warm_up
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import PolicyChoice
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.weights import weights_served

Graphs = Literal["keyed", "default", "none"]

DEFAULT_MAX_NUM_SEQS = 1024
DEFAULT_MAX_NUM_BATCHED_TOKENS = 8192
"""Limits a policy is shown where an engine's own are not known."""

_DEVICES = Path("/dev")


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i in range(len(list(_DEVICES.glob("nvidia[0-9]*"))))]


def read_k_max(model: Path) -> int:
    """Return the largest budget of a model on disk, its config's ``num_experts_per_tok``.

    Raises:
        UsageError: no config there, or no MoE.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model '{model}' has no readable config.json: {error}; give a model's folder") from None
    k_max = config.get("num_experts_per_tok") if isinstance(config, dict) else None
    if not isinstance(k_max, int) or k_max < 1:
        raise UsageError(f"'{path}' has no num_experts_per_tok: simmoe serves MoE models")
    return k_max


def described_policy(choice: PolicyChoice) -> dict[str, Any]:
    """Return what a manifest says of the policy that live engines host."""
    return {"given": choice.text, "parameters": choice.parameters, "files": choice.files, "clairvoyant": False}


class Launch(Protocol):
    """How the engines of a deployment are started."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        ...

    def command(self, rank: int, uds: str) -> list[str]:
        """Return the command that starts one engine's server, to listen on a Unix socket."""
        ...

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of that process."""
        ...

    def described(self) -> dict[str, Any]:
        """Return what a run on these engines records of how they were started, as plain data."""
        ...

    def recordings(self) -> Sequence[Path]:
        """Return the files that engines record decisions in."""
        ...

    async def warm_up(self, address: Address, facts: Mapping[str, Any]) -> None:
        """Have an engine that is up do what it would do for the first time while it serves.

        Raises:
            OSError: it does not answer.
        """
        ...


@dataclass(frozen=True)
class EngineLaunch:
    """N engines of one model and one policy."""

    model: Path
    """Folder of the model."""
    choice: PolicyChoice
    k_max: int
    default_k: int = 0
    """Budget of a request that names none; 0: ``k_max``."""
    num_ranks: int = 1
    profile: str = ""
    """Step-cost table that T(n, k) comes from."""
    graphs: Graphs = "keyed"
    """CUDA graphs: keyed by k at every size up to the token budget, keyed by k at vLLM's default sizes, or none."""
    captured_ks: tuple[int, ...] = EngineOptions.captured_ks
    """Budgets graphs are captured at, see ``EngineOptions``, as the two that follow. Empty: every budget."""
    graph_memory_gib: float = EngineOptions.graph_memory_gib
    uncaptured_k: str = EngineOptions.uncaptured_k
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    record_steps: bool = False
    """Engines keep a record of every step, the device's times included, until it is drained."""
    decisions: str = ""
    """Folder to record every view and plan in; empty: none."""
    further: Sequence[str] = ()
    """Further arguments of ``vllm serve``; they win over the ones above, save ``--additional-config``, which adds."""

    def check_devices(self) -> None:
        """Make sure that every engine gets a card of its own, where there are cards.

        Raises:
            UsageError: more engines than cards.
        """
        gpus = visible_gpus()
        if gpus and self.num_ranks > len(gpus):
            raise UsageError(f"--replicas is {self.num_ranks}; this machine shows {len(gpus)} GPU(s), one a replica")

    def check_policy(self, prefill_s: Callable[[int, int], float]) -> None:
        """Build both policies once, and read of them what the engines will in minutes.

        Raises:
            UsageError, PolicyError: one cannot be built for this deployment, or asks for a budget it does not have.
        """
        context = PolicyContext(
            prefill_s=prefill_s,
            k_min=1,
            k_max=self.k_max,
            num_ranks=self.num_ranks,
            max_num_seqs=self.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
            max_num_batched_tokens=self.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS,
        )
        policy, asker = self.choice.batch(context), Asker(context)
        asker.orders_queue(policy)
        asker.k_floor(policy)
        self.choice.route(context)

    def check_options(self) -> None:
        """Read simmoe's own options once, as the engines will in minutes.

        Raises:
            UsageError: a further ``--additional-config`` contradicts them.
            LiveError: one does not exist or is outside its range.
        """
        config, _ = self._additional_config(0)
        EngineOptions(k_max=self.k_max, **read_options(EngineOptions, CONFIG_KEY, config[CONFIG_KEY]))
        PolicyOptions.given(config[POLICY_KEY])

    @property
    def captures_graphs(self) -> bool:
        """Whether the engines are to capture CUDA graphs; how many, their memory decides."""
        return "--enforce-eager" not in self.arguments(0)

    def recordings(self) -> list[Path]:
        """Return where the engines record what their policies see and answer; none: they do not."""
        return [self._recording(rank) for rank in range(self.num_ranks)] if self.decisions else []

    def arguments(self, rank: int) -> list[str]:
        """Return the arguments of ``vllm serve`` for one engine, the model left out.

        Raises:
            UsageError: a further ``--additional-config`` contradicts the fields.
        """
        is_gpu = bool(visible_gpus())
        is_async = is_gpu and "--no-async-scheduling" not in self.further
        scheduler = f"simmoe.live.engine.policy_host.{'Async' * is_async}PolicyScheduler"
        arguments = ["--scheduler-cls", scheduler, "--no-enable-prefix-caching"]
        if is_gpu and self.graphs != "none":
            if self.graphs == "keyed":
                limit = self.max_num_batched_tokens or CAPTURED_SIZES[-1]
                sizes = [size for size in CAPTURED_SIZES if size <= limit]
                graphs = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
                arguments += ["--compilation-config", json.dumps(graphs)]
        else:
            arguments.append("--enforce-eager")
        if self.record_steps:
            arguments += ["--worker-cls", "simmoe.live.engine.timed_worker.TimedWorker"]
        config, further = self._additional_config(rank)
        arguments += [FLAG, json.dumps(config)]
        if self.max_num_seqs is not None:
            arguments += ["--max-num-seqs", str(self.max_num_seqs)]
        if self.max_num_batched_tokens is not None:
            arguments += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        return [*arguments, *further]

    def _additional_config(self, rank: int) -> tuple[dict[str, Any], list[str]]:
        """Return simmoe's options with what is given besides, and the other further arguments."""
        options = {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in ("default_k", "captured_ks", "graph_memory_gib", "uncaptured_k", "record_steps")
            if getattr(self, name) != getattr(EngineLaunch, name)
        }
        policy = self.policy_options(rank, self.choice, self.num_ranks)
        return with_given({CONFIG_KEY: options, POLICY_KEY: policy}, self.further)

    def policy_options(self, rank: int, choice: PolicyChoice, num_ranks: int) -> dict[str, Any]:
        """Return how one engine is to host the batch part of a policy, as ``PolicyOptions`` are given.

        Args:
            rank: the engine.
            choice: the policy.
            num_ranks: engines that serve under it.
        """
        options = {"policy": choice.batch_part.text, "profile": self.profile, "num_ranks": num_ranks, "dp_rank": rank}
        if self.decisions:
            options["decisions"] = str(self._recording(rank))
        return options

    def _recording(self, rank: int) -> Path:
        return Path(self.decisions) / f"decisions-rank{rank}.jsonl"

    def command(self, rank: int, uds: str) -> list[str]:
        """Return the command that starts one engine's server, to listen on a Unix socket."""
        program = [sys.executable, "-m", "simmoe.live.server.engine_process", "--model", str(self.model), "--uds", uds]
        return [*program, "--middleware", "simmoe.live.server.state.StateEndpoint", *self.arguments(rank)]

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of one engine's process; the endpoint before it asks for keys, so it does not."""
        return {**os.environ, **self._device(rank), "VLLM_API_KEY": ""}

    def described(self) -> dict[str, Any]:
        """Return model, policy, profile, flags and versions under their names in a run's manifest."""
        profile = None
        if self.profile:
            loaded = load_profile(self.profile)
            profile = {"name": self.profile, "status": loaded.status, "sha256": loaded.sha256}
        return {
            "target": {"model": self.model.name, "weights": weights_served(self.arguments(0))},
            "policy": described_policy(self.choice),
            "profile": profile,
            "flags": self.arguments(0),
            "versions": live_versions(),
        }

    async def warm_up(self, address: Address, facts: Mapping[str, Any]) -> None:
        """Have an engine run each budget and size of a step, see :func:`simmoe.live.server.warm_up.warm_up`."""
        await warm_up(address, facts, is_gpu=bool(visible_gpus()))

    def _device(self, rank: int) -> Mapping[str, str]:
        gpus = visible_gpus()
        if gpus:
            return {"CUDA_VISIBLE_DEVICES": gpus[rank]}
        # several engines share the cores: none of them may pin its threads, or all pin the same ones
        threads = max(1, len(os.sched_getaffinity(0)) // self.num_ranks)
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}

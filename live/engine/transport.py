"""How a budget travels: request -> scheduler -> worker, on carriers vLLM already has.

A request carries k in ``SamplingParams.extra_args[K_ARG]`` (over HTTP: ``vllm_xargs``); the field crosses every process
boundary of vLLM by itself. A step carries its k as an attribute of ``SchedulerOutput``, which travels by reference in
one process and is pickled between several; under asynchronous scheduling k thus stays with its own step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.engine.options import read_options
from simmoe.profiles.shape import UNCAPTURED

K_ARG = "simmoe_k"
"""Key of a request's budget in ``SamplingParams.extra_args``."""

_K_RUNNING = "simmoe_k_running"

CONFIG_KEY = "simmoe"
"""Key of simmoe's options in vLLM's ``additional_config``."""


@dataclass(frozen=True)
class EngineOptions:
    """simmoe's own options of one engine, from ``additional_config={"simmoe": {...}}``.

    Raises:
        LiveError: an option that does not exist or is outside its range.
    """

    k_max: int
    """The model's ``num_experts_per_tok``: the largest budget, and the one vLLM sizes its workspaces for."""
    default_k: int = 0
    """Budget of a request that names none; 0 means ``k_max``."""
    captured_ks: tuple[int, ...] = ()
    """Budgets CUDA graphs are captured at, ascending; the last must be ``k_max``. Empty: every budget."""
    graph_memory_gib: float = 0.0
    """Memory the graphs may take, GiB: the largest budgets are captured, as far as it goes. 0: a share of what is
    left, see ``graph_memory``."""
    uncaptured_k: str = "eager"
    """How a step runs at a budget without graphs: one of UNCAPTURED."""
    record_steps: bool = False
    """Keep a record of every step until it is drained."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "default_k", self.default_k or self.k_max)
        ks = self.captured_ks or tuple(range(1, self.k_max + 1))
        object.__setattr__(self, "captured_ks", ks)
        if not 1 <= self.default_k <= self.k_max:
            raise LiveError(f"default_k is {self.default_k}; this model takes 1 to {self.k_max}")
        if list(ks) != sorted(set(ks)) or ks[0] < 1 or ks[-1] != self.k_max:
            raise LiveError(f"captured_ks is {list(ks)}; it must ascend from at least 1 to the model's {self.k_max}")
        if not 0 <= self.graph_memory_gib < math.inf:
            raise LiveError(f"graph_memory_gib is {self.graph_memory_gib}; it must be at least 0 and finite")
        if self.uncaptured_k not in UNCAPTURED:
            raise LiveError(f"uncaptured_k is '{self.uncaptured_k}'; it must be one of {', '.join(UNCAPTURED)}")

    @classmethod
    def of(cls, vllm_config: Any) -> EngineOptions:
        """Return the options of a ``VllmConfig``."""
        given = (vllm_config.additional_config or {}).get(CONFIG_KEY, {})
        return cls(k_max=model_k_max(vllm_config), **read_options(cls, CONFIG_KEY, given))


def model_k_max(vllm_config: Any) -> int:
    """Return the model's ``num_experts_per_tok``.

    Raises:
        LiveError: the model has no routed experts.
    """
    k_max = getattr(vllm_config.model_config.hf_text_config, "num_experts_per_tok", None)
    if not isinstance(k_max, int):
        raise LiveError(f"model '{vllm_config.model_config.model}' has no num_experts_per_tok: it is no MoE")
    return k_max


def request_k(sampling_params: Any, default_k: int) -> int:
    """Return a request's budget; ``default_k`` when it names none."""
    extra_args = sampling_params.extra_args if sampling_params is not None else None
    return extra_args.get(K_ARG, default_k) if extra_args else default_k


def tell_k_running(stats: Any, vllm_config: Any, k_running: int) -> None:
    """Put an engine's ``k_running`` into a step's ``SchedulerStats``, on its way to the front end.

    Only vLLM's own fields of them cross the process boundary. The one that counts LoRA adapters is empty in an engine
    that serves none, and nobody reads it there; an engine that serves some keeps it for them.
    """
    if vllm_config.lora_config is None:
        stats.running_lora_adapters[_K_RUNNING] = k_running


def told_k_running(stats: Any) -> int | None:
    """Return the ``k_running`` of a step's ``SchedulerStats``; None if its engine does not tell."""
    k_running: int | None = stats.running_lora_adapters.get(_K_RUNNING)
    return k_running


def install_validation() -> None:
    """Make vLLM's front end refuse a budget it would not follow (a 400 over HTTP). Idempotent.

    That is one which is no integer in 1..k_max, and any where the engine's scheduler is none of simmoe's.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor._validate_params
    if hasattr(original, "simmoe"):
        return

    def validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(params, SamplingParams) and K_ARG in (params.extra_args or {}):
            k = params.extra_args[K_ARG]
            try:
                k_max = model_k_max(self.vllm_config)
            except LiveError as error:
                raise VLLMValidationError(str(error), parameter=K_ARG, value=k) from None
            if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= k_max:
                message = f"{K_ARG} is {k!r}; it must be an integer from 1 to {k_max}"
                raise VLLMValidationError(message, parameter=K_ARG, value=k)
            if not follows_budgets(self.vllm_config):
                message = (
                    f"{K_ARG} is {k}, but this engine runs all at {k_max}: its --scheduler-cls is none of simmoe's"
                )
                raise VLLMValidationError(message, parameter=K_ARG, value=k)
        return original(self, params, *args, **kwargs)

    validate_params.simmoe = True  # type: ignore[attr-defined]
    InputProcessor._validate_params = validate_params


def follows_budgets(vllm_config: Any) -> bool:
    """Return whether an engine's scheduler sets the budget of its steps; the plug-in leaves any other as it is."""
    from simmoe.live.engine.scheduler import BudgetMixin

    return issubclass(vllm_config.scheduler_config.get_scheduler_cls(), BudgetMixin)

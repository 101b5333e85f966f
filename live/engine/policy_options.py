"""Which batch policy an engine hosts, from vLLM's configuration, which reaches every process of the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from simmoe.errors import LiveError, UsageError
from simmoe.live.engine.options import read_options
from simmoe.live.engine.provenance import Provenance
from simmoe.policies.protocols import BatchPolicy, PolicyContext
from simmoe.policies.registry import parse_policy

POLICY_KEY = "simmoe_policy"
"""Key of these options in vLLM's ``additional_config``."""


@dataclass(frozen=True)
class PolicyOptions:
    """Options of one engine, from ``additional_config={"simmoe_policy": {...}}``.

    Raises:
        LiveError: an option that does not exist or is outside its range.
    """

    policy: str = "fifo"
    """As ``simmoe run --policy`` takes it; a route policy in it is the front end's business."""
    profile: str = ""
    """Step-cost table that T(n, k) comes from, by name or path; a policy that asks for T needs it."""
    num_ranks: int = 1
    """Engines of the deployment."""
    dp_rank: int = 0
    """Which of them this one is."""
    decisions: str = ""
    """File to record every view and plan in; empty records none. One of an earlier engine's is set aside."""
    evidence: str = ""
    """Folder for the view a policy fails on; empty: the system's folder for temporary files."""

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.num_ranks:
            raise LiveError(f"dp_rank is {self.dp_rank}; with num_ranks {self.num_ranks} it must be below it, from 0")

    @classmethod
    def of(cls, vllm_config: Any) -> PolicyOptions:
        """Return the options of a ``VllmConfig``."""
        return cls.given((vllm_config.additional_config or {}).get(POLICY_KEY, {}))

    @classmethod
    def given(cls, options: Mapping[str, Any]) -> PolicyOptions:
        """Return the options that a mapping names."""
        return cls(**read_options(cls, POLICY_KEY, options))

    @property
    def evidence_path(self) -> Path:
        """Where the view of a failed call goes."""
        return Path(self.evidence or tempfile.gettempdir()) / f"policy_call-rank{self.dp_rank}.json"

    @property
    def provenance(self) -> Provenance:
        """What the batch policy's plans depend on beside its views."""
        return Provenance.of(parse_policy(self.policy).batch_part, self.profile)

    def context(self, vllm_config: Any, k_max: int) -> PolicyContext:
        """Return the deployment as its policies are told."""
        scheduler = vllm_config.scheduler_config
        return PolicyContext(
            prefill_s=self._prefill_s(bool(scheduler.async_scheduling)),
            k_min=1,
            k_max=k_max,
            num_ranks=self.num_ranks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            enable_chunked_prefill=bool(scheduler.enable_chunked_prefill),
        )

    def build(self, context: PolicyContext) -> BatchPolicy:
        """Return the policy.

        Raises:
            UsageError, PolicyError: it cannot be found or built.
            LiveError: it is clairvoyant.
        """
        choice = parse_policy(self.policy)
        if choice.clairvoyant:
            raise LiveError(f"policy '{self.policy}' is clairvoyant: it needs output lengths, which no engine knows")
        return choice.batch(context)

    def _prefill_s(self, async_scheduling: bool) -> Callable[[int, int], float]:
        if not self.profile:
            return _no_profile
        from simmoe.profiles.catalog import load_profile

        return load_profile(self.profile).cost(async_scheduling).prefill_s


def _no_profile(num_tokens: int, k: int) -> NoReturn:
    raise UsageError(f"the policy asks for T({num_tokens}, {k}); give the engine a profile: {POLICY_KEY}['profile']")

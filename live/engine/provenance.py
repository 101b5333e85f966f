"""What a policy's answers depend on beside what it is shown: recorded, so that an unequal replay can say why."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from simmoe import __version__
from simmoe.policies.registry import PolicyPart


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a policy's answers depend on, beside what it is shown: a replay is sure to be equal only with the same."""

    simmoe: str
    """The version."""
    policy: str
    """One policy with its parameters, as the host was given it."""
    policy_sha256: str
    """Of the file its class is in."""
    profile: str
    """Where T(n, k) came from; empty: nowhere."""
    profile_sha256: str

    @classmethod
    def of(cls, part: PolicyPart, profile: str) -> Provenance:
        """Return what a policy built here, with T(n, k) of a profile, depends on.

        Raises:
            PolicyError: the policy cannot be loaded.
            UsageError, ProfileError: nor the profile.
        """
        sha256 = ""
        if profile:
            from simmoe.profiles.catalog import load_profile

            sha256 = load_profile(profile).sha256
        return cls(__version__, part.text, part.sha256 or _file_sha256(part.load()), profile, sha256)

    def against(self, now: Provenance) -> str:
        """Return in words what of this differs from ``now``."""
        told = []
        if self.policy_sha256 != now.policy_sha256:
            told.append(f"the policy's file is another ({_digests(self.policy_sha256, now.policy_sha256)})")
        elif (given := self.policy.partition(",")[2]) != now.policy.partition(",")[2]:
            told.append(f"the policy's parameters were '{given}'")
        if self.profile_sha256 != now.profile_sha256:
            digests = _digests(self.profile_sha256, now.profile_sha256)
            told.append(f"the profile '{self.profile}' is another ({digests}); --profile takes the recorded one")
        if self.simmoe != now.simmoe:
            told.append(f"simmoe was {self.simmoe}, now {now.simmoe}")
        return "; ".join(told) or "policy, profile and simmoe are the recorded ones"


def _file_sha256(cls: type) -> str:
    """Return the hash of the file a class is in; empty if there is none."""
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _digests(recorded: str, now: str) -> str:
    return f"sha256 {recorded[:12] or 'none'}, now {now[:12] or 'none'}"

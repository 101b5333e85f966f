"""Traces known by name: their files, publishers, licences and checksums, and where a file is looked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from simmoe.errors import UsageError, did_you_mean

DATA_VARIABLE = "SIMMOE_DATA"

#: The filter of MoE-Prism, section IV-B.
PAPER_TOTAL_TOKENS = (1024, 2048)

_CC_BY = "CC-BY 4.0"
_SPLITWISE = "Patel et al., Splitwise, ISCA 2024"
_DYNAMOLLM = "Stojkovic et al., DynamoLLM, HPCA 2025"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One published file."""

    file_name: str
    """What ``simmoe traces fetch`` saves it as."""
    aliases: tuple[str, ...]
    """Further names it is found under."""
    url: str
    sha256: str | None
    """Of the published bytes; None where no checksum is known."""
    license: str
    citation: str


@dataclass(frozen=True, slots=True)
class NamedTrace:
    """A name that ``--trace`` takes."""

    name: str
    file: TraceFile
    about: str
    total_tokens: tuple[int, int] | None = None
    """Rows kept, by prompt + output tokens, bounds included; None: all."""
    has_summary: bool = False
    """Whether the package ships a summary of the lengths to fall back to."""


_AZURE_2023 = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
_AZURE_2024 = "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace/"

CONV_2023 = TraceFile(
    "AzureLLMInferenceTrace_conv.csv",
    (),
    _AZURE_2023 + "AzureLLMInferenceTrace_conv.csv",
    "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    _CC_BY,
    _SPLITWISE,
)
CODE_2023 = TraceFile(
    "AzureLLMInferenceTrace_code.csv",
    (),
    _AZURE_2023 + "AzureLLMInferenceTrace_code.csv",
    "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    _CC_BY,
    _SPLITWISE,
)
CONV_2024 = TraceFile(
    "AzureLLMInferenceTrace_conv_1week.csv",
    (),
    _AZURE_2024 + "AzureLLMInferenceTrace_conv_1week.csv",
    None,
    _CC_BY,
    _DYNAMOLLM,
)
CODE_2024 = TraceFile(
    "AzureLLMInferenceTrace_code_1week.csv",
    (),
    _AZURE_2024 + "AzureLLMInferenceTrace_code_1week.csv",
    None,
    _CC_BY,
    _DYNAMOLLM,
)
MOONCAKE = TraceFile(
    "mooncake_conversation_trace.jsonl",
    ("conversation_trace.jsonl",),
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl",
    "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    "Apache-2.0",
    "Qin et al., Mooncake, FAST 2025",
)
BURSTGPT = TraceFile(
    "BurstGPT_1.csv",
    ("BurstGPT_without_fails_1.csv",),
    "https://github.com/HPMLL/BurstGPT/releases/download/v1.1/BurstGPT_1.csv",
    "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
    "see github.com/HPMLL/BurstGPT",
    "Wang et al., BurstGPT, KDD 2025",
)

TRACES: dict[str, NamedTrace] = {
    trace.name: trace
    for trace in (
        NamedTrace(
            "azure",
            CONV_2023,
            "Azure 2023 conversations of 1024..2048 total tokens (MoE-Prism's filter)",
            PAPER_TOTAL_TOKENS,
            has_summary=True,
        ),
        NamedTrace("azure-conv", CONV_2023, "Azure 2023 conversations, one hour"),
        NamedTrace("azure-code", CODE_2023, "Azure 2023 code completion, one hour"),
        NamedTrace(
            "azure-2024",
            CONV_2024,
            "Azure 2024 conversations of 1024..2048 total tokens (the year MoE-Prism used)",
            PAPER_TOTAL_TOKENS,
        ),
        NamedTrace("azure-2024-conv", CONV_2024, "Azure 2024 conversations, one week"),
        NamedTrace("azure-2024-code", CODE_2024, "Azure 2024 code completion, one week"),
        NamedTrace("mooncake", MOONCAKE, "Mooncake conversations with prefix hash ids, one hour"),
        NamedTrace("burstgpt", BURSTGPT, "BurstGPT ChatGPT and GPT-4 requests, two months"),
    )
}


def cache_dir() -> Path:
    """Return the user cache, ``$XDG_CACHE_HOME/simmoe`` or ``~/.cache/simmoe``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "simmoe"


def search_dirs() -> list[Path]:
    """Return the folders a named trace is looked for in, first found wins.

    Raises:
        UsageError: $SIMMOE_DATA is set to something that is no folder.
    """
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        return [cache_dir()]
    if not Path(named).is_dir():
        raise UsageError(
            f"${DATA_VARIABLE} is '{named}', which is no folder; set it to one that holds traces, or unset it"
        )
    return [Path(named), cache_dir()]


def find(file: TraceFile) -> Path | None:
    """Return where a published file lies on this machine, plain or gzipped; None if it does not."""
    for folder in search_dirs():
        for name in (file.file_name, *file.aliases):
            for candidate in (folder / name, folder / f"{name}.gz"):
                if candidate.is_file():
                    return candidate
    return None


def resolve(trace: str) -> tuple[NamedTrace | None, Path | None]:
    """Return what ``--trace`` means: the named trace or None for a path, and its file or None for the shipped summary.

    Raises:
        UsageError: neither a known name nor a file, or the named trace's file is not on this machine.
    """
    named = TRACES.get(trace)
    if named is None:
        path = Path(trace)
        if path.is_file():
            return None, path
        if path.exists():
            raise UsageError(f"trace '{trace}' is not a file; give a file, or a name of 'simmoe traces list'")
        raise UsageError(f"no trace or file '{trace}'{did_you_mean(trace, TRACES)}; see 'simmoe traces list'")
    path_found = find(named.file)
    if path_found is None and not named.has_summary:
        looked = ", ".join(f"'{folder}'" for folder in search_dirs())
        raise UsageError(
            f"trace '{trace}' needs {named.file.file_name}, which is not in {looked}; "
            f"run 'simmoe traces fetch {trace}', or set ${DATA_VARIABLE} to a folder that has it"
        )
    return named, path_found

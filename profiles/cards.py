"""Cards by their datasheets: what a roofline estimate knows of a card that is not at hand."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from simmoe.errors import UsageError


@dataclass(frozen=True, slots=True)
class Card:
    """One card. Rates are peaks its maker states, without sparsity."""

    name: str
    """As simmoe calls it."""
    driver_name: str
    """As the driver names it, in a table's provenance."""
    bf16_flop_s: float
    """Dense bf16 matrix products accumulated in fp32."""
    memory_byte_s: float
    memory_bytes: float
    num_sms: int
    """Streaming multiprocessors; compute units on AMD's."""
    source: str
    """The datasheet the numbers are from."""


_GIB = 2**30

CARDS = {
    card.name: card
    for card in (
        Card(
            "a100-80gb", "NVIDIA A100-SXM4-80GB", 312e12, 2.039e12, 80 * _GIB, 108,
            "NVIDIA A100 GPU datasheet (June 2021): 312 TFLOPS BF16, 2,039 GB/s, 80GB SXM",
        ),
        Card(
            "h100", "NVIDIA H100 80GB HBM3", 989.4e12, 3.35e12, 80 * _GIB, 132,
            "NVIDIA H100 GPU datasheet: SXM, 1,979 TFLOPS BF16 with sparsity, half without; 3.35 TB/s, 80GB",
        ),
        Card(
            "h800", "NVIDIA H800", 989.4e12, 3.35e12, 80 * _GIB, 132,
            "NVIDIA H800 GPU datasheet: SXM, 1,979 TFLOPS BF16 with sparsity, half without; 3.35 TB/s, 80GB",
        ),
        Card(
            "h200", "NVIDIA H200", 989.4e12, 4.8e12, 141 * _GIB, 132,
            "NVIDIA H200 GPU datasheet: SXM, 1,979 TFLOPS BF16 with sparsity, half without; 4.8 TB/s, 141GB",
        ),
        Card(
            "rtx-a6000", "NVIDIA RTX A6000", 154.8e12, 768e9, 48 * _GIB, 84,
            "NVIDIA RTX A6000 datasheet: 309.7 TFLOPS tensor performance with sparsity, half without; 768 GB/s, 48 GB; "
            "NVIDIA Ampere GA102 whitepaper: 84 SMs",
        ),
        Card(
            "l40s", "NVIDIA L40S", 362.05e12, 864e9, 48 * _GIB, 142,
            "NVIDIA L40S datasheet: 362.05 TFLOPS BF16 (733 with sparsity), 864 GB/s, 48GB; 142 SMs",
        ),
        Card(
            "rtx-4090", "NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12, 24 * _GIB, 128,
            "NVIDIA Ada GPU architecture whitepaper, appendix A: 165.2 TFLOPS BF16 with FP32 accumulate, 1,008 GB/s, "
            "24 GB, 128 SMs",
        ),
        Card(
            "mi300x", "AMD Instinct MI300X", 1307.4e12, 5.3e12, 192 * _GIB, 304,
            "AMD Instinct MI300X accelerator data sheet: 1,307.4 TFLOPS bfloat16, 5.3 TB/s, 192 GB, 304 compute units",
        ),
    )
}  # fmt: skip


def card_named(name: str) -> Card:
    """Return a card by simmoe's name or the driver's, whatever the case.

    Raises:
        UsageError: no such card; lists those known.
    """
    plain = name.lower().replace(" ", "-").replace("_", "-")
    for card in CARDS.values():
        if plain in (card.name, card.driver_name.lower().replace(" ", "-")):
            return card
    within = [known for known in CARDS if plain and plain in known]
    near = within or difflib.get_close_matches(plain, CARDS, n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise UsageError(f"no card '{name}'{hint}; known: {', '.join(CARDS)}")

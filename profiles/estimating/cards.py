"""Cards by their datasheets: what a roofline estimate knows of a card that is not at hand.

Each rate was compared with transcriptions of the datasheet or whitepaper named (not with the maker's PDF itself), and
agrees with units x operations a clock x boost clock, or with bus width x data rate, but where ``source`` says
otherwise. Of the H800 no datasheet was found. Memory is what the driver reports as total, which is what an engine's
share is taken of: a little less than the datasheet's gigabytes where ECC or the firmware keep some.
"""

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
    """All of it, as the driver reports it."""
    num_sms: int
    """Streaming multiprocessors; compute units on AMD's."""
    link_byte_s: float
    """From one card to another of the same machine, one way."""
    source: str
    """The datasheet the numbers are from."""


_MIB = 2**20

CARDS = {
    card.name: card
    for card in (
        Card(
            "a100-80gb", "NVIDIA A100-SXM4-80GB", 312e12, 2.039e12, 81920 * _MIB, 108, 300e9,
            "NVIDIA A100 datasheet (June 2021), A100 80GB SXM: 312 TFLOPS BF16 (624 with sparsity), 2,039 GB/s, "
            "NVLink 600 GB/s both ways; the PCIe card has 1,935 GB/s. NVIDIA A100 whitepaper: 108 SMs, boost 1,410 "
            "MHz",
        ),
        Card(
            "h100", "NVIDIA H100 80GB HBM3", 989.4e12, 3.35e12, 81559 * _MIB, 132, 450e9,
            "NVIDIA H100 datasheet, H100 SXM: 1,979 TFLOPS BF16 with sparsity, half without, 3.35 TB/s, 80GB, NVLink "
            "900 GB/s both ways. NVIDIA H100 whitepaper: 989.4 TFLOPS dense, 132 SMs",
        ),
        Card(
            "h800", "NVIDIA H800", 989.4e12, 3.35e12, 81559 * _MIB, 132, 200e9,
            "no datasheet found: taken as the H100 SXM, from which it is reported to differ in NVLink (400 GB/s both "
            "ways) and FP64 alone",
        ),
        Card(
            "h200", "NVIDIA H200", 989.4e12, 4.8e12, 143771 * _MIB, 132, 450e9,
            "NVIDIA H200 datasheet, H200 SXM: 1,979 TFLOPS BF16 with sparsity, half without, 4.8 TB/s, 141GB, NVLink "
            "900 GB/s both ways; the GH100 of the H100 SXM: 132 SMs",
        ),
        Card(
            "rtx-a6000", "NVIDIA RTX A6000", 154.8e12, 768e9, 49140 * _MIB, 84, 56.25e9,
            "NVIDIA RTX A6000 datasheet: 309.7 TFLOPS tensor performance with sparsity, half without, 768 GB/s, 48 GB"
            " (ECC off, as shipped), NVLink bridge 112.5 GB/s both ways. NVIDIA Ampere GA102 whitepaper V2.0, "
            "appendix C: 84 SMs, boost 1,800 MHz",
        ),
        Card(
            "l40s", "NVIDIA L40S", 362.05e12, 864e9, 46068 * _MIB, 142, 32e9,
            "NVIDIA L40S datasheet: 362.05 TFLOPS BF16 (733 with sparsity, half of which is 366.5, as 142 SMs at "
            "2,520 MHz make), 864 GB/s, 48GB, of which ECC keeps a sixteenth, PCIe 4.0 x16: 64 GB/s both ways",
        ),
        Card(
            "rtx-4090", "NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12, 24564 * _MIB, 128, 32e9,
            "NVIDIA Ada GPU architecture whitepaper V2, appendix A: 165.2 TFLOPS BF16 with FP32 accumulate, 1,008 "
            "GB/s, 24 GB, 128 SMs, boost 2,520 MHz; PCIe 4.0 x16 (GeForce cards reach each other through the host's "
            "memory)",
        ),
        Card(
            "mi300x", "AMD Instinct MI300X", 1307.4e12, 5.3e12, 206_141_652_992, 304, 64e9,
            "AMD Instinct MI300X data sheet: 1,307.4 TFLOPS bfloat16 (2,614.9 with sparsity), 5.3 TB/s, 192 GB, 304 "
            "compute units, 2,100 MHz, 128 GB/s both ways to each of seven others",
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

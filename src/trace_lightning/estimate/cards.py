"""What a GPU can do: memory, bandwidth and BF16 rate, measured for one card and read off data sheets for the rest.

Shares of speed (speed.py) refer to *measured* limits, which a data sheet does not give. The H200's measured ones are
.89 of its data sheet's bandwidth (4.8 TB/s) and .79 of its dense BF16 rate (989 TFLOP/s); the other cards are assumed
to reach the same shares. What was left out: FP4 and FP8 matmul rates, since the engine multiplies in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_lightning.bench.roofline import Limits
from trace_lightning.bench.shapes import lookup

_BANDWIDTH_SHARE, _RATE_SHARE = 4.29 / 4.8, 785 / 989


@dataclass(frozen=True)
class Card:
    """Usable memory in bytes, the limits that the estimate reckons with, and where they come from."""

    name: str
    memory: float
    limits: Limits
    source: str


def _from_sheet(name: str, memory_gib: float, bandwidth_tbs: float, bf16_tflops: float) -> Card:
    limits = Limits(bandwidth_tbs * 1e12 * _BANDWIDTH_SHARE, bf16_tflops * 1e12 * _RATE_SHARE)
    return Card(name, memory_gib * 2**30, limits, "data sheet, times the H200's measured share of its own")


# Measured: docs/results/h200.md. Data sheets: NVIDIA H100 SXM5 (3.35 TB/s, 989 TFLOP/s dense), A100 80 GB SXM
# (2.039 TB/s, 312), HGX B200 (8 TB/s, 2250), RTX Blackwell white paper for the 5090 (1.792 TB/s, 209.5 with FP32
# accumulation). A card sold with n GB shows about n GiB less one.
CARDS = {
    card.name: card
    for card in (
        Card("h200", 139 * 2**30, Limits(4.29e12, 785e12), "measured (docs/results/h200.md)"),
        _from_sheet("h100", 79, 3.35, 989),
        _from_sheet("a100", 79, 2.039, 312),
        _from_sheet("b200", 178, 8.0, 2250),
        _from_sheet("rtx5090", 31, 1.792, 209.5),
    )
}


def find_card(
    name: str, memory_gb: float | None = None, bandwidth_tbs: float | None = None, bf16_tflops: float | None = None
) -> Card:
    """The card called `name`, with what is given taken instead of the table's: 1e9 bytes, 1e12 bytes/s, 1e12 op/s.

    With all three given the name may be any. Numbers given are taken as reached, not as a data sheet's.

    Raises:
        ValueError: an unknown card, with near matches and the options that describe one, or a number not above 0.
    """
    given = {"memory_gb": memory_gb, "bandwidth_tbs": bandwidth_tbs, "bf16_tflops": bf16_tflops}
    for option, value in given.items():
        if value is not None and value <= 0:
            raise ValueError(f"--{option} {value:g} must be above 0")
    if memory_gb is not None and bandwidth_tbs is not None and bf16_tflops is not None:
        label = name if name not in CARDS else "a card as given"
        return Card(label, memory_gb * 1e9, Limits(bandwidth_tbs * 1e12, bf16_tflops * 1e12), "as given")
    try:
        card = CARDS[lookup("card", name, CARDS)]
    except ValueError as error:
        flags = ", ".join(f"--{option}" for option in given)
        raise ValueError(f"{error}; or describe yours by {flags}, all three") from None
    changed = [option for option, value in given.items() if value is not None]
    limits = Limits(
        card.limits.bandwidth if bandwidth_tbs is None else bandwidth_tbs * 1e12,
        card.limits.matmul_rate if bf16_tflops is None else bf16_tflops * 1e12,
    )
    source = card.source + (f"; given: {', '.join(changed)}" if changed else "")
    return Card(name, card.memory if memory_gb is None else memory_gb * 1e9, limits, source)

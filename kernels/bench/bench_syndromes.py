"""What syndromes cost: taking them of the rows that a rollout stores, and finding the bits again in the trainer.

    python kernels/bench/bench_syndromes.py [--json PATH]

Bits found are compared with those recorded first. Decoding is told in milliseconds per micro-batch and site, and as a
multiple of rounding along the bits (`round_values`), which follows it; its own parts are timed apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from bench_round_values import SITES, TOKENS, guide_of
from timing import Report, graph_time

from trace_kernels import get_format
from trace_kernels.cheapest_flips import cheapest_flips
from trace_kernels.round_values import round_values
from trace_kernels.syndrome_decode import decode_bits, guide_by_bits
from trace_kernels.syndromes import encode


def bench(report: Report, site: str, shape: tuple[int, ...]) -> None:
    """One site: equal bits, and milliseconds."""
    fmt: Any = get_format("nvfp4")
    x = torch.randn(TOKENS, *shape, device="cuda", dtype=torch.bfloat16)
    outer = torch.full((shape[0], 1), 2.0**-6, device="cuda") if len(shape) == 2 else None
    guide = guide_of(x, fmt, outer)
    bits = guide.codes.flatten(1)
    width = 8 * bits.shape[1]
    syndromes = replace(guide, codes=encode(bits, width), syndrome=True)
    found = decode_bits(x, syndromes, fmt).flatten(1)
    wrong = (found != bits[guide.row]).float().mean().item()
    print(f"{site}: {wrong:.2e} of the bytes differ from the record's (the noise here is 1 %)")
    rounding = graph_time(lambda: round_values(x, fmt, outer, guide=guide))
    decoding = graph_time(lambda: guide_by_bits(syndromes, decode_bits(x, syndromes, fmt)))
    cost, target = torch.rand(TOKENS, width, device="cuda"), syndromes.codes
    report.add(f"{site}, decode", decoding * 1e3, "ms")
    report.add(f"{site}, decode against rounding along bits", decoding / rounding, "x")
    report.add(f"{site}, cheapest flips alone", graph_time(lambda: cheapest_flips(cost, target)) * 1e3, "ms")
    report.add(f"{site}, encode", graph_time(lambda: encode(bits, width)) * 1e3, "ms")


def main() -> None:
    """All sites of the 1.7B shape."""
    torch.manual_seed(0)
    report = Report(__doc__.splitlines()[0])
    for site, shape in SITES.items():
        bench(report, site, shape)
    report.save()


if __name__ == "__main__":
    main()

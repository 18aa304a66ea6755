"""The trainer's rounding: inputs of linears and K, V of one micro-batch, guided and to the nearest, and weights.

    python kernels/bench/bench_round_values.py [--json PATH]

Values are compared with the torch reference first. Bytes that must move (the tensor in, its values out, the record's
part) are held against the copy bandwidth of the same GPU, and seconds against the reference in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from timing import Report, copy_bandwidth, graph_time
from torch import Tensor
from triton.testing import do_bench

from trace_kernels import get_format, pack_bits
from trace_kernels.round_values import Guide, round_in_torch, round_values

TOKENS = 16384  # a micro-batch
SITES = {"attn_in": (2048,), "down_in": (6144,), "k": (8, 128)}  # of the 1.7B shape
WEIGHTS = (12288, 2048)
COPIES = 4  # in turn, to miss the L2 cache


def guide_of(x: Tensor, fmt: Any, outer: Tensor | None) -> Guide:
    """A record of other values near `x`, every token a row of it, in another order."""
    q = fmt.quantize(x * (1 + 0.01 * torch.randn_like(x)), outer)
    order = torch.randperm(len(x), device=x.device)
    per_token = x.dim() == 2
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(x), device=x.device))
    row_outer = None if q.outer is None else q.outer.squeeze(-1)[order] if per_token else q.outer.squeeze(-1)
    return Guide(place, q.scale[order].clone(), pack_bits(q.codes & 1)[order].clone(), row_outer, per_token)


def bench(report: Report, name: str, x: Tensor, fmt: Any, outer: Tensor | None, guide: Guide | None) -> None:
    """One way of rounding `x`: equal, and how fast."""
    settings: dict[str, Any] = {"guide": guide, "dtype": torch.bfloat16}
    expected = round_in_torch(x, fmt, outer, guide, torch.bfloat16)
    assert torch.equal(round_values(x, fmt, outer, **settings), expected), f"{name}: values differ"
    copies = [x.clone() for _ in range(COPIES)]
    seconds = graph_time(lambda: [round_values(copy, fmt, outer, **settings) for copy in copies]) / COPIES
    moved = x.nbytes + expected.nbytes + (0 if guide is None else guide.scale.nbytes + guide.codes.nbytes)
    report.add(f"{name}, share of copy bandwidth", moved / seconds / copy_bandwidth(), "")
    in_torch = do_bench(lambda: round_in_torch(x, fmt, outer, guide, torch.bfloat16), return_mode="median") * 1e-3
    report.add(f"{name}, against torch", in_torch / seconds, "x")


def main() -> None:
    """All ways."""
    torch.manual_seed(0)
    report = Report(__doc__.splitlines()[0])
    for word in ("nvfp4", "mxfp4"):
        fmt = get_format(word)
        assert fmt is not None
        for site, shape in SITES.items():
            x = torch.randn(TOKENS, *shape, device="cuda", dtype=torch.bfloat16)
            heads = torch.full((shape[0], 1), 2.0**-6, device="cuda")
            outer = heads if len(shape) == 2 and fmt.has_outer else None
            bench(report, f"{word} {site} nearest", x, fmt, outer, None)
            bench(report, f"{word} {site} guided", x, fmt, outer, guide_of(x, fmt, outer))
        w = torch.randn(WEIGHTS, device="cuda") * 0.02
        bench(report, f"{word} FP32 weights", w, fmt, fmt.outer_from_amax(w.abs().amax().reshape(1, 1)), None)
    report.save()


if __name__ == "__main__":
    main()

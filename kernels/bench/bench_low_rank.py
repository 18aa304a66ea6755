"""What adapters cost beside a packed base: unpacking a weight, the low-rank product, and both against their torch ways.

    python kernels/bench/bench_low_rank.py [--json PATH]

Unpacking is held against the copy bandwidth of the same GPU (9/16 byte read and 2 written per weight), the last step of
a linear against torch's sum, cast and `addmm`, and a decode linear with an adapter against the same one without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import Report, copy_bandwidth, graph_time
from torch import Tensor

from trace_kernels import get_format, linear, pack_codes
from trace_kernels.block_dequantize import dequantize_packed, dequantize_packed_reference
from trace_kernels.low_rank import expand, expand_reference

SHAPES = ((6144, 4096), (24576, 4096), (4096, 12288))  # qkv, gate_up and down of the 8B shape
RANK, COPIES = 32, 8  # copies in turn, to miss the L2 cache


def packed(rows: int, width: int, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and outer scale of a random weight."""
    fmt = get_format(name)
    assert fmt is not None
    w = torch.randn(rows, width, device="cuda") * 0.02
    q = fmt.quantize(w, fmt.outer_from_amax(w.abs().amax().view(1, 1)) if fmt.has_outer else None)
    return pack_codes(q.codes), q.scale, q.outer


def each(copies: list[Any], call: Callable[[Any], Tensor]) -> float:
    """Seconds of one call, over all copies in turn."""
    return graph_time(lambda: [call(copy) for copy in copies], rep=15) / len(copies)


def unpacking(report: Report, rows: int, width: int, name: str) -> None:
    """Bytes per second of `dequantize_packed`, once its values have been compared."""
    settings = {"width": width, "fmt": name, "dtype": torch.bfloat16}
    copies = [packed(rows, width, name) for _ in range(COPIES)]
    expected = dequantize_packed_reference(*copies[0], **settings)
    assert torch.equal(dequantize_packed(*copies[0], **settings), expected), f"{name}: values differ"
    seconds = each(copies, lambda weight: dequantize_packed(*weight, **settings))
    moved = sum(part.nbytes for part in copies[0] if part is not None) + expected.nbytes
    report.add(f"unpack {name} {rows}x{width}, share of copy bandwidth", moved / seconds / copy_bandwidth(), "")


def decode_step(report: Report, rows: int, width: int, tokens: int) -> None:
    """A linear of a decode step: its last step against torch's, and the whole with an adapter against without."""
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    xp = linear.permute_activations(x)
    a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in ((RANK, width), (rows, RANK)))
    copies = [packed(rows, width, "nvfp4") for _ in range(COPIES)]

    def base(weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return linear.fp4_linear_triton(xp, *weight, None, in_features=width, fmt="nvfp4")

    parts, hidden = base(copies[0]), F.linear(x, a)
    torch.testing.assert_close(expand(parts, hidden, b), expand_reference(parts, hidden, b), atol=2e-2, rtol=2e-2)
    ours = graph_time(lambda: [expand(parts, hidden, b) for _ in range(20)])
    torchs = graph_time(lambda: [expand_reference(parts, hidden, b) for _ in range(20)])
    report.add(f"last step {rows}x{width} rank {RANK} M={tokens} against torch", torchs / ours, "x")
    plain = each(copies, lambda weight: base(weight).sum(0).to(torch.bfloat16))
    adapted = each(copies, lambda weight: expand(base(weight), F.linear(x, a), b))
    report.add(f"decode linear {rows}x{width} M={tokens}, without an adapter against with", plain / adapted, "x")


def main() -> None:
    """Compare values, then measure."""
    torch.manual_seed(0)
    report = Report(__doc__.splitlines()[0])
    for rows, width in SHAPES:
        for name in ("nvfp4", "mxfp4"):
            unpacking(report, rows, width, name)
        for tokens in (8, 64):
            decode_step(report, rows, width, tokens)
    report.save()


if __name__ == "__main__":
    main()

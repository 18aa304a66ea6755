"""The trainer's norms, rotary embedding, rotation and gated activation on one micro-batch of a 1.7B model.

    python kernels/bench/bench_trainer.py [--json PATH]

Values and gradients are compared with the torch reference first. Bytes that must move (each input once, each result
once) are held against the copy bandwidth of the same GPU, and seconds against the reference under autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import Report, copy_bandwidth
from torch import Tensor
from triton.testing import do_bench

from trace_kernels.hadamard import rotate, rotate_reference
from trace_kernels.rms_norm import rms_norm, rms_norm_reference
from trace_kernels.rotary import rotary, rotary_reference
from trace_kernels.swiglu import swiglu, swiglu_reference

TOKENS, WIDTH, HEADS, HEAD_DIM, MLP_WIDTH, EPS = 16384, 2048, 16, 128, 6144, 1e-6
Function = Callable[..., Tensor]


def seconds(function: Callable[[], Any]) -> float:
    """Median; a tensor is larger than the L2 cache."""
    return 1e-3 * float(do_bench(function, return_mode="median"))


def bench(
    report: Report, name: str, ours: Function, reference: Function, leaves: list[Tensor], *rest: Any, kept: list[Tensor]
) -> None:
    """Both passes of one function of `leaves`, which take gradients; the backward pass reads what is `kept`, and dy."""
    for leaf in leaves:
        leaf.requires_grad_()
    y, expected = ours(*leaves, *rest), reference(*leaves, *rest)
    dy = torch.randn_like(y)
    for mine, theirs in zip(
        (y, *torch.autograd.grad(y, leaves, dy, retain_graph=True)),
        (expected, *torch.autograd.grad(expected, leaves, dy, retain_graph=True)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item(), msg=name)
    read = sum(tensor.nbytes for tensor in (*leaves, *rest) if isinstance(tensor, Tensor))
    back = sum(tensor.nbytes for tensor in (*kept, dy, *leaves))
    moved = {"forward": read + y.nbytes, "backward": back}
    forward = seconds(lambda: ours(*leaves, *rest)), seconds(lambda: reference(*leaves, *rest))
    backward = (
        seconds(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)),
        seconds(lambda: torch.autograd.grad(expected, leaves, dy, retain_graph=True)),
    )
    for way, (mine, theirs) in {"forward": forward, "backward": backward}.items():
        report.add(f"{name} {way} time", 1e6 * mine, "us")
        report.add(f"{name} {way}, share of copy bandwidth", moved[way] / mine / copy_bandwidth(), "")
        report.add(f"{name} {way}, against torch", theirs / mine, "x")


def torch_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Torch's own kernel, which is the same norm in FP32."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), gain, eps)


def main() -> None:
    """All of a layer."""
    torch.manual_seed(0)
    report, device = Report(__doc__.splitlines()[0]), "cuda"
    x, gain = torch.randn(TOKENS, WIDTH, device=device), torch.ones(WIDTH, device=device)
    bench(report, "norm", rms_norm, rms_norm_reference, [x, gain], EPS, kept=[x, gain])
    bench(report, "norm, F.rms_norm", torch_rms_norm, rms_norm_reference, [x, gain], EPS, kept=[x, gain])
    heads = torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=device)
    gain = torch.ones(HEAD_DIM, device=device)
    queries = heads.bfloat16()
    bench(report, "query norm", rms_norm, rms_norm_reference, [queries, gain], EPS, kept=[queries, gain])
    cos, sin = torch.randn(2, 1, TOKENS, HEAD_DIM, device=device)
    bench(report, "rotary", rotary, rotary_reference, [heads.transpose(1, 2).detach()], cos, sin, kept=[cos, sin])
    bench(report, "rotation", rotate, rotate_reference, [heads.transpose(1, 2).detach()], kept=[])
    gate, up = torch.randn(2, TOKENS, MLP_WIDTH, device=device, dtype=torch.bfloat16)
    bench(report, "gated activation", swiglu, swiglu_reference, [gate, up], kept=[gate, up])
    report.save()


if __name__ == "__main__":
    main()

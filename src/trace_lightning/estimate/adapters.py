"""What `model.lora` changes in the account: a frozen base, few trained parameters, and no weight gradients.

    rollout=adapter   linears in the recipe's format once, for both sides; the rest in BF16 once, where training is in
                      BF16; a matmul of many rows makes its BF16 weight for itself
    rollout=merged    linears in BF16 in the trainer, and the engine's usual snapshot

Counted of the low-rank products: bytes and operations. Assumed: three more kernels per fused linear of a decode step,
at 2 to 3 microseconds each; `examples/bench_lora.py` measures what they really cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trace_lightning.bench.roofline import bytes_per_element
from trace_lightning.bench.shapes import ModelShape

if TYPE_CHECKING:
    from trace_lightning.estimate.plan import Plan

_KERNELS, _KERNEL_SECONDS = 4 * 3, (2e-6, 3e-6)  # per layer: four fused linears; unpacking or arranging, two products


def groups(shape: ModelShape) -> list[tuple[int, int, int]]:
    """(inputs, outputs, members) of the fused linears of a layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        (shape.hidden, queries + 2 * keys, 3),
        (queries, shape.hidden, 1),
        (shape.hidden, 2 * shape.intermediate, 2),
        (shape.intermediate, shape.hidden, 1),
    ]


def adapter_params(shape: ModelShape, rank: int) -> int:
    """Numbers in A and B of all linears."""
    return shape.layers * rank * sum(members * width + rows for width, rows, members in groups(shape))


def rollout_adapter_bytes(plan: Plan) -> int:
    """The engine's BF16 copy: A of a group stacked, B on a block diagonal."""
    rank, shape = plan.lora_rank, plan.shape
    return 2 * shape.layers * rank * sum(members * (width + rows) for width, rows, members in groups(shape))


def base_bytes(plan: Plan) -> float:
    """The frozen linears where trainer and rollout share them, in the recipe's format."""
    return bytes_per_element(plan.recipe.weights) * plan.shape.linear_params


def largest_linear(shape: ModelShape) -> int:
    """Weights of the largest fused linear, which is unpacked as a whole."""
    return max(width * rows for width, rows, _ in groups(shape))


def unpacking_seconds(plan: Plan) -> float:
    """All linears made in BF16 once: codes read, values written, and read by matmuls that count as busy otherwise."""
    moved = (bytes_per_element(plan.recipe.weights) + 4) * plan.shape.linear_params
    return moved / plan.card.limits.bandwidth if plan.shares_base else 0.0


def decode_seconds(plan: Plan) -> tuple[float, float]:
    """What the low-rank products add to a decode step, at least and at most."""
    read = rollout_adapter_bytes(plan) / plan.card.limits.bandwidth
    least, most = (plan.shape.layers * _KERNELS * seconds for seconds in _KERNEL_SECONDS)
    return read + least, read + most

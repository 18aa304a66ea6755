"""The least time a decode step can take: bytes over bandwidth or operations over matmul rate, whichever is more.

    linears   weights of all layers, in their format, read once          2 operations per weight and row
    head      vocabulary projection, BF16
    attention K and V of every token in context; a shared prompt once per group     4 H D operations per token

The parts follow each other, so their times add up. Left out, being small: activations, K and V written, norms and
sampling. Bandwidth and rate are those measured on the machine (machine.py), so that what is reached can be given as a
share of what can be. FP4 activations count as BF16 matmuls, which is what they are before Blackwell.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_kernels import get_format
from trace_lightning.bench.shapes import ModelShape, lookup
from trace_lightning.recipe import QuantRecipe


def _formats() -> dict[str, QuantRecipe]:
    recipes = {"bf16": QuantRecipe(), "kv8": QuantRecipe(kv_cache="fp8")}
    for fp4, suffix in (("nvfp4", ""), ("mxfp4", "-mxfp4")):
        parts: dict[str, dict[str, str]] = {
            "w4": {"weights": fp4},
            "kv4": {"kv_cache": fp4},
            "w4a16kv4": {"weights": fp4, "kv_cache": fp4},
            "w4a16kv8": {"weights": fp4, "kv_cache": "fp8"},
            "w4a4kv4": {"weights": fp4, "activations": fp4, "kv_cache": fp4},
        }
        recipes |= {name + suffix: QuantRecipe(**part) for name, part in parts.items()}  # type: ignore[arg-type]
    return recipes


FORMATS = _formats()


def find_format(name: str) -> QuantRecipe:
    """The recipe called `name`.

    Raises:
        ValueError: if there is none.
    """
    return FORMATS[lookup("format", name, FORMATS)]


def bytes_per_element(fmt: str) -> float:
    """Bytes of one number in a format, its block scales included; 2 for `none`."""
    known = get_format(fmt)
    return 2.0 if known is None else known.bits_per_element / 8


def kv_bytes(shape: ModelShape, recipe: QuantRecipe) -> float:
    """Bytes of K and V of one token."""
    return shape.kv_elements * bytes_per_element(recipe.kv_cache)


def snapshot_bytes(shape: ModelShape, recipe: QuantRecipe) -> float:
    """Weights that the engine holds: a BF16 copy of everything and, of FP4 linears, the packed form beside it."""
    packed = bytes_per_element(recipe.weights) if recipe.weights in ("nvfp4", "mxfp4") else 0.0
    return 2 * shape.params + packed * shape.linear_params


def sequences_that_fit(free_bytes: float, bytes_per_token: float, context: int) -> int:
    """Sequences of `context` tokens whose K and V fit `free_bytes`."""
    return int(free_bytes / (bytes_per_token * context))


@dataclass(frozen=True)
class Limits:
    """What a machine can do: bytes and BF16 operations per second."""

    bandwidth: float
    matmul_rate: float


@dataclass(frozen=True)
class Part:
    """Bytes read and operations done by one part of a step."""

    bytes: float
    operations: float

    def seconds(self, limits: Limits) -> float:
        """Time of the slower of the two."""
        return max(self.bytes / limits.bandwidth, self.operations / limits.matmul_rate)


@dataclass(frozen=True)
class StepCost:
    """One decode step of a batch."""

    linears: Part
    head: Part
    attention: Part

    @property
    def bytes(self) -> float:
        """Bytes of the whole step."""
        return self.linears.bytes + self.head.bytes + self.attention.bytes

    def seconds(self, limits: Limits) -> float:
        """The least time of the whole step."""
        return sum(part.seconds(limits) for part in (self.linears, self.head, self.attention))


def decode_cost(
    shape: ModelShape, recipe: QuantRecipe, *, batch: int, context: float, shared: int = 0, samples: int = 1
) -> StepCost:
    """Cost of one decode step.

    Args:
        shape: the model.
        recipe: number formats.
        batch: sequences.
        context: tokens in context of each, their mean.
        shared: of these, tokens of a prompt that `samples` sequences have in common.
        samples: sequences per prompt.
    """
    tokens = batch * (context - shared) + batch / samples * shared
    operations = 4 * shape.heads * shape.head_dim * shape.layers * batch * context
    return StepCost(
        linears=Part(bytes_per_element(recipe.weights) * shape.linear_params, 2 * batch * shape.linear_params),
        head=Part(2 * shape.head_params, 2 * batch * shape.head_params),
        attention=Part(kv_bytes(shape, recipe) * tokens, operations),
    )


def prefill_operations(shape: ModelShape, prompts: int, length: int) -> float:
    """Operations of a prefill of `prompts` prompts: linears, causal attention, and the head for one token of each."""
    attention = 2 * shape.heads * shape.head_dim * shape.layers * prompts * length**2
    return 2.0 * prompts * (shape.linear_params * length + shape.head_params) + attention

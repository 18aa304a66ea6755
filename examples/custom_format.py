"""A number format of your own: a frozen dataclass under `BlockFormat` that quantises and dequantises.

Here: INT4, the integers -7 to 7 in blocks of 32 under one FP16 scale each. Registered, a recipe may name it for weights
and activations; trainer and rollout then round by the same code. It runs in plain torch through transformers' modules:
the kernels know our formats only, and so do guidance and the KV cache.

    python examples/custom_format.py --steps 20
"""

import argparse
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor

from trace_kernels import BlockFormat, Quantized, get_format, register_format
from trace_lightning import QuantRecipe, SamplingParams
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.tasks import TwoDigitAddition


@dataclass(frozen=True)
class INT4(BlockFormat):
    """Integers -7 to 7 under an FP16 scale per block; no outer scale."""

    name = "int4"
    guidable = False
    has_outer = False
    block_size = 32
    bits_per_element = 4.5

    def outer_from_amax(self, amax: Tensor) -> None:
        return None

    def quantize(self, x: Tensor, outer: Tensor | None = None) -> Quantized:
        padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % self.block_size))
        blocks = padded.unflatten(-1, (-1, self.block_size))
        scale = (blocks.abs().amax(-1) / 7).half()
        safe = torch.where(scale > 0, scale, torch.ones_like(scale)).float().unsqueeze(-1)
        codes = (blocks / safe).round().clamp(-7, 7).to(torch.int8).flatten(-2)
        return Quantized(codes, scale, None, x.shape[-1])

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        values = q.codes.unflatten(-1, (-1, self.block_size)).float() * q.scale.float().unsqueeze(-1)
        return values.flatten(-2)[..., : q.width].to(dtype)


def sqnr(fmt: BlockFormat, x: Tensor) -> float:
    """Signal over the noise of rounding, in dB."""
    noise = fmt.dequantize(fmt.quantize(x)) - x
    return float(10 * torch.log10(x.square().sum() / noise.square().sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    pl.seed_everything(0)
    register_format(INT4())
    x = torch.randn(256, 512)
    print({name: round(sqnr(get_format(name), x), 1) for name in ("int4", "nvfp4", "mxfp4")}, "dB")
    policy = PolicyModule(
        "builtin:tiny-qwen3", recipe=QuantRecipe(weights="int4", activations="int4"), learning_rate=3e-4
    )
    rollout = Rollout(num_generations=16, sampling=SamplingParams(max_new_tokens=6))
    settings = {"logger": False, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=args.steps, callbacks=[rollout], **settings)
    trainer.fit(policy, PromptDataModule(task=TwoDigitAddition(), batch_size=16, heldout_size=64))
    gap = float(trainer.callback_metrics["sampling/sampling_logp_difference/max"])
    print(f"reward {float(trainer.callback_metrics['reward']):.3f}, largest gap of trainer and rollout {gap:.1e}")


if __name__ == "__main__":
    main()

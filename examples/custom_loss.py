"""A loss of your own: a frozen dataclass, pure in named tensors, with the step's global counts as denominator.

Here: plain REINFORCE with an entropy-free baseline, `-A log pi`, averaged over tokens. Because it divides by
`counts.num_tokens` of the whole optimizer step, cutting the batch into micro-batches does not change the update.

    PYTHONPATH=examples trace-fit fit --config configs/grpo_fp4.yaml --model.loss custom_loss.Reinforce
    python examples/custom_loss.py --steps 20
"""

import argparse
from dataclasses import dataclass

import lightning.pytorch as pl
import torch

from trace_lightning import GuidanceConfig, QuantRecipe, SamplingParams
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.rl import LossInputs, LossOutputs, PolicyLoss
from trace_lightning.rl.losses import sum_count
from trace_lightning.tasks import TwoDigitAddition


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """`-A log pi` per token, token mean.

    Args:
        scale: factor on the loss.
    """

    scale: float = 1.0

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        losses_BT = -inputs.advantages_B[:, None] * inputs.policy_logprobs_BT
        if inputs.weights_BT is not None:
            losses_BT = losses_BT * inputs.weights_BT  # importance weights of the corrections
        losses_BT = torch.where(inputs.mask_BT, losses_BT, 0.0)
        loss = self.scale * losses_BT.sum() / max(inputs.counts.num_tokens, 1)
        return LossOutputs(loss, {"reinforce/nll": sum_count(-inputs.policy_logprobs_BT.detach(), inputs.mask_BT)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    pl.seed_everything(0)
    recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=GuidanceConfig(mode="parity"))
    policy = PolicyModule(path="builtin:tiny-qwen3", recipe=recipe, loss=Reinforce(), learning_rate=3e-4)
    rollout = Rollout(num_generations=16, sampling=SamplingParams(max_new_tokens=6))
    trainer = pl.Trainer(
        max_steps=args.steps, callbacks=[rollout], logger=False, num_sanity_val_steps=0, enable_checkpointing=False
    )
    trainer.fit(policy, PromptDataModule(task=TwoDigitAddition(), batch_size=16, heldout_size=64))
    print(f"reward {float(trainer.callback_metrics['reward']):.3f}")


if __name__ == "__main__":
    main()

"""A metric of your own: a torchmetrics `Metric` with sums as states, fed by a callback that reads the filled batch.

Here: how many different answers a group holds, and the share of groups in which at least one is right. Sums and counts
merge over steps and ranks by themselves; whatever is logged shows up in metrics.csv and every logger.

    PYTHONPATH=examples trace-fit fit --config configs/grpo_fp4.yaml --trainer.callbacks+=custom_metric.GroupMetrics
    python examples/custom_metric.py --steps 20
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import Metric

from trace_lightning import QuantRecipe, RolloutBatch, SamplingParams
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.tasks import TwoDigitAddition


class GroupDiversity(Metric):
    """Different completions per group as a share of its size, and the share of groups with a reward of 1 or more."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for state in ("distinct", "solved", "groups"):
            self.add_state(state, torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, texts: list[list[str]], rewards_PG: Tensor) -> None:
        """Add the groups of one rollout; a reward of NaN was not scored and solves nothing."""
        self.distinct += sum(len(set(group)) / len(group) for group in texts)
        self.solved += (rewards_PG >= 1).any(1).sum()
        self.groups += len(texts)

    def compute(self) -> dict[str, Tensor]:
        return {"groups/distinct": self.distinct / self.groups, "groups/solved": self.solved / self.groups}


class GroupMetrics(Callback):
    """Logs `GroupDiversity` of every rollout."""

    def __init__(self) -> None:
        self.metric = GroupDiversity()  # kept out of the module, and so out of its checkpoints

    def on_train_start(self, trainer, pl_module) -> None:
        self.metric.to(pl_module.device)  # ranks merge what lies on their devices

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        size = batch.num_generations
        texts = [completion.text for completion in batch.completions]
        groups = [texts[start : start + size] for start in range(0, len(texts), size)]
        self.metric.update(groups, batch.rewards_B.view(-1, size))
        pl_module.log_dict(self.metric.compute(), batch_size=len(groups))
        self.metric.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    pl.seed_everything(0)
    policy = PolicyModule(path="builtin:tiny-qwen3", learning_rate=3e-4, recipe=QuantRecipe(weights="nvfp4"))
    rollout = Rollout(num_generations=16, sampling=SamplingParams(max_new_tokens=6))
    settings = {"logger": False, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=args.steps, callbacks=[rollout, GroupMetrics()], **settings)
    trainer.fit(policy, PromptDataModule(task=TwoDigitAddition(), batch_size=16, heldout_size=64))
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items() if "groups/" in name})


if __name__ == "__main__":
    main()

"""A reward of your own: any function of the completion and its problem, by import path or as an object.

Here: full marks for the right sum, a little for a number that is close. The same from the command line:

    PYTHONPATH=examples trace-fit fit --config configs/grpo_fp4.yaml --rollout.rewards '[custom_reward.near_miss]'
    python examples/custom_reward.py --steps 20
"""

import argparse

import lightning.pytorch as pl

from trace_lightning import Problem, QuantRecipe, SamplingParams
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.tasks import RewardFn, TwoDigitAddition


def near_miss(completion: str, problem: Problem) -> float | None:
    """1 for the right sum, down to 0 when it is off by 10 or more. None means "not scored"."""
    try:
        value = int(completion)
    except ValueError:
        return 0.0
    return max(0.0, 1.0 - abs(value - int(problem.answer)) / 10)


class Short(RewardFn):
    """The same as a class: it can have arguments, and its name is the key in the logs."""

    name = "short"

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    def __call__(self, completion: str, problem: Problem) -> float:
        return float(len(completion) <= self.limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    pl.seed_everything(0)
    policy = PolicyModule(path="builtin:tiny-qwen3", learning_rate=3e-4, recipe=QuantRecipe(weights="nvfp4"))
    rollout = Rollout(
        rewards=[near_miss, Short(limit=3)],
        reward_weights=[1.0, 0.1],
        num_generations=16,
        sampling=SamplingParams(max_new_tokens=6),
    )
    trainer = pl.Trainer(
        max_steps=args.steps, callbacks=[rollout], logger=False, num_sanity_val_steps=0, enable_checkpointing=False
    )
    trainer.fit(policy, PromptDataModule(task=TwoDigitAddition(), batch_size=16, heldout_size=64))
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items() if "rewards/" in name})


if __name__ == "__main__":
    main()

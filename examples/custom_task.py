"""A task of your own: problems, a held-out part of them, and the rewards. Three methods, no tensors.

Here: two-digit sums by how many carries they take, as tasks of their own in a mixture. The curriculum then draws more
of what is solved about half of the time. The same from the command line:

    PYTHONPATH=examples trace-fit fit --config configs/grpo_fp4.yaml --config YOURS.yaml
        data:
          task: {class_path: Mixture, init_args: {tasks: {easy: {class_path: custom_task.CarrySums}, ...}}}
          order: SuccessCurriculum
    python examples/custom_task.py --steps 20
"""

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl

from trace_lightning import Problem, QuantRecipe, SamplingParams
from trace_lightning.callbacks import Rollout
from trace_lightning.data import EvalSet, PromptDataModule
from trace_lightning.loading import SuccessCurriculum
from trace_lightning.module import PolicyModule
from trace_lightning.tasks import ExactMatch, Mixture, RewardFn, Task, split_by_question


class CarrySums(Task):
    """Sums of two numbers below 100 that take so many carries.

    Args:
        carries: 0, 1 or 2.
        heldout_size: questions held out, in both orders of their operands.
    """

    def __init__(self, carries: int = 0, heldout_size: int = 64) -> None:
        problems = [
            Problem(prompt=f"{a:02d}+{b:02d}=", answer=str(a + b), info={"pair": f"{min(a, b)} {max(a, b)}"})
            for a in range(100)
            for b in range(100)
            if (a % 10 + b % 10 > 9) + (a + b > 99) == carries
        ]
        # by what is asked, so that 12+34 and 34+12 are never on both sides
        self.train, self.heldout = split_by_question(problems, heldout_size, key=lambda p: p.info["pair"])

    def train_problems(self) -> Sequence[Problem]:
        return self.train

    def heldout_problems(self) -> Sequence[Problem]:
        return self.heldout

    def rewards(self) -> Sequence[RewardFn]:
        return [ExactMatch()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    pl.seed_everything(0)
    task = Mixture({f"carries{n}": CarrySums(n) for n in (0, 1, 2)})
    greedy = EvalSet(name="greedy", sampling=SamplingParams(temperature=0.0, max_new_tokens=6), size=48)
    data = PromptDataModule(task, batch_size=16, heldout_size=48, order=SuccessCurriculum(), eval_sets=[greedy])
    policy = PolicyModule(path="builtin:tiny-qwen3", learning_rate=3e-4, recipe=QuantRecipe(weights="nvfp4"))
    rollout = Rollout(num_generations=16, sampling=SamplingParams(max_new_tokens=6))
    settings = {"logger": False, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=args.steps, callbacks=[rollout], **settings)
    trainer.fit(policy, data)
    shown = {name: round(float(value), 3) for name, value in trainer.callback_metrics.items() if "curriculum" in name}
    print(shown or "nothing was measured")
    trainer.validate(policy, data)


if __name__ == "__main__":
    main()

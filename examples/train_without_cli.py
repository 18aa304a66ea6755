"""The whole system on one screen: policy, prompts, rollout and trainer, without the command line.

python examples/train_without_cli.py --steps 30
"""

import argparse

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from trace_lightning import GuidanceConfig, QuantRecipe, SamplingParams
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.rl import GRPO, TIS
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.tasks import TwoDigitAddition

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--runs_dir", default="runs")
args = parser.parse_args()

pl.seed_everything(0)

# How the rollout computes, written once: the trainer rounds by the same recipe, guided by the rollout's record.
recipe = QuantRecipe(
    weights="nvfp4",
    activations="nvfp4",
    kv_cache="nvfp4",
    guidance=GuidanceConfig(mode="parity"),
)

policy = PolicyModule(
    path="builtin:tiny-qwen3",
    recipe=recipe,
    loss=GRPO(epsilon=0.2),
    corrections=[TIS(cap=2.0)],
    learning_rate=3e-4,
)
prompts = PromptDataModule(task=TwoDigitAddition(), batch_size=16, heldout_size=128)
rollout = Rollout(
    engine=LocalEngine(max_num_seqs=256),
    sampling=SamplingParams(temperature=1.0, max_new_tokens=6),
    num_generations=16,
)

trainer = pl.Trainer(
    max_steps=args.steps,
    callbacks=[rollout],
    logger=CSVLogger(args.runs_dir, name="without_cli"),
    log_every_n_steps=1,
    num_sanity_val_steps=0,
    enable_model_summary=False,
)
trainer.validate(policy, prompts)  # where the policy starts from
trainer.fit(policy, prompts)
trainer.validate(policy, prompts)

"""Training on conversations: what is learned from, counted, resumed and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from trace_lightning.callbacks import Rollout
from trace_lightning.callbacks.completions import completion_entries
from trace_lightning.data import EvalSet, PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rl import SoftOverlong
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.refill import DynamicSampling
from trace_lightning.tasks import CalculatorProducts, GuessNumber, Mixture, Task, TwoDigitAddition
from trace_lightning.types import Problem, RolloutBatch, SamplingParams, TurnLimits

GUIDED = QuantRecipe(
    weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=GuidanceConfig(mode="parity", audit_sequences=8)
)
LIMITS = TurnLimits(max_turns=3, max_total_tokens=32)
SAMPLING = SamplingParams(max_new_tokens=12, stop=[">"])


class Batches(Callback):
    """Keeps the batches that were trained on."""

    def __init__(self) -> None:
        self.batches: list[RolloutBatch] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.batches.append(arguments[3])


def make_module(**settings: Any) -> PolicyModule:
    return PolicyModule(**({"path": "builtin:tiny-qwen3-tools", "recipe": GUIDED, "learning_rate": 1e-3} | settings))


def fit(
    module: PolicyModule,
    task: Task,
    *callbacks: Callback,
    steps: int = 1,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    **rollout: Any,
) -> pl.Trainer:
    pl.seed_everything(0)
    settings = {"num_generations": 8, "sampling": SAMPLING, "turns": LIMITS} | rollout
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[Rollout(**settings), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        module, PromptDataModule(task, batch_size=4, **({"heldout_size": 8} | (data or {}))), ckpt_path=ckpt_path
    )
    return trainer


def weights(module: PolicyModule) -> torch.Tensor:
    assert module.policy is not None
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


def test_the_policys_tokens_alone_are_learned_from_and_counted() -> None:
    kept = Batches()
    penalty = SoftOverlong(cache=20)
    metrics = fit(make_module(length_penalty=penalty), CalculatorProducts(), kept).callback_metrics
    (batch,) = kept.batches
    drawn = [completion.num_drawn for completion in batch.completions]
    talked = [c for c in batch.completions if len(c.turns) > 1]
    assert talked
    assert batch.completion_mask_BT is not None
    assert batch.completion_mask_BT.sum(1).tolist() == drawn
    for b, (prompt, completion) in enumerate(batch.sequences()):
        for turn in completion.turns:
            span = slice(len(prompt.token_ids) + turn.start, len(prompt.token_ids) + turn.end)
            assert (batch.completion_mask_BT[b, span] == (turn.source == "policy")).all()
    assert metrics["completions/mean_length"] == pytest.approx(sum(drawn) / len(drawn))
    assert metrics["num_tokens"] == sum(drawn)
    assert metrics["turns/mean"] == pytest.approx(sum(len(c.turns[::2]) for c in batch.completions) / len(drawn))
    assert metrics["turns/max"] >= 2
    assert metrics["turns/observation_tokens"] > 0
    assert batch.max_drawn == 32
    punished = [-min(1.0, max(0.0, (n - 12) / 20)) for n in drawn]  # between 12 and 32 tokens of the policy's own
    assert metrics["length_penalty"] == pytest.approx(sum(punished) / len(drawn), abs=1e-6)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["guidance/code_mismatch_after"] == 0
    entry = next(e for e in completion_entries(batch, "train", 0) if len(e.get("turns", ())) == 3)
    assert [t["source"] for t in entry["turns"]] == ["policy", "environment", "policy"]
    assert entry["completion"] == "".join(t["text"] for t in entry["turns"])


def test_the_rewards_of_turns_are_part_of_the_reward_and_of_evaluation() -> None:
    kept = Batches()
    sets = [EvalSet(name="game", task=GuessNumber(), size=4), EvalSet(name="sums", task=TwoDigitAddition(), size=4)]
    task = Mixture({"game": GuessNumber(heldout_size=0), "tool": CalculatorProducts()})
    trainer = fit(
        make_module(),
        task,
        kept,
        data={"eval_sets": sets},
        sampling=SamplingParams(max_new_tokens=6, stop=[">", "\n"]),
        dynamic_sampling=DynamicSampling(max_refills=1),
    )
    for batch in kept.batches:
        rewards = [sum(t.reward or 0.0 for t in c.turns) for c in batch.completions]
        games = [i for i, (p, _) in enumerate(batch.sequences()) if p.problem.info["source"] == "game"]
        assert batch.rewards_B is not None
        assert [batch.rewards_B[i].item() for i in games] == pytest.approx([rewards[i] for i in games])
    results = trainer.validate(trainer.lightning_module, trainer.datamodule, verbose=False)[0]  # type: ignore[attr-defined]
    assert {"heldout/game/reward", "heldout/sums/reward"} <= results.keys()


@pytest.mark.parametrize("settings", [{"top_k": 8, "record_support": 8}, {"record_logprobs": 32}], ids=str)
def test_recorded_distributions_agree_on_both_sides(settings: dict[str, int]) -> None:
    sampling = SamplingParams(max_new_tokens=12, stop=[">"], **settings)
    metrics = fit(make_module(), CalculatorProducts(), sampling=sampling).callback_metrics
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics.get("sampling/argmax_agreement", torch.ones(())) == 1


class Broken(CalculatorProducts):
    """The first `bad` conversations after `good` healthy ones find no calculator."""

    def __init__(self, bad: int, good: int = 0) -> None:
        super().__init__()
        self.bad, self.good, self.begun = bad, good, 0

    def environment(self, problem: Problem) -> Any:
        self.begun += 1
        if self.good < self.begun <= self.good + self.bad:
            raise RuntimeError("no calculator")
        return super().environment(problem)


def test_conversations_whose_environment_failed_are_not_learned_from() -> None:
    kept = Batches()
    with pytest.warns(UserWarning, match="reward"):
        metrics = fit(make_module(), Broken(5), kept).callback_metrics
    (batch,) = kept.batches
    failed = [i for i, completion in enumerate(batch.completions) if completion.error]
    assert metrics["turns/errors"] == len(failed) == 5
    assert metrics["rewards/unscored_share"] == pytest.approx(5 / 32)
    assert batch.completion_mask_BT is not None
    assert not batch.completion_mask_BT[failed].any()
    reasons = completion_entries(batch, "train", 0)[failed[0]]["reasons"]
    assert reasons["exact_match"] == "environment: raised RuntimeError: no calculator"
    with pytest.raises(ValueError, match=r"all 32 environments of this rollout failed; .*no calculator"):
        fit(make_module(), Broken(1000))


def test_a_refill_whose_environments_all_fail_is_not_the_end() -> None:
    kept = Batches()
    fit(make_module(), Broken(1000, good=32), kept, dynamic_sampling=DynamicSampling(max_refills=1))
    (batch,) = kept.batches
    assert batch.stats["dynamic_sampling/refills"] == 1
    assert not any(completion.error for completion in batch.completions)


def test_a_resumed_run_continues_as_the_unbroken_one(tmp_path: Path) -> None:
    whole, first, second, kept = make_module(), make_module(), make_module(), (Batches(), Batches())
    fit(whole, CalculatorProducts(), kept[0], steps=4)
    fit(first, CalculatorProducts(), steps=2).save_checkpoint(tmp_path / "half.ckpt")
    fit(second, CalculatorProducts(), kept[1], steps=4, ckpt_path=str(tmp_path / "half.ckpt"))
    texts = [[[c.text for c in batch.completions] for batch in callback.batches] for callback in kept]
    assert texts[1] == texts[0][2:]
    assert torch.equal(weights(second), weights(whole))


def test_processes_of_environments_end_with_the_run() -> None:
    class Apart(CalculatorProducts):
        environments_in_process = False

    kept = Batches()
    trainer = fit(make_module(), Apart(), kept, num_generations=2)
    (batch,) = kept.batches
    assert batch.stats["env_steps"] >= 8
    assert not any(completion.error for completion in batch.completions)
    (rollout,) = [callback for callback in trainer.callbacks if isinstance(callback, Rollout)]  # type: ignore[attr-defined]
    talk = rollout._conversations.of(batch)
    assert talk is not None
    assert talk.pool._servers == []  # type: ignore[attr-defined]


class Deaf(LocalEngine):
    takes_turns = False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": Deaf()}, "CalculatorProducts has environments, and rollout.engine=Deaf does not take turns"),
        ({"turns": None}, r"rollout\.turns\.max_total_tokens=1024 leaves no room for a prompt .* of 128 tokens"),
        ({"turns": LIMITS, "task": TwoDigitAddition()}, r"rollout\.turns is set, but no task has environments"),
    ],
    ids=["engine", "context", "no environments"],
)
def test_refused_before_long_work(settings: dict[str, Any], message: str) -> None:
    task = settings.pop("task", None) or CalculatorProducts()
    with pytest.raises(ValueError, match=message):
        fit(make_module(), task, **settings)


@pytest.mark.parametrize(
    "settings", [{"max_turns": 0}, {"max_total_tokens": 0}, {"step_timeout_s": 0}, {"timeout_s": -1}], ids=str
)
def test_limits_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.turns\.{next(iter(settings))}="):
        TurnLimits(**settings)

"""One rollout to optimizer steps: splitting changes nothing, the unscored is not learned, checkpoints are plain."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.rl import GRPO, TBPO, TIS, DrGRPO, GroupAdvantage, IcePop, ScoreCentering, Veto
from trace_lightning.tasks import ExactMatch, TwoDigitAddition
from trace_lightning.types import GuidanceConfig, QuantRecipe, SamplingParams

W4A4KV4 = {"weights": "nvfp4", "activations": "nvfp4", "kv_cache": "nvfp4"}
GUIDED = QuantRecipe(**W4A4KV4, guidance=GuidanceConfig(mode="parity"))


class Sgd(PolicyModule):
    """Plain SGD: the update is the gradient, so updates can be compared."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=self.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)}


def fit(
    module: PolicyModule,
    *callbacks: Callback,
    steps: int = 1,
    rollout: Rollout | None = None,
    batch_size: int = 4,
    **trainer,
) -> pl.Trainer:
    pl.seed_everything(0)
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    rollout = rollout or Rollout(num_generations=4, sampling=SamplingParams(max_new_tokens=5))
    fitted = pl.Trainer(
        max_steps=steps, callbacks=[rollout, *callbacks], enable_model_summary=False, **(settings | trainer)
    )
    fitted.fit(module, PromptDataModule(TwoDigitAddition(), batch_size=batch_size, heldout_size=8))
    return fitted


def weights(module: PolicyModule) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


def make(cls=PolicyModule, **settings) -> PolicyModule:
    return cls(**({"path": "builtin:tiny-qwen3", "recipe": GUIDED, "learning_rate": 1e-2} | settings))


@pytest.mark.parametrize("loss", [GRPO(), DrGRPO()], ids=["GRPO", "DrGRPO"])
def test_the_token_budget_does_not_change_the_update(loss):
    start, ends = None, []
    for budget in (16384, 40, 1):
        module = make(Sgd, loss=loss, max_tokens_per_microbatch=budget, max_grad_norm=1e9)
        fit(module)
        start = weights(make(Sgd).train()) if start is None and module.configure_model() else start
        ends.append(weights(module))
    moved = (ends[0] - weights_of_checkpoint()).abs().max()
    assert moved > 1e-5
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], atol=1e-6 + 1e-4 * moved.item(), rtol=0)


def weights_of_checkpoint() -> torch.Tensor:
    module = make()
    module.configure_model()
    return weights(module)


def test_optimizer_steps_per_rollout_are_iterations_times_minibatches():
    trainer = fit(make(num_iterations=2, num_minibatches=3, learning_rate=1e-5), steps=6)
    assert trainer.global_step == 6
    assert trainer.fit_loop.epoch_loop.total_batch_idx == 0  # one rollout
    assert float(trainer.callback_metrics["policy_version"]) == 0


def test_on_policy_the_two_sides_agree_and_the_loss_is_zero():
    metrics = fit(make()).callback_metrics
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert abs(metrics["loss"]) < 1e-5
    assert metrics["grad_norm"] > 0
    assert metrics["guidance/code_mismatch_after"] == 0
    for site in ("attn_in", "o_in", "mlp_in"):
        assert metrics[f"guidance/{site}/code_mismatch_after"] == 0
        assert metrics[f"guidance/{site}/d_act_rel_after"] == 0
    assert metrics["rollout_corr/reverse_k3_kl"] < 1e-6
    assert metrics["sampling/probability_pearson"] > 0.999
    assert "sampling/argmax_agreement" not in metrics  # nothing recorded to measure it by
    assert "guidance/k/code_mismatch_after" not in metrics  # not guided


@pytest.mark.parametrize(("num_minibatches", "measured"), [(1, True), (2, False)])
def test_agreement_is_measured_under_the_weights_that_drew(num_minibatches: int, measured: bool):
    sampling = SamplingParams(max_new_tokens=5, record_logprobs=16)
    rollout = Rollout(num_generations=4, sampling=sampling)
    metrics = fit(make(num_minibatches=num_minibatches), rollout=rollout).callback_metrics
    assert ("sampling/argmax_agreement" in metrics) == measured
    assert not measured or metrics["sampling/argmax_agreement"] == 1


@pytest.mark.parametrize("seconds", [None, 0.25])
def test_share_of_recording_is_logged_where_the_engine_measured_it(seconds: float | None):
    class Measured(Rollout):
        def _generate(self, *args, **kwargs):
            generation = super()._generate(*args, **kwargs)
            generation.stats.pop("guidance_seconds", None)
            if seconds is not None:
                generation.stats["guidance_seconds"] = seconds
            return generation

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            batch.seconds["rollout"] = 2.0

    rollout = Measured(num_generations=4, sampling=SamplingParams(max_new_tokens=5))
    metrics = fit(make(), rollout=rollout).callback_metrics
    assert ("guidance/share_of_rollout_time" in metrics) == (seconds is not None)
    assert seconds is None or metrics["guidance/share_of_rollout_time"] == 0.125


def test_sums_of_a_step_are_left_for_whoever_sums_up_a_run():
    """Audited: the first 4 sequences of 4 prompts, at three sites of each layer."""
    module = make()
    fit(module)
    assert {site for _, site in module.step_audit} == {"attn_in", "o_in", "mlp_in"}
    assert all(sums[0] > 0 for sums in module.step_audit.values())
    assert sum(row[0] for row in module.step_positions) > 16
    assert [row[0] for row in module.step_positions][:1] == [16]  # every answer has a first token
    assert [row[0] for row in module.step_positions][3:] == [0] * 15  # none has an eighth


def test_guidance_is_measured_in_every_optimizer_step_on_a_rollout():
    """The weights are the rollout's in the first step and leave it: later passes over the same rollout count too."""
    metrics = fit(make(num_iterations=3, learning_rate=2e-3), steps=3).callback_metrics
    steps = [metrics[f"guidance/inner_step_{i}/code_mismatch_after"] for i in range(3)]
    assert steps[0] == 0
    assert min(steps[1:]) > 0
    torch.testing.assert_close(metrics["guidance/code_mismatch_after"], sum(steps) / 3)
    assert metrics["guidance/inner_step_2/d_act_rel_after"] > 0
    assert "guidance/inner_step_0/code_mismatch_after" not in fit(make()).callback_metrics


def test_guidance_that_stops_to_work_is_said_once(caplog):
    """One parity bit assumes weights near the rollout's; a second optimizer step at a high rate is far from them."""
    fit(make(num_minibatches=4, learning_rate=0.05), steps=8)
    said = [record for record in caplog.records if "guidance does not hold" in record.getMessage()]
    assert len(said) == 1
    assert "first of 4 optimizer steps" in said[0].getMessage()


@pytest.mark.parametrize("fallback", [True, False])
def test_guidance_falls_back_to_every_site(fallback):
    """Two steps per rollout: the default sites fail in the second step, all six hold from the second rollout on."""
    recipe = QuantRecipe(**W4A4KV4, guidance=GuidanceConfig(mode="parity", fallback=fallback))
    seen: list[tuple[set[str], float]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            sites = {site for _, site in batch.guidance.tables}
            seen.append((sites, trainer.callback_metrics["guidance/code_mismatch_after"].item()))

    rollout = Rollout(num_generations=4, sampling=SamplingParams(max_new_tokens=5))
    module = make(recipe=recipe, num_minibatches=2, learning_rate=2e-3)
    fit(module, Watch(), rollout=rollout, steps=6)
    default, every = {"attn_in", "o_in", "mlp_in"}, {"attn_in", "o_in", "mlp_in", "down_in", "k", "v"}
    assert [sites for sites, _ in seen] == [default] + 2 * [every if fallback else default]
    assert seen[0][1] > 0.01
    assert (seen[2][1] < 0.01) == fallback
    assert rollout.state_dict()["widened"] == fallback


def test_guidance_that_works_is_not_complained_about(caplog):
    fit(make(learning_rate=1e-3), steps=3)
    assert "guidance does not hold" not in caplog.text


def test_every_rollout_uses_the_weights_of_its_step():
    versions = []

    class Versions(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            versions.append(
                (trainer.global_step - 1, batch.policy_version, {c.policy_version for c in batch.completions})
            )

    fit(make(), Versions(), steps=3)
    assert versions == [(step, step, {step}) for step in range(3)]


def test_should_sync_is_the_one_decision_to_override():
    class EveryOther(Rollout):
        def should_sync(self, optimizer_steps: int) -> bool:
            return optimizer_steps % 2 == 0

    versions = []

    class Versions(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            versions.append(batch.policy_version)

    rollout = EveryOther(num_generations=4, sampling=SamplingParams(max_new_tokens=5))
    fit(make(), Versions(), steps=4, rollout=rollout)
    assert versions == [0, 0, 2, 2]


def test_unscored_completions_are_not_learned_from():
    def nothing(completion, problem):
        return None

    start = weights_of_checkpoint()
    module = make(Sgd)
    with pytest.warns(UserWarning, match="reward"):
        trainer = fit(
            module, rollout=Rollout(rewards=[nothing], num_generations=4, sampling=SamplingParams(max_new_tokens=5))
        )
    assert torch.equal(weights(module), start)
    assert trainer.callback_metrics["rewards/unscored_share"] == 1
    assert math.isfinite(trainer.callback_metrics["loss"])


def test_truncated_completions_can_be_masked():
    rollout = Rollout(num_generations=4, sampling=SamplingParams(max_new_tokens=1), mask_truncated_completions=True)
    module, start = make(Sgd), weights_of_checkpoint()
    fit(module, rollout=rollout)
    assert torch.equal(weights(module), start)


def test_truncated_sampling_is_renormalised_on_both_sides():
    """An unchanged policy has ratio 1 under top-p, not a quiet ratio below it."""
    sampling = SamplingParams(max_new_tokens=5, top_p=0.8, record_support=16)
    metrics = fit(make(), rollout=Rollout(num_generations=4, sampling=sampling)).callback_metrics
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["clip_ratio/region_mean"] == 0


def test_truncated_sampling_with_a_completion_that_is_not_scored():
    """Its tokens have support sets, but nothing is learned from them."""
    calls = []

    def sometimes(completion, problem):
        calls.append(completion)
        return None if len(calls) == 2 else float(len(calls) % 3)

    sampling = SamplingParams(max_new_tokens=5, top_k=8, record_support=8)
    rollout = Rollout(rewards=[sometimes], num_generations=4, sampling=sampling, reward_workers=0)
    with pytest.warns(UserWarning, match="reward"):
        metrics = fit(make(), rollout=rollout).callback_metrics
    assert metrics["rewards/unscored_share"] == pytest.approx(1 / 16)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_state_dict_holds_the_policy_alone_and_optimizer_sees_nothing_else():
    module = make()
    fit(module)
    assert all(name.startswith("policy.") for name in module.state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in module.state_dict().values())


def test_a_checkpoint_opens_with_weights_only_and_rebuilds_the_module(tmp_path):
    module = make(loss=DrGRPO(epsilon=0.1), advantages=GroupAdvantage(scale="none"), corrections=[TIS(cap=3.0)])
    trainer = fit(module, enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    raw = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in raw["state_dict"].values())
    again = PolicyModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.loss == module.loss
    assert again.recipe == module.recipe
    assert again.corrections == module.corrections
    assert torch.equal(weights(again), weights(module))


def test_a_non_finite_gradient_touches_nothing_and_stops_the_run():
    class Broken(GRPO):
        def __call__(self, inputs):
            outputs = super().__call__(inputs)
            return type(outputs)(outputs.loss * float("nan"), outputs.metrics)

    module, start = make(loss=Broken()), weights_of_checkpoint()
    with pytest.raises(ValueError, match="not finite in 3 optimizer steps in a row"):
        fit(module, steps=5)
    assert torch.equal(weights(module), start)


def test_gradient_checkpointing_gives_the_same_update():
    ends = []
    for enabled in (False, True):
        module = make(Sgd, gradient_checkpointing=enabled)
        fit(module)
        ends.append(weights(module))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-7, rtol=0)


def test_a_reward_that_raises_is_counted_and_the_rest_goes_on(caplog):
    calls = []

    def sometimes(completion, problem):
        calls.append(completion)
        if len(calls) % 5 == 0:
            raise KeyError("missing")
        return float(len(completion))

    sampling = SamplingParams(max_new_tokens=5)
    rollout = Rollout(rewards=[sometimes], num_generations=4, sampling=sampling, reward_workers=0)
    with pytest.warns(UserWarning, match="reward"):
        metrics = fit(make(), rollout=rollout).callback_metrics
    assert metrics["rewards/sometimes/errors"] == 3
    assert metrics["rewards/unscored_share"] == pytest.approx(3 / 16)
    assert "sometimes raised KeyError" in caplog.text


def test_a_reward_that_always_raises_stops_the_run():
    def broken(completion, problem):
        raise RuntimeError("no such file")

    with pytest.raises(ValueError, match=r"all 16 reward calls.*broken raised RuntimeError: no such file"):
        fit(make(), rollout=Rollout(rewards=[broken], num_generations=4, sampling=SamplingParams(max_new_tokens=5)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "num_generations"),
        ({"sampling": SamplingParams(top_k=5, max_new_tokens=5)}, "record_support"),
        ({"sampling": SamplingParams(temperature=0.0, max_new_tokens=5)}, "greedy"),
        ({"rewards": [ExactMatch(), ExactMatch()]}, "names must differ"),
        ({"rewards": [ExactMatch()], "reward_weights": [1.0, 2.0]}, "2 reward_weights for 1"),
    ],
    ids=["one generation", "truncation", "greedy", "equal names", "weights"],
)
def test_bad_rollout_settings_are_refused_before_training(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(make(), rollout=Rollout(**({"sampling": SamplingParams(max_new_tokens=5)} | settings)))


def test_score_centering_sees_the_same_distribution_on_both_sides():
    sampling = SamplingParams(max_new_tokens=5, record_logprobs=8)
    module = make(loss=ScoreCentering())
    metrics = fit(module, rollout=Rollout(sampling=sampling, num_generations=4)).callback_metrics
    assert metrics["rollout_corr/scorecentering/mean_weight"] == pytest.approx(1, abs=1e-4)
    assert 0.5 < metrics["rollout_corr/scorecentering/recorded_mass"] <= 1
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("loss", [TBPO(), ScoreCentering()], ids=["TBPO", "ScoreCentering"])
def test_the_baselines_too_do_not_depend_on_the_token_budget(loss):
    sampling, after = SamplingParams(max_new_tokens=5, record_logprobs=8), []
    for budget in (100_000, 40):
        module = make(Sgd, loss=loss, max_tokens_per_microbatch=budget)
        fit(module, rollout=Rollout(sampling=sampling, num_generations=4))
        after.append(weights(module))
    assert not torch.equal(after[0], weights_of_checkpoint())
    torch.testing.assert_close(*after, atol=1e-6, rtol=1e-5)


def test_score_centering_with_completions_that_are_not_scored():
    """Micro-batches of which nothing is learned have no recorded rows; the loss must not take that for no record."""

    def nothing(completion, problem):
        return None

    sampling = SamplingParams(max_new_tokens=5, record_logprobs=8)
    module = make(Sgd, loss=ScoreCentering(), max_tokens_per_microbatch=1)
    with pytest.warns(UserWarning, match="reward"):
        fit(module, rollout=Rollout(rewards=[nothing], num_generations=4, sampling=sampling))
    assert torch.equal(weights(module), weights_of_checkpoint())


def test_a_loss_that_needs_a_record_says_so():
    with pytest.raises(ValueError, match=r"ScoreCentering needs .* set rollout\.sampling\.record_logprobs"):
        fit(make(loss=ScoreCentering()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": TBPO(), "corrections": [TIS()]}, "TBPO weighs by the ratio.*tis_token would count it twice"),
        ({"loss": ScoreCentering(), "corrections": [Veto(), IcePop()]}, "icepop would count it twice"),
        ({"path": "no/such/dir"}, "no directory"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"loss": GRPO(beta=0.1)}, "reference policy"),
    ],
    ids=["TBPO and TIS", "ScoreCentering and IcePop", "path", "learning rate", "beta"],
)
def test_bad_module_settings_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_sixteen_mixed_is_refused():
    """It needs a GPU to run, so a stand-in for the trainer attaches here."""
    trainer = SimpleNamespace(precision="16-mixed", gradient_clip_val=None, accumulate_grad_batches=1)
    with pytest.raises(ValueError, match="bf16-mixed or 32-true"):
        make().trainer = trainer


@pytest.mark.parametrize("flag", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}], ids=str)
def test_trainer_flags_that_manual_optimisation_cannot_honour_name_ours(flag):
    with pytest.raises(ValueError, match=r"max_grad_norm|max_tokens_per_microbatch"):
        fit(make(), **flag)


def test_nothing_is_kept_from_step_to_step():
    """An old snapshot, record or batch that stays alive shows as tensors that add up."""
    counts = {}

    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            gc.collect()
            counts[trainer.global_step] = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    fit(make(), Count(), steps=6)
    assert counts[6] <= counts[3]

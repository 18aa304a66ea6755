"""One rollout to optimizer steps: splitting changes nothing, the unscored is not learned, checkpoints are plain."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rl import (
    CISPO,
    GRPO,
    K1,
    K3,
    PPO,
    RLOO,
    TBPO,
    TIS,
    DrGRPO,
    GroupAdvantage,
    IcePop,
    LossInputs,
    ScoreCentering,
    SoftOverlong,
    Veto,
)
from trace_lightning.rollout.reference import ReferenceConfig
from trace_lightning.rollout.refill import DynamicSampling
from trace_lightning.tasks import ExactMatch, TwoDigitAddition
from trace_lightning.types import SamplingParams

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


EVERYTHING = {"beta": 0.1, "kl": K3("k2"), "entropy_coef": 0.05}


@pytest.mark.parametrize(
    "loss", [GRPO(), DrGRPO(), RLOO(**EVERYTHING), CISPO(**EVERYTHING)], ids=lambda x: type(x).__name__
)
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
    assert {site for _, site in module.measured.audit} == {"attn_in", "o_in", "mlp_in"}
    assert all(sums[0] > 0 for sums in module.measured.audit.values())
    assert sum(row[0] for row in module.measured.position_sums) > 16
    assert [row[0] for row in module.measured.position_sums][:1] == [16]  # every answer has a first token
    assert [row[0] for row in module.measured.position_sums][3:] == [0] * 15  # none has an eighth


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


def test_syndromes_that_do_not_hold_are_told_to_be_bits(caplog):
    """All sites may be guided already: then other sites are no way out."""
    make(recipe=QuantRecipe(**W4A4KV4, guidance=GuidanceConfig(mode="syndrome")))._watch_guidance(0.5)
    assert "every site (recipe.guidance.mode=parity, recipe.guidance.sites=[" in caplog.text


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
    sampling = SamplingParams(max_new_tokens=5)
    with pytest.warns(UserWarning, match="reward"):
        trainer = fit(
            module, rollout=Rollout(rewards=[nothing], num_generations=4, sampling=sampling, reward_workers=0)
        )
    assert torch.equal(weights(module), start)
    assert trainer.callback_metrics["rewards/unscored_share"] == 1
    assert math.isfinite(trainer.callback_metrics["loss"])


def test_truncated_completions_can_be_masked():
    rollout = Rollout(num_generations=4, sampling=SamplingParams(max_new_tokens=1), mask_truncated_completions=True)
    module, start = make(Sgd), weights_of_checkpoint()
    fit(module, rollout=rollout)
    assert torch.equal(weights(module), start)


@pytest.mark.parametrize("bypass", [False, True])
def test_truncated_sampling_is_renormalised_on_both_sides(bypass):
    """An unchanged policy has ratio 1 under top-p, not a quiet one below, whoever's log-probs are the denominator."""
    sampling = SamplingParams(max_new_tokens=5, top_p=0.8, record_support=16)
    module = make(bypass_mode=bypass, loss=GRPO(epsilon=1e-3))
    metrics = fit(module, rollout=Rollout(num_generations=4, sampling=sampling)).callback_metrics
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_resumed_optimizer_has_the_kernel_of_its_device(device: str):
    """Not that of its checkpoint, which may come from the other one, or from before there was a choice."""
    module = make()
    stored = fit(module, accelerator="cpu").optimizers[0].state_dict()
    stored["param_groups"][0]["fused"] = True if device == "cpu" else None
    module.policy.to(device)
    optimizer = module.configure_optimizers()["optimizer"]
    optimizer.load_state_dict(stored)
    assert optimizer.param_groups[0]["fused"] is (None if device == "cpu" else True)
    assert optimizer.param_groups[0]["betas"] == stored["param_groups"][0]["betas"]
    first = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert (float(first["step"]), first["step"].device.type) == (1.0, device)
    torch.testing.assert_close(first["exp_avg"].cpu(), stored["state"][0]["exp_avg"], atol=0, rtol=0)
    module.policy.get_input_embeddings()(torch.tensor([0], device=device)).sum().backward()
    optimizer.step()


def test_state_dict_holds_the_policy_alone_and_optimizer_sees_nothing_else():
    module = make()
    fit(module)
    assert all(name.startswith("policy.") for name in module.state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in module.state_dict().values())


def test_a_checkpoint_opens_with_weights_only_and_rebuilds_the_module(tmp_path):
    module = make(
        loss=DrGRPO(epsilon=0.1, beta=0.1, kl=K1("ratio")),
        advantages=GroupAdvantage(scale="none"),
        corrections=[TIS(cap=3.0)],
        length_penalty=SoftOverlong(cache=2),
        reference=ReferenceConfig(dtype="fp8"),
    )
    trainer = fit(module, enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    raw = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in raw["state_dict"].values())
    again = PolicyModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.loss == module.loss
    assert again.recipe == module.recipe
    assert again.corrections == module.corrections
    assert again.length_penalty == module.length_penalty
    assert again.reference.config == module.reference.config
    assert {name.split(".")[0] for name in raw["state_dict"]} == {"policy"}, "the reference is not part of it"
    assert raw["state_dict"].keys() == module.policy.state_dict(prefix="policy.").keys()
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

    sampling = SamplingParams(max_new_tokens=5)
    with pytest.raises(ValueError, match=r"all 16 reward calls.*broken raised RuntimeError: no such file"):
        fit(make(), rollout=Rollout(rewards=[broken], num_generations=4, sampling=sampling, reward_workers=0))


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
        fit(module, rollout=Rollout(rewards=[nothing], reward_workers=0, num_generations=4, sampling=sampling))
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
        ({"lr_decay": "exponential"}, "none, linear, cosine"),
        (
            {"bypass_mode": True, "corrections": [TIS()]},
            "bypass_mode=true puts the ratio.*tis_token would count it twice",
        ),
    ],
    ids=["TBPO and TIS", "ScoreCentering and IcePop", "path", "learning rate", "decay", "bypass and TIS"],
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


def test_a_decay_ends_with_the_run():
    trainer = fit(make(lr_decay="linear"), steps=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0
    with pytest.raises(ValueError, match=r"trainer\.max_steps, which is not set"):
        fit(make(lr_decay="linear"), steps=-1, max_epochs=1)


def test_evaluation_needs_no_end_of_a_decay():
    make(lr_decay="linear").trainer = trainer_of(TrainerFn.VALIDATING)
    with pytest.raises(ValueError, match=r"trainer\.max_steps, which is not set"):
        make(lr_decay="linear").trainer = trainer_of(TrainerFn.FITTING)


def trainer_of(fn):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=-1)
    trainer.state.fn = fn
    return trainer


class Seen(GRPO):
    """GRPO that keeps what it was given."""

    inputs: ClassVar[list[LossInputs]] = []

    def __call__(self, inputs):
        self.inputs.append(inputs)
        return super().__call__(inputs)


@pytest.fixture
def seen():
    Seen.inputs.clear()
    return Seen.inputs


def test_kl_against_the_policy_before_training():
    """Zero at first but for BF16, then above; neither state nor optimizer know the reference."""
    module, values = make(recipe=QuantRecipe(), loss=GRPO(beta=0.1), learning_rate=3e-3), []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            values.append(trainer.callback_metrics["kl"].item())

    trainer = fit(module, Watch(), steps=4)
    assert 0 <= values[0] < 1e-4
    assert values[3] > 20 * values[0] + 1e-4
    assert not any("reference" in name for name in [*module.state_dict(), *dict(module.named_modules())])
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(p) for p in module.policy.parameters()}
    assert not any(p.requires_grad or p.grad is not None for p in module.reference.model.parameters())


def test_a_strong_kl_holds_the_policy_back():
    ends = {}
    for beta in (1e-9, 10.0):
        module = make(recipe=QuantRecipe(), loss=GRPO(beta=beta, kl=K3("k2")), learning_rate=1e-3)
        ends[beta] = fit(module, steps=6).callback_metrics["kl"]
    assert ends[10.0] < 0.5 * ends[1e-9]


def test_no_reference_is_loaded_without_a_kl_term():
    module = make()
    assert "kl" not in fit(module).callback_metrics
    assert module.reference.model is None


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_under_fp4_the_kl_begins_with_what_rounding_costs(dtype):
    metrics = fit(make(loss=GRPO(beta=0.1), reference=ReferenceConfig(dtype=dtype))).callback_metrics
    assert 1e-3 < metrics["kl"] < 0.2


def test_a_reference_that_is_not_there_is_refused_before_anything_is_drawn(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("drew")

    monkeypatch.setattr(Rollout, "_generate", never)
    with pytest.raises(ValueError, match="no directory"):
        fit(make(loss=GRPO(beta=0.1), reference=ReferenceConfig(path="no/such/dir")))


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_bypass_mode_clips_around_the_rollout_and_spares_a_forward_pass(num_minibatches, seen, monkeypatch):
    scored = []
    monkeypatch.setattr(PolicyModule, "_score_policy", lambda *a, **k: scored.append(1))
    recipe = QuantRecipe(**W4A4KV4, trainer="bf16")  # the two sides differ
    fit(make(recipe=recipe, loss=Seen(), bypass_mode=True, corrections=[Veto()], num_minibatches=num_minibatches))
    assert not scored
    for inputs in seen:
        assert inputs.old_logprobs_BT is inputs.rollout_logprobs_BT
        gap = (inputs.policy_logprobs_BT - inputs.old_logprobs_BT)[inputs.mask_BT]
        assert gap.abs().max() > 1e-3


def test_without_it_the_old_policy_is_the_trainers_own(seen):
    recipe = QuantRecipe(**W4A4KV4, trainer="bf16")
    fit(make(recipe=recipe, loss=Seen(), num_minibatches=2, corrections=[TIS()]), steps=2)
    first, second = seen[0], seen[-1]
    torch.testing.assert_close(first.policy_logprobs_BT, first.old_logprobs_BT, atol=1e-5, rtol=0)
    assert (second.policy_logprobs_BT - second.old_logprobs_BT)[second.mask_BT].abs().max() > 1e-4, "one step later"
    rho = (first.old_logprobs_BT - first.rollout_logprobs_BT).exp().clamp(max=2.0)
    torch.testing.assert_close(first.weights_BT[first.mask_BT], rho[first.mask_BT])


def test_an_entropy_bonus_raises_the_entropy():
    def entropy(coef: float) -> float:
        pull = fit(make(Sgd, loss=PPO(entropy_coef=coef), learning_rate=0.02, max_grad_norm=1e9), steps=5)
        return pull.callback_metrics["entropy"].item()

    assert entropy(1.0) > entropy(0.0) + 0.02 > entropy(-1.0) + 0.04


def test_a_length_penalty_is_logged_and_the_reward_stays_what_it_was():
    plain = fit(make()).callback_metrics
    metrics = fit(make(length_penalty=SoftOverlong(cache=5))).callback_metrics
    assert metrics["length_penalty"] < -0.1
    assert metrics["reward"] == plain["reward"]
    assert "length_penalty" not in plain


def flat_for_most(completion, problem):
    """One problem in three can be learned from."""
    return float(sum(map(ord, completion)) % 7) if sum(map(ord, problem.prompt)) % 3 == 0 else 1.0


@pytest.mark.parametrize("recipe", [QuantRecipe(), GUIDED], ids=["BF16", "guided"])
def test_dynamic_sampling_fills_a_batch_with_groups_that_teach(recipe):
    kept = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            kept.append(([prompt.uid for prompt in batch.prompts], batch.rewards_B.view(-1, 4), batch.completions))

    def draw():
        rollout = Rollout(
            rewards=[flat_for_most],
            reward_workers=0,
            num_generations=4,
            sampling=SamplingParams(max_new_tokens=5),
            dynamic_sampling=DynamicSampling(max_refills=8),
        )
        return fit(make(recipe=recipe), Watch(), rollout=rollout, steps=2).callback_metrics

    metrics, again = draw(), draw()
    assert metrics["dynamic_sampling/refills"] >= 1
    assert metrics["dynamic_sampling/groups_drawn"] > 4
    assert metrics["dynamic_sampling/flat_groups_left"] == 0
    assert metrics["frac_reward_zero_std"] == 0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4, "every completion is scored with its own guidance"
    assert metrics["dynamic_sampling/dropped_tokens"] > 0
    lengths = sum(len(completion.token_ids) for completion in kept[1][2])
    assert metrics["num_tokens"] == lengths + metrics["dynamic_sampling/dropped_tokens"]
    for uids, rewards, _ in kept:
        assert len(set(uids)) == 4
        assert (rewards.amax(1) > rewards.amin(1)).all()
    assert [uids for uids, _, _ in kept[:2]] == [uids for uids, _, _ in kept[2:]], (
        "the same seed draws the same prompts"
    )
    assert again["loss"] == metrics["loss"]


def test_nothing_is_kept_from_step_to_step():
    """An old snapshot, record or batch that stays alive shows as tensors that add up."""
    counts = {}

    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step in (3, 6):
                gc.collect()
                counts[trainer.global_step] = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    fit(make(), Count(), steps=6)
    assert counts[6] <= counts[3]

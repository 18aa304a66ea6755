"""`rollout.max_version_diff=1`: the same prompts, drawn one rollout ahead; errors, Ctrl-C and resume as without it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from numerics import assert_bit_equal
from trace_lightning.callbacks import Rollout, RunCheckpoint
from trace_lightning.data import PromptDataModule
from trace_lightning.loading import LoaderChain
from trace_lightning.module import PolicyModule
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rl import TIS
from trace_lightning.rollout.ahead import DrawingStopped
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.refill import DynamicSampling
from trace_lightning.rollout.sm_partition import partition_of
from trace_lightning.tasks import TwoDigitAddition
from trace_lightning.types import SamplingParams

RECIPE = QuantRecipe(
    weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=GuidanceConfig(mode="parity", audit_sequences=4)
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# What is drawn on some of a GPU's SMs, and on all of them.
SMS = [("cpu", None), pytest.param("cuda", None, marks=pytest.mark.gpu), pytest.param("cuda", 0, marks=pytest.mark.gpu)]
SIX = {"attn_in", "o_in", "mlp_in", "down_in", "k", "v"}


class FewSums(TwoDigitAddition):
    """Three batches of four."""

    def train_problems(self):
        return list(super().train_problems())[:12]


class Keep(Callback):
    """The batches, the weights before each of them, and what was logged."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.versions: list[float] = []
        self.heldout: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.weights.append({name: p.detach().clone() for name, p in module.policy.named_parameters()})

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.versions.append(trainer.callback_metrics.get("rollout/version_diff", torch.tensor(-1.0)).item())

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.heldout.append((trainer.global_step, batch.policy_version))

    @property
    def uids(self) -> list[list[int]]:
        return [[prompt.uid for prompt in batch.prompts] for batch in self.batches]


class Counting(LocalEngine):
    """Counts its rollouts; `act` runs in each of them, first thing."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = 0
        self.act = lambda call, progress: None

    def generate(self, *args, **kwargs):
        self.calls += 1
        self.act(self.calls, kwargs["progress"])
        return super().generate(*args, **kwargs)


def make_rollout(**settings: Any) -> Rollout:
    defaults = {"num_generations": 4, "sampling": SamplingParams(max_new_tokens=5), "max_version_diff": 1}
    return Rollout(**(defaults | settings))


def make_module(**settings: Any) -> PolicyModule:
    defaults = {"path": "builtin:tiny-qwen3", "recipe": RECIPE, "learning_rate": 1e-3, "corrections": [TIS()]}
    return PolicyModule(**(defaults | settings))


def fit(rollout: Rollout, *callbacks: Callback, module: PolicyModule | None = None, resume: Any = None, **trainer: Any):
    pl.seed_everything(0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    settings = {"accelerator": "cpu", "limit_val_batches": 0, "enable_model_summary": False} | quiet | trainer
    fitted = pl.Trainer(callbacks=[rollout, *callbacks], **settings)
    module = module or make_module()
    fitted.fit(module, PromptDataModule(FewSums(), batch_size=4, heldout_size=4), ckpt_path=resume)
    return module


def drawing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rollout-ahead")]


class ByHand(Rollout):
    """The same without a thread: before each step, load the weights that the step before began with, and draw."""

    kept: dict[str, torch.Tensor] | None = None

    def should_sync(self, optimizer_steps: int) -> bool:
        return False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        now = {name: p.detach().clone() for name, p in module.policy.named_parameters()}
        self._ensure_engine(trainer, module)
        self.engine.load_weights((self.kept or now).items(), version=max(0, trainer.global_step - 1))
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self.kept = now


def test_an_update_equals_that_of_an_explicit_simulation() -> None:
    """Three steps bit for bit: the prompts, every completion, its log-probs, and the weights at the end."""
    by_hand, expected, found = ByHand(num_generations=4, sampling=SamplingParams(max_new_tokens=5)), Keep(), Keep()
    by_hand.load_state_dict({"rollouts": 0, "widened": True})
    reference = fit(by_hand, expected, max_steps=3)
    module = fit(make_rollout(), found, max_steps=3)
    assert found.uids == expected.uids
    for mine, theirs in zip(found.batches, expected.batches, strict=True):
        assert [c.token_ids for c in mine.completions] == [c.token_ids for c in theirs.completions]
        assert_bit_equal(mine.rollout_logprobs_BT, theirs.rollout_logprobs_BT)
        assert mine.policy_version == theirs.policy_version
    for (name, value), other in zip(module.policy.named_parameters(), reference.policy.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert found.versions == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("device", "sms"), SMS)
def test_completions_come_from_the_weights_before(device: str, sms: int | None) -> None:
    """Drawn again after the run by an engine of its own: tokens, log-probs and record, while the trainer moved on."""
    keep = Keep()
    module = fit(
        make_rollout(ahead_sms=sms), keep, max_steps=4, accelerator="gpu" if device == "cuda" else "cpu", devices=1
    )
    engine = LocalEngine(verify=False)  # it would compare with the weights of the end
    policy = copy.deepcopy(module.policy).to(device)
    engine.setup(policy, module.tokenizer, RECIPE, dtype=torch.float32)
    engine.widen_guidance()
    for step, batch in enumerate(keep.batches):
        engine.load_weights(keep.weights[max(0, step - 1)].items(), version=max(0, step - 1))
        again = engine.generate(batch.prompts, batch.sampling, num_samples=4, record_guidance=True)
        assert [c.token_ids for c in batch.completions] == [c.token_ids for c in again.completions]
        assert [c.logprobs for c in batch.completions] == [c.logprobs for c in again.completions]
        assert {c.policy_version for c in batch.completions} == {max(0, step - 1)}
        assert {site for _, site in batch.guidance.tables} == SIX
        for key, table in again.guidance.tables.items():
            for mine, theirs in zip(batch.guidance.tables[key].tensors(), table.tensors(), strict=True):
                assert_bit_equal(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_are_those_of_mode_0_and_nothing_is_drawn_for_nobody(device: str) -> None:
    """Two epochs of three batches with a validation after each, which is on-policy; then a limit of steps."""
    uids = {}
    for diff in (0, 1):
        engine, keep = Counting(), Keep()
        epochs = {"max_epochs": 2, "limit_val_batches": 1, "accelerator": "gpu" if device == "cuda" else "cpu"}
        fit(make_rollout(engine=engine, max_version_diff=diff), keep, **epochs, devices=1)
        uids[diff] = keep.uids
        assert engine.calls == 6 + 2
        assert keep.heldout == [(3, 3), (6, 6)]
    assert uids[1] == uids[0]
    assert len({tuple(uid) for uid in uids[1]}) == 6
    assert keep.versions == [0.0] + 5 * [1.0]
    engine = Counting()
    fit(make_rollout(engine=engine), max_steps=2, max_epochs=-1)
    assert engine.calls == 2
    assert drawing_threads() == []


@pytest.mark.gpu
def test_on_parts_of_a_gpu_a_run_draws_what_it_draws_on_all_of_it() -> None:
    """Completions and rewards of two epochs with a validation after each, and which stream everybody was on."""
    pytest.importorskip("cuda.bindings", reason="needs the package cuda-bindings, which CUDA builds of torch bring")
    default, drawn = torch.cuda.current_stream(), {}
    parts = partition_of(default.device, None)

    class OnStreams(Counting):
        def generate(self, *args, **kwargs):
            streams.append(torch.cuda.current_stream())
            return super().generate(*args, **kwargs)

    class KeepStreams(Keep):
        def on_train_batch_end(self, *args):
            trainers.add(torch.cuda.current_stream())
            super().on_train_batch_end(*args)

    for sms in (0, None):
        keep, engine, streams, trainers = KeepStreams(), OnStreams(), [], set()
        rollout = make_rollout(engine=engine, ahead_sms=sms, sampling=SamplingParams(max_new_tokens=12))
        fit(rollout, keep, max_epochs=2, limit_val_batches=1, accelerator="gpu", devices=1)
        assert engine._workspace.graphs.num_replays > 0
        assert torch.cuda.current_stream() == default
        drawn[sms] = [([c.token_ids for c in batch.completions], batch.rewards_B.tolist()) for batch in keep.batches]
        assert trainers == {default if sms == 0 else parts.trainer}
        # Before the first step, and in both validations, the trainer waits.
        ahead = [stream for call, stream in enumerate(streams) if call not in (0, 4, 7)]
        assert set(ahead) == {streams[0] if sms == 0 else parts.rollout}
        assert {streams[0], streams[4], streams[7]}.isdisjoint({default, parts.rollout, parts.trainer})
    assert drawn[None] == drawn[0]


def test_with_refills_all_of_a_batch_is_of_one_version() -> None:
    """And the policy stays in training mode while it trains."""
    keep, engine, module, modes = Keep(), Counting(), make_module(), []
    rollout = make_rollout(engine=engine, dynamic_sampling=DynamicSampling(max_refills=1))
    engine.act = lambda call, progress: modes.append((rollout._ahead.is_behind, module.training))
    fit(rollout, keep, module=module, max_steps=2)
    assert modes[0] == (False, False)
    assert (True, True) in modes  # a refill may be drawn when the trainer waits already
    assert [{c.policy_version for c in batch.completions} for batch in keep.batches] == [{0}, {0}]
    assert "dynamic_sampling/refills" in keep.batches[1].stats
    assert keep.versions == [0.0, 1.0]


def test_an_error_in_the_background_ends_the_run_with_its_own_message() -> None:
    engine = Counting()

    def act(call: int, progress: Any) -> None:
        if call == 2:
            raise MemoryError("no pages are left")

    engine.act = act
    with pytest.raises(MemoryError, match="no pages are left"):
        fit(make_rollout(engine=engine), max_steps=3)
    assert drawing_threads() == []


def test_ctrl_c_leaves_no_thread_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    """While the trainer waits for the third rollout; resumed, every prompt comes once, on-policy at first."""
    whole, first, second = Keep(), Keep(), Keep()
    fit(make_rollout(), whole, max_steps=5)
    rollout, stopped = make_rollout(engine=Counting()), []

    def act(call: int, progress: Any) -> None:
        if call == 3:
            while rollout._ahead.is_behind:  # the second step trains
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            try:
                for _ in range(20_000):  # a rollout of 20 s, were it not stopped
                    progress(0, 1)
                    time.sleep(0.001)
            except DrawingStopped:
                stopped.append(call)
                raise

    rollout.engine.act = act
    # Not as it was: a process that a shell started in the background ignores Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    try:
        with pytest.raises(SystemExit):
            fit(rollout, first, RunCheckpoint(), max_steps=5, **folder)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C from here on
    assert drawing_threads() == []
    assert stopped == [3]
    (path,) = tmp_path.rglob("last.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == 2
    fit(make_rollout(), second, max_steps=5, resume=path)
    assert first.uids + second.uids == whole.uids
    assert second.versions == [0.0, 1.0, 1.0]
    assert [batch.sampling.seed for batch in second.batches] == [batch.sampling.seed for batch in whole.batches[2:]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_version_diff": 2}, "max_version_diff=2: 0 draws"),
        ({"ahead_sms": -8}, "ahead_sms=-8: a number of SMs"),
        ({"engine": LocalEngine(keep_snapshot=False)}, "keep_snapshot=false gives"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make_rollout(**settings), max_steps=1)


def test_a_loader_without_a_next_batch_is_refused() -> None:
    class Plain(PromptDataModule):
        def train_dataloader(self):
            return LoaderChain([super().train_dataloader()])

    quiet = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(callbacks=[make_rollout()], max_steps=1, accelerator="cpu", **quiet)
    with pytest.raises(ValueError, match="the training loader has no `peek`"):
        trainer.fit(make_module(), Plain(FewSums(), batch_size=4))


@pytest.mark.parametrize(("settings", "said"), [({"corrections": []}, True), ({}, False)])
def test_old_completions_without_a_correction_are_said_once(settings: dict[str, Any], said: bool, caplog: Any) -> None:
    fit(make_rollout(), max_steps=1, module=make_module(**settings))
    assert ("nothing weighs them by the ratio" in caplog.text) == said


def test_the_callback_can_be_pickled() -> None:
    """As launchers do that spawn their ranks."""
    assert pickle.loads(pickle.dumps(make_rollout())).max_version_diff == 1

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from trace_lightning.callbacks import Rollout, RolloutProgressBar, progress
from trace_lightning.callbacks.progress import short_metrics

METRICS = {"reward": 0.5, "sampling/sampling_logp_difference/mean": 0.0, "throughput/rollout_tokens_per_s": 6404.8}


def fake_trainer(bar: RolloutProgressBar, **settings) -> SimpleNamespace:
    state = {"sanity_checking": False, "validating": False, "testing": False, "predicting": False, "training": True}
    state |= {"is_global_zero": True, "global_step": 0, "max_steps": 20, "max_epochs": -1, "num_training_batches": 20}
    state |= {"callback_metrics": METRICS, "callbacks": [Rollout(), bar], "progress_bar_callback": bar}
    state |= {"state": SimpleNamespace(fn="fit"), "fit_loop": SimpleNamespace(total_batch_idx=0)}
    return SimpleNamespace(**(state | settings))


class TestLines:
    @pytest.fixture
    def output(self, monkeypatch) -> io.StringIO:
        console = Console(file=io.StringIO(), width=200)
        monkeypatch.setattr(progress, "shared_console", lambda: console)
        return console.file

    def run(self, bar: RolloutProgressBar, num_steps: int) -> None:
        trainer = fake_trainer(bar, max_steps=num_steps)
        bar.setup(trainer, None, "fit")
        bar.on_train_start(trainer, None)
        for i in range(num_steps):
            trainer.global_step, trainer.fit_loop.total_batch_idx = i + 1, i
            bar.on_train_batch_end(trainer, None, None, None, i)

    def test_first_every_nth_and_last(self, output) -> None:
        bar = RolloutProgressBar(every_n_steps=4)
        assert not bar.live
        self.run(bar, 10)
        lines = output.getvalue().splitlines()
        assert [line.split()[1] for line in lines] == ["1/10", "4/10", "8/10", "10/10"]
        assert "reward 0.500  |Δlogp| 0  tok/s 6,405" in lines[0]
        assert "held-out" not in output.getvalue()  # never measured here
        assert "left" in lines[0]
        assert "left" not in lines[-1]

    def test_long_silence_is_broken(self, output) -> None:
        self.run(RolloutProgressBar(every_n_steps=100, max_silence=0.0), 3)
        assert len(output.getvalue().splitlines()) == 3

    def test_other_ranks_and_rate_zero_are_silent(self, output) -> None:
        self.run(RolloutProgressBar(refresh_rate=0), 3)
        bar = RolloutProgressBar()
        bar.disable()
        self.run(bar, 3)
        assert output.getvalue() == ""


class TestLive:
    def test_phases_and_counts_are_shown(self) -> None:
        output = io.StringIO()
        bar = RolloutProgressBar(console_kwargs={"force_terminal": True, "file": output, "width": 140})
        assert bar.live
        trainer = fake_trainer(bar)
        bar.setup(trainer, None, "fit")
        rollout = trainer.callbacks[0]
        bar.on_train_start(trainer, None)
        bar.train_progress_bar_id = bar._add_task(20, "starting")
        rollout.on_phase("rollout")
        rollout.progress(120, 512)
        bar._update_metrics(trainer, None)
        bar.refresh(hard=True)
        bar._stop_progress()
        printed = output.getvalue()
        assert "rollout 120/512" in printed
        assert "0/20" in printed
        assert "reward: 0.500" in printed
        assert "tok/s: 6,405" in printed


def test_short_metrics_leave_out_what_was_not_measured() -> None:
    assert short_metrics({"mean_abs_dlogp": 0.00123}) == {"|Δlogp|": "1.2e-03"}
    assert short_metrics({}) == {}


def test_out_of_range() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0"):
        RolloutProgressBar(every_n_steps=0)

from __future__ import annotations

import json
import math

import pytest
import torch

from trace_lightning.callbacks import RunSummary
from trace_lightning.callbacks.curves import draw_curves
from trace_lightning.callbacks.history import METRICS, RunHistory, json_safe, pick
from trace_lightning.callbacks.summary import as_csv, summary_table
from trace_lightning.report.charts import PHASES
from trace_lightning.report.series import running_mean


def history(num_steps: int, **columns: float) -> RunHistory:
    """Rewards 0, 1, 2, ...; other columns constant."""
    steps = [{"step": float(i), "reward": float(i), **columns} for i in range(num_steps)]
    return RunHistory(steps=steps, heldout=[{"step": 0.0, "reward": 0.25}, {"step": 10.0, "reward": 0.5}], seconds=2.0)


class TestNumbers:
    def test_first_and_last_five(self) -> None:
        summary = history(12).summary()
        assert summary["reward"] == {"first": 2.0, "last": 9.0}
        assert summary["heldout"] == {"first": 0.25, "last": 0.5, "first_step": 0, "last_step": 10}
        assert summary["rollouts"] == 12

    def test_fewer_steps_than_the_window(self) -> None:
        assert history(2).summary()["reward"] == {"first": 0.5, "last": 0.5}

    def test_nothing_measured_is_null(self) -> None:
        summary = RunHistory().summary()
        for group in ("reward", "heldout", "divergence", "code_mismatch", "throughput"):
            assert set(summary[group].values()) == {None}, group

    def test_means_over_measured_steps_only(self) -> None:
        run = history(3, max_abs_dlogp=0.5)
        run.steps[0]["mean_abs_dlogp"], run.steps[2]["mean_abs_dlogp"] = 1.0, 3.0
        run.steps[1]["max_abs_dlogp"] = 4.0
        divergence = run.summary()["divergence"]
        assert divergence == {"mean_abs_dlogp": 2.0, "max_abs_dlogp": 4.0, "k3": None}

    def test_throughput_is_weighted_by_time(self) -> None:
        run = RunHistory()
        run.steps = [
            {"step": 0.0, "tokens_per_s": 10.0, "rollout_s": 9.0, "step_s": 10.0},
            {"step": 1.0, "tokens_per_s": 100.0, "rollout_s": 1.0, "step_s": 10.0},
        ]
        assert run.summary()["throughput"] == {"rollout_tokens_per_s": 19.0, "rollout_share": 0.5}

    def test_positions_and_audit_are_summed_over_the_run(self) -> None:
        run = RunHistory()
        run.add_positions([[2.0, 0.0, 1.0, 1.0], [2.0, 2.0, 4.0, 9.0]])
        run.add_positions([[2.0, 0.0, 3.0, 5.0], [2.0, 2.0, 4.0, 9.0]])
        first = [10.0, 5.0, 5.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0]
        table = {(11, "k"): first}
        run.add_audit(table)
        run.add_audit(table)
        assert table == {(11, "k"): [10.0, 5.0, 5.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0]}
        summary = run.summary()
        assert [b["mean_abs_dlogp"] for b in summary["per_position"]["buckets"]] == [1.0, 2.0]
        assert summary["per_position"]["slope_per_doubling"] == pytest.approx(1.0)
        low, high = summary["per_position"]["slope_95"]
        assert low < 1 < high
        assert run.audit == {"11/k": [2 * value for value in first]}
        assert summary["guidance_sites"]["k"]["code_mismatch_before"] == 0.5
        assert [(row["layer"], row["site"], row["codes"]) for row in run.layer_rows()] == [(11, "k", 20)]

    def test_csv_has_every_column_and_empty_cells(self) -> None:
        assert as_csv([{"a": 1, "b": "x"}, {"a": 2, "c": 0.5}]) == "a,b,c\n1,x,\n2,,0.5\n"

    def test_pick_takes_what_was_measured(self) -> None:
        metrics = {"reward": torch.tensor(0.5), "timing/train_s": 2.0, "unknown": torch.tensor(1.0)}
        assert pick(METRICS, metrics) == {"reward": 0.5, "train_s": 2.0}
        assert pick(METRICS, {}) == {}

    def test_json_has_neither_nan_nor_infinity(self) -> None:
        safe = json_safe({"a": math.nan, "b": [math.inf, 1.0, -math.inf], "c": "x"})
        assert safe == {"a": None, "b": ["inf", 1.0, "-inf"], "c": "x"}
        json.dumps(safe, allow_nan=False)


class TestState:
    def test_history_travels_as_plain_numbers(self) -> None:
        first, second = RunSummary(), RunSummary()
        first.history = history(3)
        first.history.add_positions([[1.0, 0.0, 2.0, 4.0]])
        first.history.add_audit({(0, "k"): [1.0] * 10})
        state = first.state_dict()
        first.history.steps.append({"step": 3.0})
        first.history.add_positions([[1.0, 0.0, 2.0, 4.0]])
        second.load_state_dict(json.loads(json.dumps(state)))
        assert second.history.steps == history(3).steps
        assert second.history.positions == [[1.0, 0.0, 2.0, 4.0]]
        assert second.history.audit_table == {(0, "k"): [1.0] * 10}

    def test_a_checkpoint_from_before_positions_were_kept_is_read(self) -> None:
        summary = RunSummary()
        summary.load_state_dict({"steps": [], "heldout": [], "seconds": 1.0})
        assert summary.history.positions == []

    def test_table_of_a_run_without_heldout(self) -> None:
        summary = RunHistory().summary() | {"status": "failed", "steps": 0, "model": "m", "task": None}
        table = summary_table(summary | {"recipe": {"label": "W16A16KV16"}})
        assert table.columns[1]._cells[:2] == ["- → -", "-"]


class TestCurves:
    @pytest.mark.parametrize(
        ("num_steps", "value"),
        [(0, 0.0), (1, 1e-4), (1, math.nan), (2, 0.0), (2, math.inf), (50, 1e-4), (50, math.inf), (300, math.nan)],
    )
    def test_every_history_can_be_drawn(self, tmp_path, num_steps: int, value: float) -> None:
        columns = dict.fromkeys([*METRICS, *(f"{phase}_s" for phase in PHASES)], 0.5)
        columns |= dict.fromkeys(("mean_abs_dlogp", "max_abs_dlogp", "k3", "codes_before", "codes_after"), value)
        run = history(num_steps, **{k: v for k, v in columns.items() if k != "reward"})
        if num_steps > 1:
            run.add_positions([[float(num_steps), float(k), 0.0 if value == 0 else k, k] for k in range(3)])
            run.add_audit({(0, "attn_in"): [1.0] * 10, (1, "k"): [1.0] * 5 + [0.0] * 5})
            run.steps[0]["k3"] = 0.0  # zeros between positive values: no point may fall off a log axis
        draw_curves(run, tmp_path / "new" / "curves.png", "title")
        assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["curves.png"]

    def test_zeros_stay_inside_a_mismatch_axis(self) -> None:
        from matplotlib.figure import Figure

        from trace_lightning.callbacks.curves import _mismatch

        axis = Figure().subplots()
        run = history(3, mean_abs_dlogp=1e-3)
        run.steps[1]["mean_abs_dlogp"] = 0.0
        _mismatch(axis, run)
        assert axis.get_yscale() == "symlog"
        assert axis.get_ylim()[0] <= 0 < 1e-3 < axis.get_ylim()[1]

    def test_running_mean_leaves_out_nan(self) -> None:
        values = running_mean([1.0, math.nan, 3.0, 5.0], 2)
        assert values == [1.0, 1.0, 3.0, 4.0]
        assert math.isnan(running_mean([math.nan], 2)[0])

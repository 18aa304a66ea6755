"""From sums over audited rows to what is logged and written: by hand, and absent where nothing was measured."""

from __future__ import annotations

import pytest

from trace_lightning.metrics.audit import audit_metrics, audit_values, inner_step_metrics, layer_rows, site_means

#          elements before by_one after by_one tokens gaps: before nearest after rollout
FIRST = [100.0, 20.0, 15.0, 2.0, 1.0, 4.0, 16.0, 9.0, 1.0, 100.0]
SECOND = [300.0, 30.0, 30.0, 0.0, 0.0, 4.0, 64.0, 4.0, 0.0, 400.0]
UNKNOWN = [100.0, 10.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # only the parity of the scales was recorded


def test_values_of_one_site_by_hand() -> None:
    assert audit_values(FIRST) == pytest.approx(
        {
            "code_mismatch_before": 0.2,
            "code_mismatch_before_off_by_one": 0.15,
            "code_mismatch_after": 0.02,
            "code_mismatch_after_off_by_one": 0.01,
            "d_act_before": 2.0,  # sqrt(16 / 4 tokens)
            "d_act_rel_before": 0.4,  # sqrt(16 / 100)
            "d_act_nearest": 1.5,
            "d_act_rel_nearest": 0.3,
            "d_act_after": 0.5,
            "d_act_rel_after": 0.1,
        }
    )


def test_unknown_values_and_nothing_at_all_are_absent() -> None:
    assert all(name.startswith("code_mismatch") for name in audit_values(UNKNOWN))
    assert audit_values([0.0] * 10) == {}
    assert audit_metrics({}) == {}
    assert audit_metrics({(0, "k"): [0.0] * 10}) == {}
    assert layer_rows({(0, "k"): [0.0] * 10}) == []


def test_sites_are_means_over_layers_and_totals_are_over_codes() -> None:
    table = {(1, "k"): UNKNOWN, (0, "attn_in"): FIRST, (1, "attn_in"): SECOND}
    assert list(site_means(table)) == ["attn_in", "k"]
    got = audit_metrics(table)
    assert got == pytest.approx(
        {
            "guidance/code_mismatch_before": 60 / 500,
            "guidance/code_mismatch_after": 7 / 500,
            "guidance/code_mismatch_after_off_by_one": 6 / 500,
            "guidance/attn_in/code_mismatch_before": (0.2 + 0.1) / 2,
            "guidance/attn_in/code_mismatch_after": (0.02 + 0) / 2,
            "guidance/attn_in/d_act_rel_before": (0.4 + 0.4) / 2,
            "guidance/attn_in/d_act_rel_after": (0.1 + 0) / 2,
            "guidance/k/code_mismatch_before": 0.1,
            "guidance/k/code_mismatch_after": 0.05,
        }
    )


def test_rows_are_in_order_of_layers_and_sites() -> None:
    rows = layer_rows({(1, "k"): UNKNOWN, (10, "k"): FIRST, (1, "attn_in"): SECOND, (0, "k"): [0.0] * 10})
    assert [(row["layer"], row["site"], row["codes"]) for row in rows] == [
        (1, "attn_in", 300),
        (1, "k", 100),
        (10, "k", 100),
    ]
    assert rows[0]["d_act_rel_nearest"] == pytest.approx(0.1)
    assert "d_act_rel_nearest" not in rows[1]


def test_inner_steps_are_told_apart_where_there_are_several() -> None:
    assert inner_step_metrics([FIRST]) == {}
    assert inner_step_metrics([FIRST, [0.0] * 10, SECOND]) == pytest.approx(
        {
            "guidance/inner_step_0/code_mismatch_after": 0.02,
            "guidance/inner_step_0/d_act_rel_after": 0.1,
            "guidance/inner_step_2/code_mismatch_after": 0.0,
            "guidance/inner_step_2/d_act_rel_after": 0.0,
        }
    )

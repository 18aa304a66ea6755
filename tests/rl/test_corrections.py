"""Rollout corrections by hand, the length trap, and what may be combined."""

from __future__ import annotations

import math

import jsonargparse
import pytest
import torch
from torch import Tensor

from trace_lightning.rl import MIS, TIS, Correction, apply_corrections, merge_metrics

RHO = [[1.5, 0.4, 1.0], [4.0, 0.5, 9.0]]
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.fixture
def logprobs() -> tuple[Tensor, Tensor]:
    rollout = torch.full((2, 3), -1.0)
    return (rollout + torch.tensor(RHO).log()).requires_grad_(), rollout


def mean(metrics: dict, name: str) -> float:
    total, count = metrics[f"rollout_corr/{name}"]
    return (total / count).item()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TIS(), [[1.5, 0.4, 1.0], [2.0, 0.5, 0.0]]),
        (TIS(level="sequence", cap=1.8), [[0.6, 0.6, 0.6], [1.8, 1.8, 0.0]]),
        (MIS(), [[1.5, 0.0, 1.0], [0.0, 0.5, 0.0]]),
        (MIS(level="sequence", low=0.0, high=1.9), [[0.6, 0.6, 0.6], [0.0, 0.0, 0.0]]),
        (MIS(level="geometric", low=0.9, high=1.5), [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
        (MIS(level="geometric", low=0.8, high=1.3), [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
    ids=repr,
)
def test_weights_by_hand(logprobs, correction: Correction, expected: list[list[float]]) -> None:
    # products .6 and 2; geometric means .6 ** (1 / 3) = .843 and 2 ** (1 / 2) = 1.414; the 9 is outside the mask
    weights = correction(*logprobs, MASK).weights_BT
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert not weights.requires_grad


def test_metrics_by_hand(logprobs) -> None:
    assert mean(TIS()(*logprobs, MASK).metrics, "tis_token/mean_weight") == pytest.approx(5.4 / 5)
    assert mean(TIS()(*logprobs, MASK).metrics, "tis_token/capped_share") == pytest.approx(1 / 5)
    sequence = TIS(level="sequence", cap=1.8)(*logprobs, MASK).metrics
    assert mean(sequence, "tis_sequence/capped_share") == pytest.approx(1 / 2)
    assert mean(MIS()(*logprobs, MASK).metrics, "mis_token/masked_share") == pytest.approx(2 / 5)
    assert mean(MIS()(*logprobs, MASK).metrics, "mis_token/mean_weight") == pytest.approx(3 / 5)
    geometric = MIS(level="geometric", low=0.9, high=1.5)(*logprobs, MASK).metrics
    assert mean(geometric, "mis_geometric/masked_share") == pytest.approx(1 / 2)
    assert mean(geometric, "mis_geometric/mean_weight") == pytest.approx(2 / 5)


def test_the_band_includes_its_ends() -> None:
    old = torch.tensor([[0.0, math.log(2.0), math.log(0.5)]])
    weights = MIS(low=0.5, high=2.0)(old, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)).weights_BT
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.5]]))


def test_a_product_grows_with_length_and_a_geometric_mean_does_not() -> None:
    old, rollout, mask = torch.full((1, 100), -1.0), torch.full((1, 100), -1.012), torch.ones(1, 100, dtype=torch.bool)
    product = MIS(low=0.0, high=3.0, level="sequence")(old, rollout, mask)
    assert mean(product.metrics, "mis_sequence/masked_share") == 1.0
    assert (product.weights_BT == 0).all()
    kept = MIS(low=0.0, high=3.4, level="sequence")(old, rollout, mask)
    torch.testing.assert_close(kept.weights_BT, torch.full((1, 100), math.exp(1.2)), atol=1e-4, rtol=1e-4)  # 3.32
    geometric = MIS(low=0.98, high=1.02, level="geometric")(old, rollout, mask)
    assert mean(geometric.metrics, "mis_geometric/masked_share") == 0.0
    assert (geometric.weights_BT == 1).all()
    narrow = MIS(low=0.99, high=1.011, level="geometric")(old, rollout, mask)  # exp(.012) = 1.0121
    assert mean(narrow.metrics, "mis_geometric/masked_share") == 1.0


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize(
    "correction", [TIS(cap=5.0), TIS(cap=5.0, level="sequence"), MIS(), MIS(level="sequence"), MIS(level="geometric")]
)
def test_extreme_gaps_stay_finite(correction: Correction, gap: float) -> None:
    outputs = correction(torch.full((2, 50), gap), torch.zeros(2, 50), torch.ones(2, 50, dtype=torch.bool))
    assert outputs.weights_BT.isfinite().all()
    assert (outputs.weights_BT <= 5).all()


@pytest.mark.parametrize("correction", [TIS(), TIS(level="sequence"), MIS(), MIS(level="geometric")], ids=repr)
def test_masked_entries_and_empty_sequences_count_nowhere(correction: Correction) -> None:
    old, rollout = torch.full((2, 3), torch.nan), torch.full((2, 3), torch.nan)
    old[0, :2], rollout[0, :2] = -1.0, -1.0
    mask = torch.tensor([[True, True, False], [False, False, False]])
    outputs = correction(old, rollout, mask)
    assert outputs.weights_BT.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    by_share = {name.rpartition("/")[2]: pair for name, pair in outputs.metrics.items()}
    assert by_share.pop("mean_weight")[1] == 2
    ((_, (total, count)),) = by_share.items()
    assert total == 0
    assert count == (1 if correction.level != "token" else 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("correction", [TIS(), TIS(level="sequence"), MIS(), MIS(level="geometric", low=0.9)], ids=repr)
def test_metrics_merge_to_those_of_the_union(logprobs, correction: Correction) -> None:
    whole = correction(*logprobs, MASK).metrics
    merged = merge_metrics(
        correction(logprobs[0][i : i + 1], logprobs[1][i : i + 1], MASK[i : i + 1]).metrics for i in (0, 1)
    )
    for name, (total, count) in whole.items():
        torch.testing.assert_close(merged[name][0], total)
        assert merged[name][1] == count


def test_no_correction_is_weight_one_under_the_mask(logprobs) -> None:
    outputs = apply_corrections([], *logprobs, MASK)
    assert torch.equal(outputs.weights_BT, MASK.float())
    assert outputs.metrics == {}


def test_a_rejection_combines_with_one_weight(logprobs) -> None:
    outputs = apply_corrections([TIS(), MIS(level="geometric", low=0.9, high=1.5)], *logprobs, MASK)
    torch.testing.assert_close(outputs.weights_BT, torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.5, 0.0]]))
    assert {name.split("/")[1] for name in outputs.metrics} == {"tis_token", "mis_geometric"}


def test_two_weights_would_count_the_ratio_twice(logprobs) -> None:
    with pytest.raises(ValueError, match="tis_token, mis_token each multiply"):
        apply_corrections([TIS(), MIS()], *logprobs, MASK)
    with pytest.raises(ValueError, match="listed twice"):
        apply_corrections([MIS(level="geometric"), MIS(level="geometric", low=0.9)], *logprobs, MASK)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"TIS\.cap=0"):
        TIS(cap=0)
    with pytest.raises(ValueError, match=r"TIS\.level='geometric'"):
        TIS(level="geometric")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"MIS band \[1\.2, 2\.0\]"):
        MIS(low=1.2)
    with pytest.raises(ValueError, match=r"MIS\.level='batch'"):
        MIS(level="batch")  # type: ignore[arg-type]


def test_a_list_of_corrections_can_be_named_in_a_config() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--corrections", type=list[Correction])
    text = "[{class_path: TIS, init_args: {cap: 3.0}}, {class_path: MIS, init_args: {level: geometric}}]"
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed within our bounds
    parsed = instantiate(parser.parse_args([f"--corrections={text}"]))
    assert parsed.corrections == [TIS(cap=3.0), MIS(level="geometric")]

"""The named corrections by hand, at their edges, and in a list with others."""

from __future__ import annotations

import math

import jsonargparse
import pytest
import torch
from torch import Tensor

from trace_lightning.rl import (
    MIS,
    TIS,
    Correction,
    GeometricRejection,
    IcePop,
    K3Rejection,
    Rejection,
    Veto,
    apply_corrections,
    merge_metrics,
)
from trace_lightning.rl.losses import LOG_RATIO_LIMIT

RHO = [[1.5, 0.4, 1.0], [4.0, 0.5, 9.0]]
MASK = torch.tensor([[True, True, True], [True, True, False]])
ALL = [IcePop(), GeometricRejection(), Veto(), K3Rejection()]


@pytest.fixture
def logprobs() -> tuple[Tensor, Tensor]:
    rollout = torch.full((2, 3), -1.0)
    return (rollout + torch.tensor(RHO).log()).requires_grad_(), rollout


def mean(metrics: dict, name: str) -> float:
    total, count = metrics[f"rollout_corr/{name}"]
    return (total / count).item()


KEPT, DROPPED = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]
SECOND = [1.0, 1.0, 0.0]  # its third token is outside the mask


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        # geometric means .6 ** (1 / 3) = .843 and 2 ** (1 / 2) = 1.414; the 9 is outside the mask
        (IcePop(), [[1.5, 0.0, 1.0], [4.0, 0.5, 0.0]]),
        (IcePop(low=0.3, high=2.0), [[1.5, 0.4, 1.0], [0.0, 0.5, 0.0]]),
        (GeometricRejection(), [DROPPED, DROPPED]),
        (GeometricRejection(low=0.8, high=1.3), [KEPT, DROPPED]),
        (GeometricRejection(low=0.9, high=1.5), [DROPPED, SECOND]),
        (Veto(), [KEPT, SECOND]),
        (Veto(floor=0.45), [DROPPED, SECOND]),
        (Veto(floor=0.55), [DROPPED, DROPPED]),
        # rho - log rho - 1: .0945, .3163, 0 and 1.6137, .1931; means .1369 and .9034
        (K3Rejection(limit=0.13), [DROPPED, DROPPED]),
        (K3Rejection(limit=0.14), [KEPT, DROPPED]),
        (K3Rejection(limit=0.91), [KEPT, SECOND]),
    ],
    ids=repr,
)
def test_weights_by_hand(logprobs, correction: Correction, expected: list[list[float]]) -> None:
    weights = correction(*logprobs, MASK).weights_BT
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert not weights.requires_grad


def test_metrics_by_hand(logprobs) -> None:
    icepop = IcePop()(*logprobs, MASK).metrics
    assert mean(icepop, "icepop/masked_share") == pytest.approx(1 / 5)
    assert mean(icepop, "icepop/mean_weight") == pytest.approx(7 / 5)
    geometric = GeometricRejection(low=0.9, high=1.5)(*logprobs, MASK).metrics
    assert mean(geometric, "geometric_rejection/masked_share") == pytest.approx(1 / 2)
    assert mean(geometric, "geometric_rejection/mean_weight") == pytest.approx(2 / 5)
    assert mean(Veto(floor=0.45)(*logprobs, MASK).metrics, "veto/masked_share") == pytest.approx(1 / 2)
    assert mean(K3Rejection(limit=0.91)(*logprobs, MASK).metrics, "k3_rejection/masked_share") == 0


def test_geometric_rejection_is_mis_at_its_level(logprobs) -> None:
    for low, high in ((0.9, 1.5), (0.8, 1.3), (0.1, 9.0)):
        named = GeometricRejection(low, high)(*logprobs, MASK).weights_BT
        assert torch.equal(named, MIS(low, high, level="geometric")(*logprobs, MASK).weights_BT)


def test_a_uniform_nvfp4_gap_passes_the_default_and_not_the_bf16_band() -> None:
    old, rollout, mask = torch.full((1, 500), -1.0028), torch.full((1, 500), -1.0), torch.ones(1, 500).bool()
    assert (GeometricRejection()(old, rollout, mask).weights_BT == 1).all()
    assert (GeometricRejection(0.999, 1.001)(old, rollout, mask).weights_BT == 0).all()


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("correction", ALL, ids=repr)
def test_extreme_gaps_are_dropped_and_finite(correction: Correction, gap: float) -> None:
    outputs = correction(torch.full((2, 50), gap), torch.zeros(2, 50), torch.ones(2, 50, dtype=torch.bool))
    dropped = not (isinstance(correction, Veto) and gap > 0)  # a veto looks down only
    assert torch.equal(outputs.weights_BT, torch.full((2, 50), 0.0 if dropped else 1.0))
    assert all(total.isfinite() for total, _ in outputs.metrics.values())


@pytest.mark.parametrize("correction", ALL, ids=repr)
def test_masked_entries_and_empty_sequences_count_nowhere(correction: Correction) -> None:
    old, rollout = torch.full((2, 3), torch.nan), torch.full((2, 3), torch.nan)
    old[0, :2], rollout[0, :2] = -1.0, -1.0
    mask = torch.tensor([[True, True, False], [False, False, False]])
    outputs = correction(old, rollout, mask)
    assert outputs.weights_BT.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    shares = {name.rpartition("/")[2]: (float(total), int(count)) for name, (total, count) in outputs.metrics.items()}
    assert shares == {"mean_weight": (2, 2), "masked_share": (0, 1 if isinstance(correction, Rejection) else 2)}


@pytest.mark.parametrize("correction", ALL, ids=repr)
def test_metrics_merge_to_those_of_the_union(logprobs, correction: Correction) -> None:
    whole = correction(*logprobs, MASK).metrics
    parts = [slice(0, 1), slice(1, 2)]
    merged = merge_metrics(correction(logprobs[0][i], logprobs[1][i], MASK[i]).metrics for i in parts)
    for name, (total, count) in whole.items():
        torch.testing.assert_close(merged[name][0], total)
        assert merged[name][1] == count


def test_rejections_combine_with_each_other_and_with_one_weight(logprobs) -> None:
    rules = [Veto(floor=0.45), TIS(), K3Rejection(limit=0.91), GeometricRejection(0.8, 1.5)]
    outputs = apply_corrections(rules, *logprobs, MASK)
    torch.testing.assert_close(outputs.weights_BT, torch.tensor([DROPPED, [2.0, 0.5, 0.0]]))
    labels = {name.split("/")[1] for name in outputs.metrics}
    assert labels == {"veto", "tis_token", "k3_rejection", "geometric_rejection"}
    with pytest.raises(ValueError, match="icepop, tis_token each multiply"):
        apply_corrections([IcePop(), TIS()], *logprobs, MASK)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"IcePop band \[1\.2, 5\.0\]"):
        IcePop(low=1.2)
    with pytest.raises(ValueError, match=r"GeometricRejection band \[0\.99, 0\.5\]"):
        GeometricRejection(high=0.5)
    for floor in (0.0, 1.0, 0.5 * math.exp(-LOG_RATIO_LIMIT)):
        with pytest.raises(ValueError, match=r"Veto\.floor"):
            Veto(floor)
    with pytest.raises(ValueError, match=r"K3Rejection\.limit=0"):
        K3Rejection(limit=0)


def test_a_list_of_them_can_be_named_in_a_config() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--corrections", type=list[Correction])
    text = "[{class_path: Veto}, {class_path: IcePop, init_args: {high: 4.0}}, {class_path: GeometricRejection}]"
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed within our bounds
    parsed = instantiate(parser.parse_args([f"--corrections={text}"]))
    assert parsed.corrections == [Veto(), IcePop(high=4.0), GeometricRejection()]

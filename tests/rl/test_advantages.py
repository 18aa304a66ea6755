"""Group advantages: values by hand, rewards that are missing, groups that teach nothing."""

from __future__ import annotations

import warnings

import pytest
import torch

from trace_lightning.rl import (
    AdvantageEstimator,
    BatchAdvantage,
    GroupAdvantage,
    LeaveOneOut,
    group_statistics,
    zero_variance_groups,
)

NAN = float("nan")


def test_group_scale_by_hand() -> None:
    # mean 1, deviations -1, 0, 1, 0, std with n - 1: sqrt(2 / 3)
    got = GroupAdvantage()(torch.tensor([[0.0, 1.0, 2.0, 1.0]]))
    unit = 1 / ((2 / 3) ** 0.5 + 1e-4)
    torch.testing.assert_close(got, torch.tensor([[-unit, 0.0, unit, 0.0]]))


def test_no_scale_is_the_centred_reward() -> None:
    got = GroupAdvantage(scale="none")(torch.tensor([[0.0, 4.0], [1.0, 2.0]]))
    assert torch.equal(got, torch.tensor([[-2.0, 2.0], [-0.5, 0.5]]))


def test_batch_scale_centres_per_group_and_scales_over_all() -> None:
    rewards = torch.tensor([[0.0, 4.0], [1.0, 2.0]])
    got = GroupAdvantage(scale="batch", eps=0.0)(rewards)
    torch.testing.assert_close(got, torch.tensor([[-2.0, 2.0], [-0.5, 0.5]]) / rewards.std())


def test_leave_one_out_by_hand() -> None:
    # 3 - mean(0, 6) = 0, 0 - mean(3, 6) = -4.5, 6 - mean(3, 0) = 4.5
    assert LeaveOneOut()(torch.tensor([[3.0, 0.0, 6.0]])).tolist() == [[0.0, -4.5, 4.5]]


def test_leave_one_out_is_the_centred_reward_times_a_constant() -> None:
    rewards = torch.randn(3, 5)
    torch.testing.assert_close(LeaveOneOut()(rewards), GroupAdvantage(scale="none")(rewards) * 5 / 4)


def test_leave_one_out_counts_only_what_is_scored() -> None:
    with pytest.warns(UserWarning, match="not scored"):
        got = LeaveOneOut()(torch.tensor([[3.0, NAN, 0.0, 6.0], [1.0, NAN, NAN, NAN]]))
    assert got.tolist() == [[0.0, 0.0, -4.5, 4.5], [0.0] * 4]


def test_batch_normalisation_by_hand() -> None:
    rewards = torch.tensor([[0.0, 4.0], [1.0, 3.0]])  # mean 2, std sqrt(10 / 3)
    torch.testing.assert_close(BatchAdvantage(eps=0.0)(rewards), (rewards - 2) / (10 / 3) ** 0.5)


def test_batch_normalisation_with_the_groups_mean_by_hand() -> None:
    rewards = torch.tensor([[0.0, 4.0], [11.0, 13.0]])  # centred -2, 2, -1, 1: std sqrt(10 / 3)
    expected = torch.tensor([[-2.0, 2.0], [-1.0, 1.0]]) / (10 / 3) ** 0.5
    torch.testing.assert_close(BatchAdvantage(center="group", eps=0.0)(rewards), expected)
    # GroupAdvantage(scale=batch) divides by the std of the rewards themselves, which here is mostly between prompts
    other = GroupAdvantage(scale="batch", eps=0.0)(rewards)
    torch.testing.assert_close(other * rewards.std(), expected * (10 / 3) ** 0.5)


def test_reinforce_pp_needs_no_group() -> None:
    got = BatchAdvantage(eps=0.0)(torch.tensor([[1.0], [0.0]]))
    torch.testing.assert_close(got, torch.tensor([[0.5], [-0.5]]) / 0.5**0.5)
    assert BatchAdvantage()(torch.zeros(1, 1)).tolist() == [[0.0]]


@pytest.mark.parametrize("estimator", [LeaveOneOut(), BatchAdvantage(), BatchAdvantage(center="group")], ids=repr)
def test_unscored_rewards_and_flat_groups_stay_finite(estimator: AdvantageEstimator) -> None:
    rewards = torch.tensor([[1.0, NAN, 0.0, NAN], [1.0, NAN, NAN, NAN], [0.1] * 4, [NAN] * 4])
    with pytest.warns(UserWarning, match="not scored") as caught:
        advantages = estimator(rewards)
    assert len(caught) == 1
    assert advantages.isfinite().all()
    assert (advantages[rewards.isnan()] == 0).all()
    assert advantages[0, 0] > advantages[0, 2]
    if estimator != BatchAdvantage():  # which compares over the batch: 0.1 is below its mean
        assert torch.equal(advantages[1:], torch.zeros(3, 4))


def test_a_lone_score_does_not_narrow_the_scale_of_the_others() -> None:
    with pytest.warns(UserWarning, match="not scored"):
        got = BatchAdvantage(center="group", eps=0.0)(torch.tensor([[0.0, 4.0], [5.0, NAN]]))
    torch.testing.assert_close(got[0], torch.tensor([-2.0, 2.0]) / 8**0.5)


@pytest.mark.parametrize("center", ["batch", "group"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6])
def test_equal_rewards_of_a_whole_batch_give_exactly_zero(center: str, value: float) -> None:
    assert torch.equal(BatchAdvantage(center=center)(torch.full((2, 8), value)), torch.zeros(2, 8))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3, 1e6])
def test_equal_rewards_give_exactly_zero(scale: str, value: float) -> None:
    # Eight, because the FP32 mean of eight times 0.1 is not 0.1: the centred reward alone would be 7e-9.
    rewards = torch.tensor([[value] * 8, [0.0, 1.0] * 4])
    advantages = GroupAdvantage(scale=scale)(rewards)
    assert torch.equal(advantages[0], torch.zeros(8))
    assert (advantages[1] != 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_unscored_completions_are_left_out(scale: str) -> None:
    rewards = torch.tensor([[1.0, NAN, 0.0, NAN], [1.0, NAN, NAN, NAN], [NAN] * 4])
    with pytest.warns(UserWarning, match="not scored") as caught:
        advantages = GroupAdvantage(scale=scale)(rewards)
    assert len(caught) == 1
    assert advantages.isfinite().all()
    assert advantages[0, 0] > 0 > advantages[0, 2]
    assert advantages[0, 0] == -advantages[0, 2]
    others = torch.ones_like(rewards, dtype=torch.bool)
    others[0, [0, 2]] = False
    assert (advantages[others] == 0).all()


def test_unscored_completions_do_not_change_their_siblings() -> None:
    with pytest.warns(UserWarning, match="not scored"):
        padded = GroupAdvantage()(torch.tensor([[1.0, 0.0, 3.0, NAN]]))
    assert torch.equal(padded[:, :3], GroupAdvantage()(torch.tensor([[1.0, 0.0, 3.0]])))


def test_no_warning_when_all_are_scored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GroupAdvantage()(torch.tensor([[1.0, 0.0]]))


def test_zero_variance_is_a_property_of_the_group() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert zero_variance_groups(rewards).tolist() == [True, False]
    assert (GroupAdvantage(scale="batch")(rewards)[1] != 0).all()
    unscored = torch.tensor([[1.0, NAN, 1.0], [NAN, NAN, 1.0], [NAN, NAN, NAN], [0.0, NAN, 1.0]])
    assert zero_variance_groups(unscored).tolist() == [True, True, True, False]


def test_group_statistics_match_torch_and_leave_the_unmeasured_nan() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, NAN, 5.0], [7.0, NAN, NAN]])
    mean, std, count = group_statistics(rewards)
    torch.testing.assert_close(mean, torch.tensor([7 / 3, 4.0, 7.0]))
    torch.testing.assert_close(std[:2], torch.stack([rewards[0].std(), torch.tensor([3.0, 5.0]).std()]))
    assert std[2].isnan()
    assert count.tolist() == [3, 2, 1]


def test_integer_rewards_are_fine() -> None:
    assert GroupAdvantage(scale="none")(torch.tensor([[0, 1]])).tolist() == [[-0.5, 0.5]]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"rollout\.num_generations"):
        GroupAdvantage()(torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"expected \[prompts, group\]"):
        GroupAdvantage()(torch.ones(4))
    with pytest.raises(ValueError, match="infinite"):
        GroupAdvantage()(torch.tensor([[1.0, float("inf")]]))
    for estimator in (LeaveOneOut(), BatchAdvantage(center="group")):
        with pytest.raises(ValueError, match="BatchAdvantage, which compares over the batch"):
            estimator(torch.ones(4, 1))
    with pytest.raises(ValueError, match="center='all'"):
        BatchAdvantage(center="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"advantages\.eps=-1"):
        BatchAdvantage(eps=-1)
    with pytest.raises(ValueError, match="scale='std'"):
        GroupAdvantage(scale="std")  # type: ignore[arg-type]

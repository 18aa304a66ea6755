"""Prompts: tokenised once, in a resumable order, never longer than the context without saying so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace

import pytest

from trace_lightning.data import PromptDataModule
from trace_lightning.loading import PromptLoader, Shuffle
from trace_lightning.models.policy import load_tokenizer
from trace_lightning.tasks import ExactMatch, RewardFn, Task
from trace_lightning.types import Problem, Prompt, SamplingParams


class Listed(Task):
    """Problems from a list."""

    def __init__(self, train: list[str], heldout: list[str]) -> None:
        self.train, self.heldout = train, heldout

    def train_problems(self) -> Sequence[Problem]:
        return [Problem(prompt=text) for text in self.train]

    def heldout_problems(self) -> Sequence[Problem]:
        return [Problem(prompt=text) for text in self.heldout]

    def rewards(self) -> Sequence[RewardFn]:
        return [ExactMatch()]


def make_data(
    train: list[str], heldout: list[str] | None = None, *, context: int = 128, **settings
) -> PromptDataModule:
    data = PromptDataModule(Listed(train, heldout or ["1+1="]), **settings)
    module = SimpleNamespace(tokenizer=load_tokenizer("builtin:tiny-qwen3"), context_length=context)
    rollout = SimpleNamespace(sampling=SamplingParams(max_new_tokens=8))
    data.trainer = SimpleNamespace(lightning_module=module, callbacks=[rollout], world_size=1, global_rank=0)
    return data


def prompts(count: int) -> list[Prompt]:
    return [Prompt(token_ids=[i + 1], problem=Problem(prompt=""), uid=i) for i in range(count)]


def uids(batches) -> list[list[int]]:
    return [[prompt.uid for prompt in batch.prompts] for batch in batches]


def test_every_epoch_shows_every_prompt_once_in_another_order():
    loader = PromptLoader(prompts(12), 4, order=Shuffle())
    first, second = uids(loader), uids(loader)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))
    assert first != second


def test_a_consumer_that_counts_starts_the_next_epoch_afresh():
    """Lightning takes len(loader) batches and does not ask for one more."""
    train, heldout = PromptLoader(prompts(8), 4, order=Shuffle()), PromptLoader(prompts(6), 4)
    for _ in range(2):
        iterator = iter(train)
        assert len([next(iterator) for _ in range(len(train))]) == 2
        iterator = iter(heldout)
        assert uids(next(iterator) for _ in range(len(heldout))) == [[0, 1, 2, 3], [4, 5]]


def test_resume_in_mid_epoch_continues_where_the_unbroken_run_would():
    unbroken = uids(PromptLoader(prompts(20), 4, order=Shuffle()))
    loader = PromptLoader(prompts(20), 4, order=Shuffle())
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = PromptLoader(prompts(20), 4, order=Shuffle())
    resumed.load_state_dict(loader.state_dict())
    assert uids(resumed) == unbroken[2:]


def test_ranks_share_a_global_batch():
    ranks = [uids(PromptLoader(prompts(16), 2, order=Shuffle(), rank=r, world_size=2)) for r in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == 4
    assert sorted(chain(*ranks[0], *ranks[1])) == list(range(16))


@pytest.mark.parametrize(("policy", "kept"), [("drop", [5]), ("truncate_left", [5, 20])], ids=["drop", "truncate_left"])
def test_overlong_prompts_are_dropped_or_cut_on_the_left(policy, kept, caplog):
    data = make_data(["1+2+3", "9" * 40 + "="], context=28, overlong_prompts=policy, batch_size=1)
    data.setup("fit")
    assert [len(prompt.token_ids) for prompt in data.train_prompts] == kept
    assert "longer than 20" in caplog.text
    if policy == "truncate_left":
        assert data.train_prompts[-1].token_ids[-1] == data.trainer.lightning_module.tokenizer("=")["input_ids"][0]


def test_overlong_prompts_are_an_error_by_default():
    with pytest.raises(ValueError, match=r"training prompt 0 has 41 tokens, the limit is 20.*overlong_prompts"):
        make_data(["9" * 40 + "="], context=28, batch_size=1).setup("fit")


def test_no_room_for_any_prompt_is_an_error():
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        make_data(["1+2="], context=8, batch_size=1).setup("fit")


@pytest.mark.parametrize("train", [[], ["1+2="]], ids=["empty", "fewer than a batch"])
def test_too_few_prompts_are_an_error_with_both_sizes(train):
    with pytest.raises(ValueError, match=rf"{len(train)} training prompts, fewer than one batch of 4"):
        make_data(train, batch_size=4).setup("fit")


def test_no_heldout_problems_are_an_error_where_they_are_needed():
    data = make_data(["1+2="], batch_size=1)
    data.task.heldout = []
    data.setup("fit")
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match="no held-out problems"):
        data.setup("test")


def test_chat_prompts_need_a_chat_template():
    data = make_data(["1+2="], batch_size=1)
    data.task.train_problems = lambda: [Problem(prompt=[{"role": "user", "content": "1+2="}])]
    with pytest.raises(ValueError, match="no chat template"):
        data.setup("fit")


def test_training_and_heldout_never_share_random_numbers():
    data = make_data(["1+2=", "2+2="], ["3+2=", "4+2="], batch_size=1)
    data.setup("fit")
    assert {p.uid for p in data.train_prompts} == {0, 1}
    assert {p.uid for p in data.heldout_prompts} == {-1, -2}

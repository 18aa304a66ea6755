"""Which prompts come when: every one in turn, exactly resumable, and under a curriculum more of what can be learned."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain

import pytest

from trace_lightning.loading import LoaderChain, PromptLoader, Shuffle, SuccessCurriculum
from trace_lightning.types import Problem, Prompt


def prompts(**sizes: int) -> list[Prompt]:
    sources = [source for source, size in sizes.items() for _ in range(size)]
    return [
        Prompt(token_ids=[1], problem=Problem(prompt="", info={"source": source}), uid=uid)
        for uid, source in enumerate(sources)
    ]


def uids(batches) -> list[list[int]]:
    return [[prompt.uid for prompt in batch.prompts] for batch in batches]


def curriculum(order: SuccessCurriculum | None = None, *, batch_size: int = 8, **settings) -> PromptLoader:
    return PromptLoader(prompts(easy=60, hard=30), batch_size, order=order or SuccessCurriculum(), **settings)


def test_a_curriculum_draws_in_proportion_to_what_can_be_learned() -> None:
    """With rates 1/2 and 1 the weights are 1 and the floor; Laplace's rule gives 501/1002 and 1001/1002."""
    order = SuccessCurriculum(floor=0.1)
    loader = curriculum(order)
    values = order.observe({"easy": (1000.0, 1000.0), "hard": (500.0, 1000.0)})
    p = 1001 / 1002
    easy = 0.1 + 0.9 * 4 * p * (1 - p)
    assert values["curriculum/easy/success"] == pytest.approx(p)
    assert values["curriculum/hard/success"] == pytest.approx(0.5)
    assert values["curriculum/easy/share"] == pytest.approx(easy / (easy + 1))
    drawn = Counter(uid < 60 for _ in range(40) for batch in uids(loader) for uid in batch)
    share = drawn[True] / sum(drawn.values())
    assert share == pytest.approx(easy / (easy + 1), abs=0.02)  # 3520 draws: a standard error of .005


def test_before_anything_is_known_all_sources_are_alike() -> None:
    order = SuccessCurriculum()
    curriculum(order)
    assert order.weights() == {"easy": 0.5, "hard": 0.5}


def test_old_answers_count_half_after_the_half_life() -> None:
    order = SuccessCurriculum(half_life=2.0)
    curriculum(order)
    order.observe({"easy": (8.0, 8.0), "hard": (0.0, 0.0)})
    for _ in range(2):
        order.observe({"easy": (0.0, 0.0), "hard": (0.0, 0.0)})
    assert order.counts["easy"] == pytest.approx([4.0, 4.0])


def test_within_a_source_every_prompt_comes_once_before_one_comes_again() -> None:
    loader = curriculum()
    seen = [uid for _ in range(20) for uid in chain(*uids(loader)) if uid >= 60]
    for start in range(0, len(seen) - 30, 30):
        assert sorted(seen[start : start + 30]) == list(range(60, 90))
    assert seen[:30] != seen[30:60]


def handed_out(loader: PromptLoader, steps: range, *, peeks: bool) -> list[list[int]]:
    """The uids of each step's batch, with feedback after it; with `peeks` the next batch is chosen before that."""
    found, iterator = [], iter(loader)
    for step in steps:
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(loader)
            batch = next(iterator)
        found.append([prompt.uid for prompt in batch.prompts])
        if peeks:
            assert loader.peek() is loader.peek()
        loader.order.observe({"easy": (float(step % 9), 8.0), "hard": (1.0, 8.0)})
    return found


@pytest.mark.parametrize("make", [Shuffle, SuccessCurriculum])
@pytest.mark.parametrize("peeks", [False, True], ids=["", "peeks"])
def test_a_loader_resumes_exactly(make, peeks: bool) -> None:
    """From JSON, after the feedback of a step; peeking is for rollouts drawn ahead. Epochs have eleven batches."""
    whole = curriculum(make())
    expected = handed_out(whole, range(24), peeks=peeks)
    if make is Shuffle:
        plain = curriculum(make())
        assert uids(plain) + uids(plain) == expected[:22]
    for stop in (11, 14):  # at the end of an epoch and in the middle of one
        first, second = curriculum(make()), curriculum(make())
        begun = handed_out(first, range(stop), peeks=peeks)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert begun + handed_out(second, range(stop, 24), peeks=peeks) == expected


def test_without_peeking_a_checkpoint_is_what_it_was() -> None:
    loader = curriculum()
    next(iter(loader))
    assert loader.state_dict().keys() == {"epoch", "position", "num_prompts", "global_batch", "order"}


@pytest.mark.parametrize("make", [Shuffle, SuccessCurriculum])
def test_ranks_share_one_choice(make) -> None:
    whole = uids(curriculum(make(), batch_size=8))
    ranks = [uids(curriculum(make(), batch_size=4, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(batch) for batch in whole]


def test_large_seeds_are_seeds_too() -> None:
    first, second = (uids(curriculum(seed=seed)) for seed in (2**40, 2**40 + 1))
    assert first != second


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"batch_size": 4}, "global_batch=8, now it is 4"), ({"world_size": 2}, "global_batch=8, now it is 16")],
)
def test_resuming_with_another_batch_is_refused(changed, message) -> None:
    state = curriculum().state_dict()
    with pytest.raises(ValueError, match=message):
        curriculum(**changed).load_state_dict(state)


def test_resuming_with_other_data_is_refused() -> None:
    state = curriculum().state_dict()
    with pytest.raises(ValueError, match="num_prompts=90, now it is 91"):
        PromptLoader(prompts(easy=60, hard=31), 8, order=SuccessCurriculum()).load_state_dict(state)
    with pytest.raises(ValueError, match="the sources easy, hard, the task easy, other"):
        PromptLoader(prompts(easy=60, other=30), 8, order=SuccessCurriculum()).load_state_dict(state)


def test_a_checkpoint_of_before_sizes_were_kept_is_read() -> None:
    loader = PromptLoader(prompts(easy=20), 4, order=Shuffle())
    loader.load_state_dict({"epoch": 1, "position": 2})
    assert len(uids(loader)) == 3


def test_a_curriculum_needs_sources() -> None:
    plain = [Prompt(token_ids=[1], problem=Problem(prompt=""), uid=0)]
    with pytest.raises(ValueError, match="training prompt 0 has none: use the task Mixture"):
        PromptLoader(plain, 1, order=SuccessCurriculum())
    with pytest.raises(ValueError, match="a single source, 'easy'"):
        PromptLoader(prompts(easy=4), 1, order=SuccessCurriculum())


@pytest.mark.parametrize("arguments", [{"floor": 0.0}, {"floor": 1.5}, {"half_life": 0.0}], ids=str)
def test_out_of_range(arguments) -> None:
    with pytest.raises(ValueError, match="SuccessCurriculum: "):
        SuccessCurriculum(**arguments)


def test_a_chain_is_its_loaders_one_after_the_other_every_time() -> None:
    one, other = PromptLoader(prompts(a=3), 2, evaluation="one"), PromptLoader(prompts(a=2), 2, evaluation="other")
    loader = LoaderChain([one, other])
    for _ in range(2):
        assert [batch.evaluation for batch in loader] == ["one", "one", "other"]
    assert len(loader) == 3

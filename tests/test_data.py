"""Prompts: tokenised once, in a resumable order, never longer than the context without saying so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from trace_lightning.data import EvalSet, PromptDataModule
from trace_lightning.loading import PromptLoader, Shuffle, SuccessCurriculum
from trace_lightning.models.policy import load_tokenizer
from trace_lightning.tasks import ExactMatch, RewardFn, Task
from trace_lightning.types import Problem, Prompt, RolloutBatch, SamplingParams


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


TEMPLATE = "{{ messages[-1]['content'] }}{% if enable_thinking is defined and not enable_thinking %}={% endif %}"


def chat(*contents: str, role: str = "user") -> list[Problem]:
    return [Problem(prompt=[{"role": role, "content": content}]) for content in contents]


def chat_data(
    tmp_path, template: str = TEMPLATE, problems: list[Problem] | None = None, **settings
) -> PromptDataModule:
    (tmp_path / "chat.jinja").write_text(template)
    data = make_data(["1"], batch_size=1, chat_template=str(tmp_path / "chat.jinja"), **settings)
    data.task.train_problems = lambda: chat("1+2") if problems is None else problems
    return data


def text(data: PromptDataModule, prompt: Prompt) -> str:
    return data.trainer.lightning_module.tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [({"enable_thinking": False}, "1+2="), ({"enable_thinking": True}, "1+2"), (None, "1+2")],
    ids=str,
)
def test_a_thinking_switch_reaches_the_chat_template(tmp_path, variables, wanted):
    data = chat_data(tmp_path, chat_template_kwargs=variables)
    data.setup("fit")
    assert text(data, data.train_prompts[0]).replace(" ", "") == wanted


def test_a_switch_that_the_template_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sets 'enable_thinkin', which the chat template does not mention"):
        chat_data(tmp_path, chat_template_kwargs={"enable_thinkin": False}).setup("fit")
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        make_data(["1"], batch_size=1, chat_template_kwargs={"enable_thinking": False}).setup("fit")


def test_messages_that_the_template_refuses_are_named(tmp_path):
    template = (
        "{{ raise_exception('only user messages') if messages[0]['role'] != 'user' }}{{ messages[0]['content'] }}"
    )
    problems = chat("1+2") + chat("2+2", role="system")
    with pytest.raises(ValueError, match="training prompt 1: the chat template refuses its messages: only user"):
        chat_data(tmp_path, template, problems).setup("fit")


def test_an_answer_that_has_begun_is_continued(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}={% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}=={% endif %}"
    begun = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    data = chat_data(tmp_path, template, [Problem(prompt=begun), *chat("1+2")])
    data.setup("fit")
    assert [text(data, prompt).replace(" ", "") for prompt in data.train_prompts] == ["1+2=3", "1+2=="]


def test_a_missing_template_file_is_an_error():
    with pytest.raises(ValueError, match=r"data\.chat_template=nowhere\.jinja: no such file"):
        make_data(["1"], batch_size=1, chat_template="nowhere.jinja")


def test_eval_sets_come_after_the_tasks_own_and_share_no_random_numbers():
    sets = [
        EvalSet(name="greedy", sampling=SamplingParams(temperature=0.0, max_new_tokens=100), size=2),
        EvalSet(name="other", task=Listed(["1"], ["7+7=", "8+8="]), num_generations=4, pass_at=[4]),
    ]
    heldout = ["9" * 125, "3+2=", "4+2="]  # the first is dropped, and its uid with it
    data = make_data(["1+2="], heldout, batch_size=1, eval_sets=sets, eval_batch_size=2, overlong_prompts="drop")
    data.setup("fit")
    batches = list(data.val_dataloader())
    assert [(len(b.prompts), b.evaluation and b.evaluation.name) for b in batches] == [
        (2, None),
        (1, "greedy"),
        (2, "other"),
    ]
    assert batches[2].evaluation.task.heldout == ["7+7=", "8+8="]
    uids = [prompt.uid for batch in batches for prompt in batch.prompts]
    assert len(set(uids)) == 5
    assert max(uids) < 0


def test_an_eval_set_has_the_room_that_its_own_completions_leave():
    sets = [EvalSet(name="long", sampling=SamplingParams(max_new_tokens=124))]
    with pytest.raises(ValueError, match=r"long held-out prompt 0 has 5 tokens, the limit is 4"):
        make_data(["1+2="], ["3+2=1"], batch_size=1, eval_sets=sets).setup("fit")


def test_bad_eval_sets():
    with pytest.raises(ValueError, match="names must differ, got a, a"):
        make_data(["1"], batch_size=1, eval_sets=[EvalSet(name="a"), EvalSet(name="a")])
    empty = EvalSet(name="a", task=Listed(["1"], []))
    with pytest.raises(ValueError, match="'a': Listed has no held-out problems"):
        make_data(["1"], batch_size=1, eval_sets=[empty]).setup("fit")


def test_the_order_hears_of_right_answers_by_source_and_not_of_what_was_not_scored():
    order = SuccessCurriculum(half_life=1e9)
    data = make_data(["1"], batch_size=2, order=order)
    data.task.train_problems = lambda: [Problem(prompt="1", info={"source": s}) for s in ("a", "a", "b", "b")]
    data.trainer.strategy = SimpleNamespace(root_device="cpu", reduce=lambda tensor, reduce_op: tensor)
    data.setup("fit")
    loader = data.train_dataloader()
    batch = RolloutBatch(prompts=[loader.prompts[0], loader.prompts[2]], num_generations=3)
    batch.completions = [None] * 6
    batch.rewards_B = torch.tensor([1.0, 0.5, math.nan, 1.5, 1.0, 0.0])
    values = data.observe(batch)
    assert order.counts == {"a": [1.0, 2.0], "b": [2.0, 3.0]}
    assert values["curriculum/a/success"] == 0.5
    assert make_data(["1"], batch_size=1).observe(batch) == {}

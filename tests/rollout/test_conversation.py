"""Conversations in the engine: whose token is whose, what the trainer makes of it, environments that misbehave."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tiny import EOS, Scorer, TinyTokenizer, make_engine, make_policy, make_prompts, sampling
from trace_lightning.quantization.rounding import GuidedRounding
from trace_lightning.rollout.base import Generation
from trace_lightning.rollout.conversation import Conversations
from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.tasks.environment import Environment, Step
from trace_lightning.types import Completion, GuidanceConfig, Problem, QuantRecipe, SamplingParams, TurnLimits

PROMPTS = make_prompts(1, 5, 16, 31)
PLAIN = QuantRecipe()
W4A4KV4 = QuantRecipe(
    weights="nvfp4",
    activations="nvfp4",
    kv_cache="nvfp4",
    guidance=GuidanceConfig(mode="full", sites=["attn_in", "o_in", "mlp_in", "down_in", "k", "v"]),
)
KV4 = QuantRecipe(kv_cache="nvfp4", guidance=GuidanceConfig(mode="full"))
STOPS = list(range(64, 96))  # a quarter of the vocabulary, so turns are short
LIMITS = TurnLimits(max_turns=4, max_total_tokens=60)


class Counting(Environment):
    """Says how long the turn was; a turn of one token ends the conversation."""

    def step(self, text: str) -> Step:
        return Step(f"[{len(text)}]", done=len(text) < 2, reward=float(len(text)))


class Talk(Task):
    """Conversations with `environment`; the problems are the tests' own prompts."""

    environments_in_process = True

    def __init__(self, make: Any = Counting) -> None:
        self.make = make

    def train_problems(self) -> list[Problem]:
        return []

    heldout_problems = train_problems

    def rewards(self) -> list[RewardFn]:
        return []

    def environment(self, problem: Problem) -> Environment:
        return self.make()  # type: ignore[no-any-return]


def talk(task: Task | None = None, limits: TurnLimits = LIMITS) -> Conversations:
    return Conversations(task or Talk(), TinyTokenizer(), limits)  # type: ignore[arg-type]


def params(**settings: Any) -> SamplingParams:
    return sampling(**({"stop_token_ids": STOPS, "max_new_tokens": 16} | settings))


def generate(engine: Any, conversations: Conversations | None = None, **settings: Any) -> Generation:
    return engine.generate(  # type: ignore[no-any-return]
        PROMPTS,
        params(),
        num_samples=4,
        conversations=conversations or talk(),
        record_guidance=bool(engine.recipe.guided_sites),
        **settings,
    )


def said(completion: Completion) -> list[tuple[str, int, int, str, float | None]]:
    return [(t.source, t.start, t.end, t.text, t.reward) for t in completion.turns]


def check_tokens(completion: Completion) -> None:
    """Every id belongs to one turn, and the conversation comes out again when its environment is asked once more."""
    tokenizer, environment, step = TinyTokenizer(), Counting(), None
    assert len(completion.logprobs) == len(completion.token_ids) <= LIMITS.max_total_tokens
    assert [t.start for t in completion.turns] == [0, *(t.end for t in completion.turns[:-1])]
    assert completion.turns[-1].end == len(completion.token_ids)
    assert {t.source for t in completion.turns[::2]} == {"policy"}
    for turn, following in itertools.zip_longest(completion.turns[::2], completion.turns[1::2]):
        ids, values = completion.token_ids[turn.start : turn.end], completion.logprobs[turn.start : turn.end]
        assert turn.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert all(value < 0 for value in values)
        assert not any(i in STOPS or i == EOS for i in ids[:-1])
        if following is None:
            assert completion.finish_reason == "length"
            assert turn.reward is None
            continue
        assert ids[-1] in STOPS or ids[-1] == EOS
        step = environment.step(turn.text)
        assert (following.source, following.text, turn.reward) == ("environment", step.observation, step.reward)
        heard = completion.token_ids[following.start : following.end]
        assert heard == ([] if following is completion.turns[-1] else [ord(c) for c in step.observation])
        assert completion.logprobs[following.start : following.end] == [0.0] * len(heard)
    assert (completion.finish_reason == "stop") == (step is not None and step.done and following is not None)


def drawn_mask(completions: list[Completion]) -> torch.Tensor:
    flags = []
    for completion in completions:
        own = {i for turn in completion.drawn for i in turn}
        flags += [i in own for i in range(len(completion.token_ids))]
    return torch.tensor(flags)


@pytest.mark.parametrize("decoder", ["fused", "hf"])
@pytest.mark.parametrize("recipe", [PLAIN, KV4, W4A4KV4], ids=["plain", "kv4", "w4a4kv4"])
def test_every_id_mask_and_logprob_is_accounted_for(recipe: QuantRecipe, decoder: str) -> None:
    policy = make_policy("qwen3", recipe, dtype=torch.float64)
    engine = make_engine(policy, recipe, dtype=torch.float64, decoder=decoder, max_num_seqs=6, prefill_tokens=9)
    generation = generate(engine)
    for completion in generation.completions:
        check_tokens(completion)
    mask, scorer = drawn_mask(generation.completions), Scorer(PROMPTS, generation, 4)
    assert mask.sum() == generation.stats["generated_tokens"]
    assert 0.2 < mask.float().mean() < 0.9
    if recipe is PLAIN:
        theirs = scorer.logprobs(policy, 0.8)
    else:
        rows = scorer.guidance()
        theirs = scorer.logprobs(policy, 0.8, GuidedRounding(rows))
        assert len(rows.guided_index) == sum(len(sequence) - 1 for sequence in scorer.sequences)
        assert rows.mismatch.compute()["after"] == 0
    ours = torch.tensor([value for c in generation.completions for value in c.logprobs])
    assert (theirs - ours)[mask].abs().max() <= 1e-4


def conversations_of(generation: Generation) -> list[Any]:
    return [(c.token_ids, c.finish_reason, said(c)) for c in generation.completions]


@pytest.mark.parametrize("recipe", [PLAIN, KV4], ids=["plain", "kv4"])
def test_conversations_do_not_depend_on_seats_pages_or_passes(recipe: QuantRecipe) -> None:
    """Few seats, few pages (running, parked and ready sequences lose theirs), short passes: the same conversations."""
    policy = make_policy("qwen3", recipe, dtype=torch.float64)
    roomy = generate(make_engine(policy, recipe, dtype=torch.float64, max_num_seqs=64))
    settings: list[dict[str, Any]] = [{"max_num_seqs": 1}, {"prefill_tokens": 3}, {"kv_cache_tokens": 100}]
    for engine in (make_engine(policy, recipe, dtype=torch.float64, **own) for own in settings):
        tight = generate(engine)
        assert conversations_of(tight) == conversations_of(roomy)
    assert roomy.stats["preempted"] == 0
    assert tight.stats["preempted"] > 0
    if recipe is KV4:
        mask = drawn_mask(tight.completions)
        ours = torch.tensor([value for c in tight.completions for value in c.logprobs])
        assert (Scorer(PROMPTS, tight, 4).guided_logprobs(policy, 0.8) - ours)[mask].abs().max() <= 1e-4

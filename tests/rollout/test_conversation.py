"""Conversations in the engine: whose token is whose, what the trainer makes of it, environments that misbehave."""

from __future__ import annotations

import copy
import itertools
import re
import resource
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from own_environments import Counting, Misbehaving, Rendezvous, Talk
from tiny import EOS, Scorer, TinyTokenizer, make_engine, make_policy, make_prompts, sampling
from trace_lightning.quantization.rounding import GuidedRounding
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rollout.base import Generation
from trace_lightning.rollout.conversation import Conversations
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.graphs import GraphCache
from trace_lightning.rollout.microbatch import collate_rollout, take
from trace_lightning.rollout.scoring import score
from trace_lightning.tasks.base import Failure, Task
from trace_lightning.tasks.environment import Step
from trace_lightning.tasks.environment_pool import Processes
from trace_lightning.types import Completion, Problem, Prompt, RolloutBatch, SamplingParams, TurnLimits

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
        assert (rows.row >= 0).sum() == sum(len(sequence) - 1 for sequence in scorer.sequences)
        assert rows.mismatch.compute()["after"] == 0
    ours = torch.tensor([value for c in generation.completions for value in c.logprobs])
    assert (theirs - ours)[mask].abs().max() <= 1e-4


class Late:
    """A pool that answers nobody until everybody waits."""

    def __init__(self, pool: Any) -> None:
        self.start, self.step, self.end, self.close = pool.start, pool.step, pool.end, pool.close
        self.pool = pool

    def answers(self, wait: float) -> Any:
        return self.pool.answers(wait) if wait else []


@pytest.mark.parametrize(("family", "decoder"), [("mistral", "fused"), ("gpt2", "hf")])
def test_other_families(family: str, decoder: str) -> None:
    """Sliding windows and learned positions behind a context that is in the pages already."""
    policy = make_policy(family, PLAIN, dtype=torch.float64)
    generation = generate(make_engine(policy, PLAIN, dtype=torch.float64, decoder=decoder))
    for completion in generation.completions:
        check_tokens(completion)
    ours = torch.tensor([value for c in generation.completions for value in c.logprobs])
    theirs = Scorer(PROMPTS, generation, 4).logprobs(policy, 0.8)
    assert (theirs - ours)[drawn_mask(generation.completions)].abs().max() <= 1e-4


def conversations_of(generation: Generation) -> list[Any]:
    return [(c.token_ids, c.finish_reason, said(c)) for c in generation.completions]


@pytest.mark.parametrize("recipe", [PLAIN, KV4], ids=["plain", "kv4"])
def test_conversations_do_not_depend_on_seats_pages_or_passes(recipe: QuantRecipe) -> None:
    """Few seats, few pages (running, parked and ready sequences lose theirs), short passes: the same conversations."""
    policy = make_policy("qwen3", recipe, dtype=torch.float64)
    roomy = generate(make_engine(policy, recipe, dtype=torch.float64, max_num_seqs=64))
    tight = {"kv_cache_tokens": 100}
    settings: list[dict[str, Any]] = [{"max_num_seqs": 1}, {"prefill_tokens": 3}, tight, tight | {"prefill_tokens": 9}]
    for i, own in enumerate(settings):
        engine, ours = make_engine(policy, recipe, dtype=torch.float64, **own), talk()
        if i == len(settings) - 1:
            ours.pool = Late(ours.pool)  # type: ignore[assignment]
        drawn = generate(engine, ours)
        assert conversations_of(drawn) == conversations_of(roomy)
        assert (drawn.stats["preempted"] > 0) == ("kv_cache_tokens" in own)
        if recipe is PLAIN:
            continue
        mask = drawn_mask(drawn.completions)
        values = torch.tensor([value for c in drawn.completions for value in c.logprobs])
        assert (Scorer(PROMPTS, drawn, 4).guided_logprobs(policy, 0.8) - values)[mask].abs().max() <= 1e-4


def with_info(**info: Any) -> list[Prompt]:
    """The prompts, of which each gets one value of each list."""
    rows = [dict(zip(info, values, strict=True)) for values in zip(*info.values(), strict=True)]
    return [replace(p, problem=Problem(prompt="", info=row)) for p, row in zip(PROMPTS * 3, rows, strict=False)]


class TestProcesses:
    """Environments in processes of their own."""

    def test_one_that_fails_is_not_scored_and_harms_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        expected = {
            None: "",
            "raise": "environment: raised RuntimeError: the tool broke",
            "hang": r"environment: timed out after 0.5 s \(rollout.turns: step_timeout_s=0.5, timeout_s=60\)",
            "die": "environment: its process ended with exit code 3",
            "break off": "environment: its process ended with exit code 3",
            "hang up": "environment: its process died of SIGKILL",
            "number": "environment: raised TypeError: step returned an observation of type int; a str is expected",
            "text": "environment: raised TypeError: step returned a str; a Step is expected",
            "surrogate": "environment: raised UnicodeEncodeError: .* surrogates not allowed",
            "infinite": "environment: raised ValueError: reward 'step', row 0: returned inf",
            "raise in reset": "environment: raised KeyError: 'no such game'",
        }
        prompts = with_info(how=list(expected))
        limits = replace(LIMITS, step_timeout_s=0.5)
        ours = talk(Talk(Misbehaving, in_process=False), limits)
        engine = make_engine(make_policy("qwen3", PLAIN), PLAIN)
        drawn = engine.generate(prompts, params(), num_samples=2, conversations=ours).completions
        ours.close()
        healthy = engine.generate(prompts, params(), num_samples=2, conversations=talk()).completions
        for i, (completion, whole) in enumerate(zip(drawn, healthy, strict=True)):
            reason = expected[prompts[i // 2].problem.info["how"]]
            if not reason or whole.turns[0].reward is None:  # not asked: its first turn was cut
                assert said(completion) == said(whole)
                continue
            assert re.match(reason, completion.error), completion.error
            assert completion.token_ids == whole.token_ids[: whole.turns[0].end]
        failed = sum(bool(completion.error) for completion in drawn)
        assert failed >= 10
        assert sum(ours.failures.values()) == failed
        assert 1 <= ours.failures["timeouts"] <= 2
        assert caplog.text.count("the completion is not scored") == 2  # the first of each kind

    def test_a_slow_tool_does_not_stall_the_batch(self, tmp_path: Path) -> None:
        """The first prompt's tools answer only once the other conversations have taken 20 turns: no clock is read."""
        prompts = with_info(folder=[str(tmp_path)] * 8, wait_for=[22] + [0] * 7)
        ours = talk(Talk(Rendezvous, in_process=False), replace(LIMITS, step_timeout_s=30))
        policy = make_policy("qwen3", PLAIN, dtype=torch.float64)
        engine = make_engine(policy, PLAIN, dtype=torch.float64, max_num_seqs=4)
        drawn = engine.generate(prompts, params(), num_samples=2, conversations=ours)
        assert ours.failures["timeouts"] == 0
        assert drawn.stats["env_steps"] == len(list(tmp_path.iterdir())) > 22
        alone = engine.generate(prompts, params(), num_samples=2, conversations=talk())
        assert conversations_of(drawn) == conversations_of(alone)
        ours.close()

    def test_all_calls_of_a_conversation_have_a_limit_too(self) -> None:
        """Each answer is in time; the second one goes beyond what the conversation has left."""
        ours = talk(Talk(Misbehaving, in_process=False), replace(LIMITS, timeout_s=0.6))
        engine = make_engine(make_policy("qwen3", PLAIN), PLAIN)
        drawn = engine.generate(with_info(how=["dawdle"] * 4), params(), conversations=ours).completions
        ours.close()
        assert ours.failures["timeouts"] == sum(bool(completion.error) for completion in drawn) > 0
        for completion in drawn:
            asked_twice = len([turn for turn in completion.turns if turn.source == "policy"]) > 1 and completion.error
            assert not asked_twice or re.match(
                r"environment: timed out after 0\.\d+ s .* timeout_s=0\.6", completion.error
            )

    def test_no_more_processes_than_allowed(self) -> None:
        pool = Processes(Talk(in_process=False), 1)
        pool.start(0, Problem(prompt=""))
        pool.start(1, Problem(prompt=""))
        pool.step(1, "ab", 20)
        pool.step(0, "abc", 20)
        first = answers(pool, 1)
        assert first == [(0, Step("[3]", reward=3.0))]
        pool.end(0)
        assert answers(pool, 1) == [(1, Step("[2]", reward=2.0))]
        pool.end(1)
        pool.close()

    def test_a_turn_that_nobody_reads_is_over_time_and_holds_nobody_up(self) -> None:
        """It is larger than a pipe holds, and its environment hangs before it reads; another one reads as much."""
        pool, turn = Processes(Talk(Misbehaving, in_process=False), 2), "x" * 3_000_000
        pool.start(0, Problem(prompt="", info={"how": "hang in reset"}))
        pool.start(1, Problem(prompt=""))
        pool.step(0, turn, 0.5)
        pool.step(1, turn, 30)
        assert dict(answers(pool, 2)) == {
            0: Failure("timed out after 0.5 s", timed_out=True),
            1: Step("[3000000]", reward=3e6),
        }
        pool.close()

    def test_more_of_them_than_files_may_usually_be_open(self) -> None:
        pool, (soft, hard) = Processes(Talk(in_process=False), 512), resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))
        try:
            pool.start(0, Problem(prompt=""))  # and their server, which has this limit to begin with
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in range(1, 160):
            pool.start(number, Problem(prompt=""))
        pool.step(159, "ab", 20)
        assert answers(pool, 1) == [(159, Step("[2]", reward=2.0))]
        pool.close()

    def test_after_an_interruption_environments_begin_afresh(self) -> None:
        class Stop(Exception):
            pass

        def interrupt(finished: int, total: int) -> None:
            if finished >= 2:
                raise Stop

        ours = talk(Talk(in_process=False))
        engine = make_engine(make_policy("qwen3", PLAIN, dtype=torch.float64), PLAIN, dtype=torch.float64)
        with pytest.raises(Stop):
            generate(engine, ours, progress=interrupt)
        assert conversations_of(generate(engine, ours)) == conversations_of(generate(engine))
        ours.close()

    def test_a_task_that_cannot_be_loaded_there_is_an_error(self) -> None:
        class Unloadable(Talk):
            def __reduce__(self) -> Any:
                return exec, ("raise ImportError('no such package')",)

        ours = talk(Unloadable(in_process=False))
        with pytest.raises(
            ValueError, match=r"cannot be loaded in the process of its environments(.|\n)*no such package"
        ):
            generate(make_engine(make_policy("qwen3", PLAIN), PLAIN), ours)


def answers(pool: Processes, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += [(number, answer) for number, answer, _ in pool.answers(20.0)]
    return found


def test_environments_in_the_process_fail_alike() -> None:
    ours = talk(Talk(Misbehaving))
    engine = make_engine(make_policy("qwen3", PLAIN), PLAIN)
    drawn = engine.generate(with_info(how=["say something in reset"]), params(), conversations=ours, num_samples=2)
    for completion in drawn.completions:
        assert re.match("environment: reset returned a str: .* belongs in the prompt", completion.error)


def test_limits_end_conversations() -> None:
    policy = make_policy("qwen3", PLAIN, max_position_embeddings=64)
    engine = make_engine(policy, PLAIN)
    by_turns = generate(engine, talk(limits=replace(LIMITS, max_turns=2, max_total_tokens=33))).completions
    most = max(by_turns, key=lambda c: len(c.turns))
    assert [t.source for t in most.turns] == ["policy", "environment"] * 2
    assert (most.finish_reason, most.turns[-1].start) == ("length", most.turns[-1].end)
    by_tokens = generate(engine, talk(limits=replace(LIMITS, max_turns=9, max_total_tokens=20))).completions
    assert {len(c.token_ids) for c in by_tokens if c.finish_reason == "length" and len(c.turns) > 3} <= {17, 18, 19, 20}
    with pytest.raises(ValueError, match=r"prompt of 31 and max_new_tokens=60 .*rollout\.turns\.max_total_tokens"):
        generate(engine)
    cut = engine.generate(PROMPTS, params(beyond_context="cut"), num_samples=4, conversations=talk()).completions
    assert max(31 + len(c.token_ids) for c in cut[12:]) <= 64


def test_recorded_distributions_are_those_of_drawn_tokens() -> None:
    """Support and most likely tokens: filled up at observations, one row per learned token in a micro-batch."""
    policy = make_policy("qwen3", PLAIN, dtype=torch.float64)
    engine = make_engine(policy, PLAIN, dtype=torch.float64, kv_cache_tokens=100)
    for settings, name in (({"top_k": 9, "record_support": 9}, "support_ids"), ({"record_logprobs": 5}, "topk_ids")):
        drawn = engine.generate(PROMPTS, params(**settings), num_samples=2, conversations=talk())
        batch = RolloutBatch(prompts=PROMPTS, num_generations=2)
        collate_rollout(batch, drawn.completions, pad_token_id=0)
        batch.advantages_B = torch.zeros(8)
        micro = take(batch, [3, 6, 0], torch.device("cpu"))
        ids = micro.support_NK if name == "support_ids" else micro.topk_ids_NK
        assert ids is not None
        assert len(ids) == micro.mask_BT.sum() == sum(drawn.completions[i].num_drawn for i in (3, 6, 0))
        assert (ids >= 0).any(1).all()
        first = drawn.completions[3]
        observed = [i for turn in first.turns if turn.source == "environment" for i in range(turn.start, turn.end)]
        assert (getattr(first, name)[observed] == -1).all()
        assert observed
        if name == "support_ids":
            assert (ids == micro.token_ids_BT[micro.mask_BT].unsqueeze(1)).any(1).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [KV4, W4A4KV4], ids=["kv4", "w4a4kv4"])
def test_the_trainer_agrees_about_every_turn(recipe: QuantRecipe, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of four steps, too few pages: the trainer's own path over the same batch. A CPU plays its graphs."""
    if device == "cpu":
        monkeypatch.setattr(GraphCache, "_capture", lambda self, step: SimpleNamespace(replay=step))
        monkeypatch.setattr(LocalEngine, "_graphs_for", lambda self, state, params: self._workspace.graphs)
    policy = make_policy("qwen3", recipe, head_dim=64).to(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    settings = {"page_size": 16, "kv_cache_tokens": 128, "decode_window": 4, "max_num_seqs": 8}
    engine = make_engine(copy.deepcopy(policy), recipe, dtype=dtype, **settings)
    for _ in range(3 if device == "cuda" else 2):  # graphs are captured when a shape comes up again
        ours = talk()
        ours.pool = Late(ours.pool)  # type: ignore[assignment]
        drawn = generate(engine, ours)
    assert engine._workspace.graphs.num_replays > 0
    assert drawn.stats["preempted"] > 0
    for completion in drawn.completions:
        check_tokens(completion)
    batch = RolloutBatch(prompts=PROMPTS, num_generations=4, guidance=drawn.guidance)
    collate_rollout(batch, drawn.completions, pad_token_id=0)
    batch.advantages_B = torch.zeros(16)
    micro = take(batch, list(range(16)), torch.device(device))
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logprobs, _ = score(policy, micro, temperature=0.8)
    gaps = (logprobs - micro.rollout_logprobs_BT)[micro.mask_BT].abs()
    assert len(gaps) == drawn.stats["generated_tokens"]
    assert gaps.mean() < (0.05 if device == "cuda" else 1e-5)
    assert micro.guidance is not None
    assert micro.guidance.mismatch.compute()["after"] <= (0.001 if device == "cuda" else 0)

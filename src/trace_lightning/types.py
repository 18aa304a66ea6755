"""The data that travels between the parts: prompts in, completions out, and how these are drawn. No behaviour.

    Problem --tokenise--> Prompt --engine--> Completion x num_generations --rewards--> RolloutBatch --> training_step

`RolloutBatch` is mutable on purpose: the dataloader makes it with prompts only, and the Rollout callback fills it in
place before `training_step` sees it. Tensors that belong to tokens are aligned with the token itself: entry [b, t] of
`rollout_logprobs_BT` is the log-probability of `token_ids_BT[b, t]` given the tokens before it.

    B sequences (prompts x num_generations, whole groups side by side)    T tokens, right-padded
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

# Importable from here too: users do so, and older checkpoints name the recipe's classes by this module.
from trace_lightning.recipe import SITES as SITES
from trace_lightning.recipe import GuidanceConfig as GuidanceConfig
from trace_lightning.recipe import QuantRecipe as QuantRecipe

if TYPE_CHECKING:  # a reward worker reads `Problem` from here, and starts in a tenth of the time without torch
    from torch import Tensor

    from trace_lightning.quantization.guidance import GuidanceRecord


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are drawn. Names are vLLM's.

    Truncated sampling (`top_k`, `top_p`, `min_p`) changes the distribution, so its log-probs compare with the
    trainer's only if the trainer renormalises over the same tokens. For that, `record_support` keeps the ids of up to
    that many surviving tokens per position (the least likely beyond it are cut as well, by an implied top-k).

    Args:
        temperature: logits are divided by it on both sides; 0 is greedy, for evaluation only.
        top_k: keep the k most likely tokens; -1 keeps all.
        top_p: keep the smallest set of tokens with this probability mass.
        min_p: keep tokens at least this likely relative to the most likely one.
        record_support: tokens kept per position for the trainer; required for training with truncated sampling.
        record_logprobs: keep ids and FP32 log-probs of the k most likely tokens per position, k = this number, for
            losses that need more of the distribution than the drawn token (`ScoreCentering`). Untruncated sampling
            only. Costs 8 k bytes on the device for every token that the rows of the decode state can hold.
        max_new_tokens: completion length limit, at least 1.
        beyond_context: what to do when prompt and `max_new_tokens` exceed the model's context: `error`, or `cut` the
            completion at the context's end (its finish reason is then `length`).
        stop_token_ids: ids that end a completion besides the model's EOS ids; the id stays part of the completion.
        stop: strings; a completion ends with the first token whose text contains one of them.
        ignore_eos: go on after EOS (benchmarks).
        seed: base of the counter-based randomness; the same (seed, sequence id, position) draws the same number.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    record_support: int = 0
    record_logprobs: int = 0
    max_new_tokens: int = 256
    beyond_context: Literal["error", "cut"] = "error"
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k == -1 or self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p < 1,
            "record_support": self.record_support >= 0,
            "record_logprobs": self.record_logprobs >= 0,
            "max_new_tokens": self.max_new_tokens >= 1,
        }
        for name, fine in checks.items():
            if not fine:
                raise ValueError(f"sampling.{name}={getattr(self, name)} is out of range")
        if self.record_logprobs and (self.truncated or self.temperature == 0):
            raise ValueError(
                f"sampling.record_logprobs={self.record_logprobs} records the whole distribution, but temperature="
                f"{self.temperature}, top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p} draw from a part of "
                "it. Switch truncation off (top_k=-1, top_p=1, min_p=0, temperature above 0), or record_logprobs=0. "
                "If this is rollout.eval_sampling, set it there."
            )

    @property
    def truncated(self) -> bool:
        """Whether some tokens can get probability zero."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def distribution(self) -> tuple[float, ...]:
        """What a draw and its record depend on, beside the logits: a captured step serves one value of it."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.record_support, self.record_logprobs

    def check_trainable(self) -> None:
        """Refuse parameters under which rollout and trainer log-probs would belong to different distributions.

        Raises:
            ValueError: greedy sampling, or truncation without `record_support`.
        """
        if self.temperature == 0:
            raise ValueError("sampling.temperature=0 is greedy: nothing to learn from. Use a temperature above 0.")
        if self.truncated and not self.record_support:
            raise ValueError(
                f"sampling with top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p} draws from a truncated "
                "distribution, and the trainer cannot renormalise without knowing which tokens were kept. Set "
                "sampling.record_support (e.g. 64), or switch truncation off (top_k=-1, top_p=1, min_p=0)."
            )


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """How long a conversation of the policy with an environment may get; for tasks that have environments.

    A turn of the policy is also bounded by `sampling.max_new_tokens`. A conversation that reaches any limit of length
    ends there and counts as cut (finish reason `length`); one over a limit of time has failed and is not scored.

    Args:
        max_turns: turns of the policy.
        max_total_tokens: tokens after the prompt, those of the environment included.
        step_timeout_s: seconds that one call of an environment may take.
        timeout_s: seconds that the environment of one conversation may take in all its calls.
        max_environments: environments that are alive at the same time; each is a process, unless the task says
            otherwise.
    """

    max_turns: int = 8
    max_total_tokens: int = 1024
    step_timeout_s: float = 10.0
    timeout_s: float = 60.0
    max_environments: int = 512

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_total_tokens", "max_environments"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.turns.{name}={getattr(self, name)} must be at least 1")
        for name in ("step_timeout_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"rollout.turns.{name}={getattr(self, name)} must be above 0")


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """How one held-out set is drawn and judged. Its values are logged as `heldout/<name>/...`.

    Args:
        name: letters, digits, `_`, `-` and `.`.
        sampling: None takes `rollout.eval_sampling`.
        num_generations: completions per problem.
        pass_at: values of k for which pass@k is logged, each at most `num_generations`.
        correct_from: a reward counts as correct from here on.
    """

    name: str
    sampling: SamplingParams | None = None
    num_generations: int = 1
    pass_at: list[int] = field(default_factory=list)
    correct_from: float = 1.0

    def __post_init__(self) -> None:
        where = f"data.eval_sets: {self.name!r}"
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"{where} is no name for a metric: use letters, digits, '_', '-' and '.'")
        if self.num_generations < 1:
            raise ValueError(f"{where}: num_generations={self.num_generations} must be at least 1")
        for k in self.pass_at:
            if not 1 <= k <= self.num_generations:
                raise ValueError(
                    f"{where}: pass_at has {k}, but {self.num_generations} completions are drawn per problem. Use 1 to "
                    f"{self.num_generations}, or set num_generations={max(k, 1)}"
                )
        sampling = self.sampling
        if sampling is not None and sampling.temperature == 0 and self.num_generations > 1:
            raise ValueError(
                f"{where}: sampling.temperature=0 draws the same completion {self.num_generations} times. Set "
                "num_generations=1 (and pass_at=[1]), or a temperature above 0"
            )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question before tokenisation. `prompt` is plain text, or chat messages for the tokenizer's template."""

    prompt: str | list[dict[str, str]]
    answer: Any = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenised problem. `uid` is stable across epochs and names the sequence for counter-based sampling."""

    token_ids: list[int]
    problem: Problem
    uid: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a conversation: tokens `start ... end - 1` of the completion, and their text.

    `reward` is what the environment gave for a turn of the policy. What an environment says last is fed to nobody: such
    a turn has text and no tokens.
    """

    source: Literal["policy", "environment"]
    start: int
    end: int
    text: str
    reward: float | None = None


@dataclass(kw_only=True)
class Completion:
    """One sampled answer, or one conversation.

    In a conversation `token_ids` is everything after the prompt and `turns` say whose each token is; without an
    environment `turns` is empty and all tokens are the policy's. Entries that belong to an environment's token are
    filled in: log-prob 0, support and most likely ids -1. `error` says why the environment failed, if it did.

    `logprobs[i]` belongs to `token_ids[i]`, under the distribution it was drawn from. `guidance_rows` maps every token
    that was fed to the model (prompt and completion without the last token) to a row of the rollout's GuidanceRecord.
    `support_ids` holds the surviving token ids per position, [len, record_support] padded with -1. `topk_ids` int64 and
    `topk_logprobs` FP32, both [len, record_logprobs], are the most likely tokens, most likely first; a vocabulary
    smaller than that is padded with id -1 and log-prob -inf.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    text: str = ""
    guidance_rows: Tensor | None = None
    support_ids: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None
    turns: list[Turn] = field(default_factory=list)
    error: str = ""

    @property
    def drawn(self) -> list[range]:
        """Indices of the tokens that the policy drew, turn by turn."""
        if not self.turns:
            return [range(len(self.token_ids))]
        return [range(turn.start, turn.end) for turn in self.turns if turn.source == "policy"]

    @property
    def num_drawn(self) -> int:
        """Tokens that the policy drew: what lengths, means and throughput count."""
        return sum(map(len, self.drawn))


@dataclass(kw_only=True)
class RolloutBatch:
    """One dataloader batch; everything below `num_generations` is filled by the Rollout callback.

    Shapes: `token_ids_BT` int64, `completion_mask_BT` bool, `rollout_logprobs_BT` and `advantages_B`, `rewards_B` FP32.
    A reward of NaN means "not scored": the sequence is left out of advantages and loss.
    """

    prompts: list[Prompt]
    num_generations: int = 1
    completions: list[Completion] = field(default_factory=list)
    token_ids_BT: Tensor | None = None
    completion_mask_BT: Tensor | None = None
    rollout_logprobs_BT: Tensor | None = None
    rewards_B: Tensor | None = None
    rewards_by_name: dict[str, list[float]] = field(default_factory=dict)
    reward_reasons: dict[str, list[str]] = field(default_factory=dict)  # by name, empty where a reward gave none
    evaluation: EvalSpec | None = None  # of a held-out set with settings of its own
    advantages_B: Tensor | None = None
    sampling: SamplingParams | None = None
    turn_limits: TurnLimits | None = None  # of conversations with environments
    guidance: GuidanceRecord | None = None
    policy_version: int = -1
    seconds: dict[str, float] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)  # the engine's counts

    @property
    def max_drawn(self) -> int:
        """Tokens that the policy can draw for one completion."""
        assert self.sampling is not None
        longest, limits = self.sampling.max_new_tokens, self.turn_limits
        return longest if limits is None else min(limits.max_total_tokens, limits.max_turns * longest)

    def to(self, device: Any) -> RolloutBatch:
        """Itself, where it is (Lightning calls this): micro-batches are moved one by one, before their forward."""
        return self

    def sequences(self) -> Iterator[tuple[Prompt, Completion]]:
        """Prompt and completion of each of the B sequences, in batch order."""
        for i, completion in enumerate(self.completions):
            yield self.prompts[i // self.num_generations], completion

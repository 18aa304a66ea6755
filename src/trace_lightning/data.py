"""`PromptDataModule`: problems in, tokenised prompts out. It knows nothing of generation.

One batch is one rollout: `batch_size` prompts, of which the Rollout callback makes `batch_size * num_generations`
sequences. Which prompts, and how a run goes on in the middle of an epoch, is in `loading.py`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import lightning.pytorch as pl
import torch
from transformers import PreTrainedTokenizerBase

from trace_lightning.loading import LoaderChain, PromptLoader, PromptOrder, Shuffle
from trace_lightning.ranks import together
from trace_lightning.tasks.base import Task
from trace_lightning.tasks.mixture import SOURCE
from trace_lightning.types import EvalSpec, Problem, Prompt, RolloutBatch, SamplingParams, TurnLimits

log = logging.getLogger(__name__)


def run_seed() -> int:
    """What `seed_everything` was called with, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


@dataclass(frozen=True, kw_only=True)
class EvalSet(EvalSpec):
    """A held-out set with settings of its own, measured at every validation beside the task's held-out problems.

    Args:
        task: its held-out problems are used, and its rewards; None takes those of the run's task.
        size: problems used; None takes all.
    """

    task: Task | None = None
    size: int | None = None


class PromptDataModule(pl.LightningDataModule):
    """Training and held-out prompts of a task.

    Args:
        task: problems and their rewards.
        batch_size: prompts per rollout and rank.
        heldout_size: held-out problems used per validation; None takes all.
        eval_sets: further held-out sets with their own sampling, and pass@k.
        eval_batch_size: prompts per validation batch; None takes 8 training batches' worth.
        max_prompt_length: tokens; None allows what the model's context leaves beside the completion.
        overlong_prompts: what to do with longer ones: `error`, `drop` them, or `truncate_left`.
        order: chooses the prompts of each rollout; default `Shuffle()`.
        shuffle_seed: order of the training prompts; None takes the run's seed (`seed_everything`).
        chat_template: file with a Jinja chat template instead of the tokenizer's.
        chat_template_kwargs: variables for the template, e.g. `enable_thinking: false`.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int = 16,
        heldout_size: int | None = None,
        eval_sets: list[EvalSet] | None = None,
        eval_batch_size: int | None = None,
        max_prompt_length: int | None = None,
        overlong_prompts: Literal["error", "drop", "truncate_left"] = "error",
        order: PromptOrder | None = None,
        shuffle_seed: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size} must be at least 1")
        self.eval_sets = list(eval_sets or [])
        names = [spec.name for spec in self.eval_sets]
        if len(set(names)) < len(names):
            raise ValueError(f"data.eval_sets: names must differ, got {', '.join(names)}")
        if chat_template is not None and not Path(chat_template).is_file():
            raise ValueError(f"data.chat_template={chat_template}: no such file ({Path(chat_template).resolve()})")
        self.task, self.batch_size, self.heldout_size = task, batch_size, heldout_size
        self.eval_batch_size = eval_batch_size or batch_size * 8
        self.max_prompt_length, self.overlong_prompts = max_prompt_length, overlong_prompts
        self.order: PromptOrder = order or Shuffle()
        self.shuffle_seed = shuffle_seed
        self.chat_template, self.chat_template_kwargs = chat_template, dict(chat_template_kwargs or {})
        self.train_prompts: list[Prompt] = []
        self.heldout_prompts: list[Prompt] = []
        self.eval_prompts: list[list[Prompt]] = []  # of each of `eval_sets`

    def setup(self, stage: str) -> None:
        """Tokenise what the stage needs.

        Raises:
            ValueError: no problems, fewer than one batch, an overlong prompt under `error`, or a variable that the chat
                template does not use.
        """
        with together(self.trainer):  # type: ignore[arg-type]
            self._setup(stage)

    def _setup(self, stage: str) -> None:
        tokenizer = self._tokenizer()
        problems = list(self.task.heldout_problems())[: self.heldout_size]
        self.heldout_prompts = self._tokenise(problems, tokenizer, "held-out", self._limit(None), first_uid=-1)
        self._setup_eval_sets(tokenizer, first_uid=-len(problems) - 1)
        if stage != "fit":
            if not (self.heldout_prompts or self.eval_sets):
                raise ValueError(f"{type(self.task).__name__} has no held-out problems, which `{stage}` runs on")
            return
        problems = list(self.task.train_problems())
        self.train_prompts = self._tokenise(problems, tokenizer, "training", self._limit(None), first_uid=0)
        needed = self.batch_size * self.trainer.world_size  # type: ignore[union-attr]
        if len(self.train_prompts) < needed:
            raise ValueError(
                f"{type(self.task).__name__} has {len(self.train_prompts)} training prompts, fewer than one batch of "
                f"{needed} (data.batch_size x ranks). Lower data.batch_size or bring more prompts."
            )

    def _setup_eval_sets(self, tokenizer: PreTrainedTokenizerBase, first_uid: int) -> None:
        # Held-out uids are negative, so that no held-out sequence shares its random numbers with a training one.
        uid, self.eval_prompts = first_uid, []
        for spec in self.eval_sets:
            task = spec.task or self.task
            problems = list(task.heldout_problems())[: spec.size]
            if not problems:
                raise ValueError(f"data.eval_sets: {spec.name!r}: {type(task).__name__} has no held-out problems")
            where = f"{spec.name} held-out"
            self.eval_prompts.append(self._tokenise(problems, tokenizer, where, self._limit(spec), first_uid=uid))
            uid -= len(problems)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        tokenizer: PreTrainedTokenizerBase = module.tokenizer
        if self.chat_template is not None:
            tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
        if self.chat_template_kwargs:
            _check_template(tokenizer, self.chat_template_kwargs)
        return tokenizer

    def _limit(self, spec: EvalSpec | None) -> int | None:
        """What the model's context leaves for a prompt beside the longest completion, or what is set."""
        trainer: Any = self.trainer
        context: int | None = trainer.lightning_module.context_length
        rollouts = [callback for callback in trainer.callbacks if hasattr(callback, "sampling")]
        if context is not None and rollouts:
            sampling: SamplingParams = getattr(spec, "sampling", None) or rollouts[0].sampling
            name, longest = "sampling.max_new_tokens", sampling.max_new_tokens
            if (getattr(spec, "task", None) or self.task).has_environments:
                limits = getattr(rollouts[0], "turns", None) or TurnLimits()
                name, longest = "turns.max_total_tokens", limits.max_total_tokens
            if context <= longest:
                raise ValueError(
                    f"rollout.{name}={longest} leaves no room for a prompt in the model's context of {context} tokens"
                )
            context -= longest
        return self.max_prompt_length or context

    def _tokenise(
        self,
        problems: Sequence[Problem],
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        limit: int | None,
        first_uid: int,
    ) -> list[Prompt]:
        """Prompts with uids from `first_uid`, upwards for training and downwards for held-out ones."""
        prompts, touched, step = [], 0, 1 if split == "training" else -1
        for index, problem in enumerate(problems):
            ids = encode(problem, tokenizer, f"{split} prompt {index}", self.chat_template_kwargs)
            if limit is not None and len(ids) > limit:
                touched += 1
                if self.overlong_prompts == "error":
                    raise ValueError(
                        f"{split} prompt {index} has {len(ids)} tokens, the limit is {limit}. Set "
                        "data.overlong_prompts to drop or truncate_left, or lower rollout.sampling.max_new_tokens (in "
                        "conversations rollout.turns.max_total_tokens)."
                    )
                if self.overlong_prompts == "drop":
                    continue
                ids = ids[-limit:]
            prompts.append(Prompt(token_ids=ids, problem=problem, uid=first_uid + step * index))
        if touched:
            how = "dropped" if self.overlong_prompts == "drop" else "truncated on the left"
            log.warning("%d of %d %s prompts were longer than %s tokens: %s", touched, len(problems), split, limit, how)
        return prompts

    def observe(self, batch: RolloutBatch) -> dict[str, float]:
        """Tell the order how a training rollout went; metrics of the order, the same on every rank."""
        sources = self.order.sources
        if not sources:
            return {}
        assert batch.rewards_B is not None
        assert self.trainer is not None
        correct_from = getattr(self.order, "correct_from", 1.0)
        counts = torch.zeros(len(sources), 2, dtype=torch.float64)
        place = {source: index for index, source in enumerate(sources)}
        for (prompt, _), reward in zip(batch.sequences(), batch.rewards_B.tolist(), strict=True):
            if reward == reward:  # NaN: not scored
                right = float(reward >= correct_from)
                counts[place[str(prompt.problem.info[SOURCE])]] += torch.tensor([right, 1.0], dtype=torch.float64)
        device = self.trainer.strategy.root_device
        summed = self.trainer.strategy.reduce(counts.float().to(device), reduce_op="sum")
        return self.order.observe(
            {source: (right, total) for source, (right, total) in zip(sources, summed.tolist(), strict=True)}
        )

    def train_dataloader(self) -> PromptLoader:
        seed = run_seed() if self.shuffle_seed is None else self.shuffle_seed
        return PromptLoader(self.train_prompts, self.batch_size, order=self.order, seed=seed, **self._ranks())

    def _ranks(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def _heldout(self) -> Any:
        """The task's own held-out problems first, if there are any, then each of `eval_sets`."""
        size, ranks = self.eval_batch_size, self._ranks()
        loaders = [PromptLoader(self.heldout_prompts, size, **ranks)] if self.heldout_prompts else []
        pairs = zip(self.eval_sets, self.eval_prompts, strict=True)
        loaders += [PromptLoader(prompts, size, **ranks, evaluation=spec) for spec, prompts in pairs]
        return LoaderChain(loaders) if loaders else []

    def val_dataloader(self) -> Any:
        return self._heldout()

    def test_dataloader(self) -> Any:
        return self._heldout()

    def predict_dataloader(self) -> Any:
        return self._heldout()


def encode(
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    where: str = "a prompt",
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt: plain text with the tokenizer's own special tokens, or chat messages by its template.

    Messages that end with one of the assistant's are continued from its end.

    Args:
        problem: the prompt.
        tokenizer: of the policy.
        where: names the prompt in messages.
        variables: for the chat template.

    Raises:
        ValueError: chat messages for a tokenizer without a chat template or that its template refuses, or a prompt
            without tokens.
    """
    if isinstance(problem.prompt, str):
        ids = tokenizer(problem.prompt)["input_ids"]
    else:
        if not tokenizer.chat_template:
            raise ValueError(
                f"{where} is chat messages, but the tokenizer has no chat template: use plain text prompts, or set "
                "data.chat_template"
            )
        begun = problem.prompt[-1]["role"] == "assistant"
        try:
            text = tokenizer.apply_chat_template(
                problem.prompt,
                tokenize=False,
                add_generation_prompt=not begun,
                continue_final_message=begun,
                **(variables or {}),
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"{where}: the chat template refuses its messages: {error}") from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"{where} ({problem.prompt!r}) has no tokens")
    return list(ids)


def _check_template(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> None:
    """Templates ignore variables they do not know, and a thinking switch that does nothing would go unnoticed."""
    if not tokenizer.chat_template:
        raise ValueError("data.chat_template_kwargs is set, but the tokenizer has no chat template")
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ValueError(f"data.chat_template_kwargs sets {name!r}, which the chat template does not mention")

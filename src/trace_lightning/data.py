"""`PromptDataModule`: problems in, tokenised prompts out. It knows nothing of generation.

One batch is one rollout: `batch_size` prompts, of which the Rollout callback makes `batch_size * num_generations`
sequences. The training loader is stateful: order depends on (seed, epoch) alone and its position is part of every
checkpoint, so a resumed run sees the prompts that the unbroken run would have seen (a plain DataLoader silently starts
over).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from transformers import PreTrainedTokenizerBase

from trace_lightning.ranks import together
from trace_lightning.rollout.balance import deal
from trace_lightning.tasks.base import Task
from trace_lightning.types import Problem, Prompt, RolloutBatch

log = logging.getLogger(__name__)


def run_seed() -> int:
    """What `seed_everything` was called with, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


class PromptLoader:
    """Batches of prompts, shuffled per epoch by (seed, epoch), cut over ranks, resumable in mid-epoch."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.prompts, self.batch_size, self.shuffle, self.seed = prompts, batch_size, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = self.position = 0

    def __len__(self) -> int:
        global_batch = self.batch_size * self.world_size
        if self.shuffle:
            return len(self.prompts) // global_batch  # every training step has its full batch
        return -(-len(self.prompts) // global_batch)

    def __iter__(self) -> Iterator[RolloutBatch]:
        # A consumer that counts stops after the last batch without asking for more, so an epoch is closed here.
        if not self.shuffle or self.position >= len(self):
            self.epoch, self.position = self.epoch + (self.position > 0), 0
        order = list(range(len(self.prompts)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(self.prompts), generator=generator).tolist()
        while self.position < len(self):
            start = self.position * self.batch_size * self.world_size
            chosen = order[start : start + self.batch_size * self.world_size]
            shares = deal([len(self.prompts[i].token_ids) for i in chosen], self.world_size)
            self.position += 1
            yield RolloutBatch(prompts=[self.prompts[chosen[i]] for i in shares[self.rank]])

    def state_dict(self) -> dict[str, int]:
        """Epoch and batches already handed out."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class PromptDataModule(pl.LightningDataModule):
    """Training and held-out prompts of a task.

    Args:
        task: problems and their rewards.
        batch_size: prompts per rollout and rank.
        heldout_size: held-out problems used per validation; None takes all.
        eval_batch_size: prompts per validation batch; None takes 8 training batches' worth.
        max_prompt_length: tokens; None allows what the model's context leaves beside the completion.
        overlong_prompts: what to do with longer ones: `error`, `drop` them, or `truncate_left`.
        shuffle_seed: order of the training prompts; None takes the run's seed (`seed_everything`).

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int = 16,
        heldout_size: int | None = None,
        eval_batch_size: int | None = None,
        max_prompt_length: int | None = None,
        overlong_prompts: Literal["error", "drop", "truncate_left"] = "error",
        shuffle_seed: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size} must be at least 1")
        self.task, self.batch_size, self.heldout_size = task, batch_size, heldout_size
        self.eval_batch_size = eval_batch_size or batch_size * 8
        self.max_prompt_length, self.overlong_prompts = max_prompt_length, overlong_prompts
        self.shuffle_seed = shuffle_seed
        self.train_prompts: list[Prompt] = []
        self.heldout_prompts: list[Prompt] = []

    def setup(self, stage: str) -> None:
        """Tokenise what the stage needs.

        Raises:
            ValueError: no problems, fewer than one batch, or an overlong prompt under `error`.
        """
        with together(self.trainer):  # type: ignore[arg-type]
            self._setup(stage)

    def _setup(self, stage: str) -> None:
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        limit = self.max_prompt_length or self._context_left()
        problems = list(self.task.heldout_problems())[: self.heldout_size]
        self.heldout_prompts = self._tokenise(problems, module.tokenizer, limit, "held-out")
        if stage != "fit":
            if not self.heldout_prompts:
                raise ValueError(f"{type(self.task).__name__} has no held-out problems, which `{stage}` runs on")
            return
        self.train_prompts = self._tokenise(list(self.task.train_problems()), module.tokenizer, limit, "training")
        needed = self.batch_size * self.trainer.world_size  # type: ignore[union-attr]
        if len(self.train_prompts) < needed:
            raise ValueError(
                f"{type(self.task).__name__} has {len(self.train_prompts)} training prompts, fewer than one batch of "
                f"{needed} (data.batch_size x ranks). Lower data.batch_size or bring more prompts."
            )

    def _context_left(self) -> int | None:
        """What the model's context leaves for a prompt beside the longest completion."""
        trainer: Any = self.trainer
        context: int | None = trainer.lightning_module.context_length
        samplings = [callback.sampling for callback in trainer.callbacks if hasattr(callback, "sampling")]
        if context is None or not samplings:
            return context
        left: int = context - samplings[0].max_new_tokens
        if left < 1:
            raise ValueError(
                f"sampling.max_new_tokens={samplings[0].max_new_tokens} leaves no room for a prompt in the model's "
                f"context of {context} tokens"
            )
        return left

    def _tokenise(
        self, problems: list[Problem], tokenizer: PreTrainedTokenizerBase, limit: int | None, split: str
    ) -> list[Prompt]:
        prompts, touched = [], 0
        for uid, problem in enumerate(problems):
            ids = encode(problem, tokenizer)
            if limit is not None and len(ids) > limit:
                touched += 1
                if self.overlong_prompts == "error":
                    raise ValueError(
                        f"{split} prompt {uid} has {len(ids)} tokens, the limit is {limit}. Set data.overlong_prompts "
                        "to drop or truncate_left, or lower rollout.sampling.max_new_tokens."
                    )
                if self.overlong_prompts == "drop":
                    continue
                ids = ids[-limit:]
            # Held-out uids are negative, so that no held-out sequence shares its random numbers with a training one.
            prompts.append(Prompt(token_ids=ids, problem=problem, uid=uid if split == "training" else -uid - 1))
        if touched:
            log.warning(
                "%d of %d %s prompts were longer than %s tokens: %s",
                touched,
                len(problems),
                split,
                limit,
                "dropped" if self.overlong_prompts == "drop" else "truncated on the left",
            )
        return prompts

    def train_dataloader(self) -> PromptLoader:
        trainer = self.trainer
        assert trainer is not None
        return PromptLoader(
            self.train_prompts,
            self.batch_size,
            shuffle=True,
            seed=run_seed() if self.shuffle_seed is None else self.shuffle_seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )

    def _heldout(self) -> Any:
        trainer = self.trainer
        assert trainer is not None
        if not self.heldout_prompts:
            return []
        rank, world_size = trainer.global_rank, trainer.world_size
        size = self.eval_batch_size
        return PromptLoader(self.heldout_prompts, size, shuffle=False, rank=rank, world_size=world_size)

    def val_dataloader(self) -> Any:
        return self._heldout()

    def test_dataloader(self) -> Any:
        return self._heldout()

    def predict_dataloader(self) -> Any:
        return self._heldout()


def encode(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt: plain text with the tokenizer's own special tokens, or chat messages by its template.

    Raises:
        ValueError: chat messages for a tokenizer without a chat template, or a prompt without tokens.
    """
    if isinstance(problem.prompt, str):
        ids = tokenizer(problem.prompt)["input_ids"]
    else:
        if not tokenizer.chat_template:
            raise ValueError(
                "the prompts are chat messages, but the tokenizer has no chat template: use plain text prompts"
            )
        text = tokenizer.apply_chat_template(problem.prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(f"the prompt {problem.prompt!r} has no tokens")
    return list(ids)

"""`CompletionsLogger`: the texts themselves. A reward curve that climbs for the wrong reason is seen here first.

Every logged step goes whole into `completions.jsonl`, one completion a line; a few of them are printed. Rank zero
writes its own share only: gathering texts would cost more than a sample of them is worth.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.table import Table
from rich.text import Text

from trace_lightning.callbacks.folder import run_folder, shared_console
from trace_lightning.callbacks.history import json_safe, mean
from trace_lightning.models.pieces import TokenPieces
from trace_lightning.types import Completion, RolloutBatch

_MAX_CELL = 160  # characters; the file has the rest


class CompletionsLogger(Callback):
    """Appends completions to `completions.jsonl` and prints a few.

    A line holds `step` (optimizer steps behind the weights), `split` (`train`, `heldout`, `test` or `predict`;
    `heldout/NAME` for a set of `data.eval_sets`), `reward` and `rewards` by name (null: not scored), `prompt` (text or
    chat messages), `completion`, `reasons` by name where a reward gave one or failed, `finish_reason`,
    `policy_version`, `num_tokens` and `mean_logprob` under the rollout, both of the policy's own tokens, and `tokens`:
    [text, log-prob] of each. The texts together are the completion; a token that only begins a character, or ends the
    completion, has none. A conversation has `turns` instead of `tokens`, each with `source` (`policy` or
    `environment`), `text`, `reward` and, where the policy drew it, its `tokens`.

    Args:
        every_n_steps: training rollouts from one logged to the next; the first and the last are always logged, and
            every validation.
        num_samples: completions printed, spread over the prompts of the batch.
        print_table: whether to print at all.
        token_logprobs: write `tokens`, which `report.html` colours; they make most of the file. Needs the module's
            `tokenizer`.

    Raises:
        ValueError: an argument that is out of range.
    """

    def __init__(
        self, every_n_steps: int = 10, num_samples: int = 4, print_table: bool = True, token_logprobs: bool = True
    ) -> None:
        if every_n_steps < 1 or num_samples < 1:
            raise ValueError(
                f"every_n_steps={every_n_steps} and num_samples={num_samples} must be at least 1; "
                "set print_table=false to print nothing"
            )
        self.every_n_steps, self.num_samples, self.print_table = every_n_steps, num_samples, print_table
        self.token_logprobs = token_logprobs
        self._pieces: TokenPieces | None = None
        self._path: Path | None = None
        self._step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        self._path = None if folder is None else folder / "completions.jsonl"

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the weights that this step starts from."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Log the first, every n-th and the last rollout."""
        last = 0 <= trainer.max_steps <= trainer.global_step
        if last or trainer.fit_loop.total_batch_idx % self.every_n_steps == 0:
            self._log(trainer, pl_module, batch, "train", self._step, show=True)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log all held-out completions; print some of the first batch."""
        self._log(trainer, pl_module, batch, "heldout", trainer.global_step, show=batch_idx == 0)

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """As for validation."""
        self._log(trainer, pl_module, batch, "test", trainer.global_step, show=batch_idx == 0)

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """As for validation; the file is what `predict` is run for."""
        self._log(trainer, pl_module, batch, "predict", trainer.global_step, show=batch_idx == 0)

    def _log(self, trainer: pl.Trainer, module: Any, batch: RolloutBatch, split: str, step: int, *, show: bool) -> None:
        if not trainer.is_global_zero:
            return
        tokenizer = getattr(module, "tokenizer", None) if self.token_logprobs else None
        if tokenizer is not None and self._pieces is None:
            self._pieces = TokenPieces(tokenizer)
        entries = completion_entries(batch, split, step, self._pieces)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                for entry in entries:
                    file.write(json.dumps(json_safe(entry), ensure_ascii=False, allow_nan=False) + "\n")
        if self.print_table and show and entries:
            shared_console().print(completions_table(entries, self.num_samples))


def completion_entries(
    batch: RolloutBatch, split: str, step: int, pieces: TokenPieces | None = None
) -> list[dict[str, Any]]:
    """One plain dict per completion of a filled batch; `tokens` only where there are `pieces` to make them of."""
    if batch.evaluation is not None:
        split = f"{split}/{batch.evaluation.name}"
    rewards = [math.nan] * len(batch.completions) if batch.rewards_B is None else batch.rewards_B.tolist()
    return [
        {
            "step": step,
            "split": split,
            "reward": rewards[i],  # these three first: a reader of many lines needs no more of most of them
            "prompt": prompt.problem.prompt,
            "completion": completion.text,
            "rewards": {name: float(values[i]) for name, values in batch.rewards_by_name.items()},
            "reasons": {name: texts[i] for name, texts in batch.reward_reasons.items() if texts[i]},
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            "num_tokens": completion.num_drawn,
            "mean_logprob": mean([completion.logprobs[t] for turn in completion.drawn for t in turn]),
        }
        | _token_texts(completion, pieces)
        for i, (prompt, completion) in enumerate(batch.sequences())
    ]


def _token_texts(completion: Completion, pieces: TokenPieces | None) -> dict[str, Any]:
    """`tokens`, or of a conversation `turns`."""

    def tokens(start: int, end: int) -> dict[str, Any]:
        if pieces is None:
            return {}
        pairs = zip(pieces(completion.token_ids[start:end]), completion.logprobs[start:end], strict=True)
        return {"tokens": [[text, round(logprob, 4)] for text, logprob in pairs]}

    if not completion.turns:
        return tokens(0, len(completion.token_ids))
    return {
        "turns": [
            {"source": turn.source, "text": turn.text, "reward": turn.reward}
            | (tokens(turn.start, turn.end) if turn.source == "policy" else {})
            for turn in completion.turns
        ]
    }


def completions_table(entries: list[dict[str, Any]], num_samples: int) -> Table:
    """A few entries, evenly spread over the batch so that they belong to different prompts."""
    shown = [entries[i * len(entries) // num_samples] for i in range(min(num_samples, len(entries)))]
    split = {"train": "training", "heldout": "held-out"}.get(entries[0]["split"], entries[0]["split"])
    table = Table(title=f"step {entries[0]['step']}: {split} samples", show_lines=len(shown) > 1 and _is_long(shown))
    table.add_column("prompt", overflow="fold", ratio=2)
    table.add_column("completion", overflow="fold", ratio=3)
    for name in ("reward", "tokens", "log p"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in shown:
        reward, logprob = entry["reward"], entry["mean_logprob"]
        cut = " cut" if entry["finish_reason"] == "length" else ""
        table.add_row(
            Text(shorten(_prompt_text(entry["prompt"]))),  # Text: brackets in a completion are not rich's markup
            Text(shorten(visible(entry["completion"]))),
            "-" if math.isnan(reward) else f"{reward:.3g}",
            f"{entry['num_tokens']}{cut}",
            "-" if logprob is None else f"{logprob:.2f}",
        )
    return table


def _is_long(entries: list[dict[str, Any]]) -> bool:
    return any(len(_prompt_text(e["prompt"])) + len(e["completion"]) > _MAX_CELL // 2 for e in entries)


def _prompt_text(prompt: str | list[dict[str, str]]) -> str:
    return visible(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def visible(text: str) -> str:
    """Text in which line ends can be seen, and in which no control character can disturb a terminal."""
    text = text.replace("\n", "↵ ").replace("\t", " ")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def shorten(text: str, limit: int = _MAX_CELL) -> str:
    """At most `limit` characters: a long text loses its middle, since answers stand at the end."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    return f"{text[: limit - tail - 3]} … {text[-tail:]}"

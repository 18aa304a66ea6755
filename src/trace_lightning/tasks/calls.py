"""One call of a reward function: what it returned is checked, what it raised is kept as a failure.

The only place that catches `Exception`: a reward is other people's code and may raise anything. A return value that no
reward may have (a list of the wrong length, text) is a bug that every row would repeat, so it raises `ValueError`.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Sequence
from typing import Any

from trace_lightning.tasks.base import BatchReward, Failure, FunctionReward, RewardFn, Sample, Score, checked_score

Outcome = Score | Failure


def is_async(reward: RewardFn) -> bool:
    """Whether the reward is written as `async def`."""
    if isinstance(reward, FunctionReward):
        function = reward.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return inspect.iscoroutinefunction(type(reward).__call__) or inspect.iscoroutinefunction(type(reward).score)


def call(reward: RewardFn, samples: Sequence[Sample], first_row: int) -> list[Outcome]:
    """Outcomes of one synchronous call, one per sample.

    Args:
        reward: the function; only a `BatchReward` gets more than one sample.
        samples: what to score.
        first_row: row of the first sample in the rollout, for messages.

    Raises:
        ValueError: a return value that is no reward.
    """
    try:
        returned = reward.score_batch(samples) if isinstance(reward, BatchReward) else [reward.score(samples[0])]
    except Exception as error:
        return failed(error, len(samples))
    return _checked(reward, samples, first_row, returned)


async def call_async(reward: RewardFn, sample: Sample, row: int, time_limit: float) -> list[Outcome]:
    """As `call`, for a reward that is awaited for at most `time_limit` seconds."""
    pending: Any = reward.score(sample)
    try:
        returned = await asyncio.wait_for(pending, time_limit)
    except TimeoutError as error:
        if error.args:  # raised by the reward itself: ours has no message
            return failed(error, 1)
        return [Failure(f"timed out after {time_limit:g} s", timed_out=True)]
    except Exception as error:
        return failed(error, 1)
    return _checked(reward, [sample], row, [returned])


def failed(error: Exception, count: int) -> list[Outcome]:
    """The failure of a call that raised, for each of its samples."""
    text = "".join(traceback.format_exception(error))
    return [Failure(f"raised {type(error).__name__}: {error}", text)] * count


def _checked(reward: RewardFn, samples: Sequence[Sample], first_row: int, returned: Any) -> list[Outcome]:
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        returned = list(returned) if hasattr(returned, "__iter__") else returned
    if not isinstance(returned, Sequence) or len(returned) != len(samples):
        size = f"{len(returned)} values" if isinstance(returned, Sequence) else f"a {type(returned).__name__}"
        last = first_row + len(samples) - 1
        raise ValueError(
            f"reward {reward.name!r}, rows {first_row} to {last}: returned {size} for {len(samples)} completions"
        )
    return [checked_score(reward.name, first_row + i, value) for i, value in enumerate(returned)]

"""Where the time of a step goes, and how many tokens it yields.

Tokens add up over ranks; seconds do not, for ranks work side by side and meet at each weight sync, so the slowest one
sets the pace: seconds reduce by their maximum. That makes merging over *time* (a sum) differ from merging over *ranks*
(a maximum), hence `full_state_update = True`: torchmetrics then never uses the rank reduction to merge two updates, and
refuses `merge_state`. FLOP utilisation is left out: in FP4, with BF16 parts, there is no one peak to relate it to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

PHASES = ("rollout", "reward", "train", "sync", "step")
_TIMED = (*PHASES, "rollout_wait")


class ThroughputMetrics(Metric):
    """Completion tokens per second of the whole job, and seconds per phase and step."""

    full_state_update = True
    tokens: Tensor
    num_steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("tokens", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_steps", torch.tensor(0), dist_reduce_fx="max")
        for phase in _TIMED:
            self.add_state(f"{phase}_seconds", torch.tensor(0.0), dist_reduce_fx="max")

    def update(
        self,
        tokens: int,
        *,
        rollout_seconds: float = 0.0,
        reward_seconds: float = 0.0,
        train_seconds: float = 0.0,
        sync_seconds: float = 0.0,
        step_seconds: float | None = None,
        rollout_wait_seconds: float = 0.0,
    ) -> None:
        """Add one step of this rank.

        Args:
            tokens: completion tokens that this rank generated.
            rollout_seconds: wall time of generation; 0 means not measured, here and below.
            reward_seconds: wall time of scoring.
            train_seconds: wall time of forward, backward and optimizer.
            sync_seconds: wall time of handing the weights to the rollout.
            step_seconds: wall time of the whole step; None takes the sum of the phases, right if none overlap.
            rollout_wait_seconds: wall time for which the trainer waited for a rollout that is drawn ahead.
        """
        seconds = [rollout_seconds, reward_seconds, train_seconds, sync_seconds]
        self.tokens += tokens
        self.num_steps += 1
        seconds += [sum(seconds) if step_seconds is None else step_seconds, rollout_wait_seconds]
        for phase, value in zip(_TIMED, seconds, strict=True):
            setattr(self, f"{phase}_seconds", getattr(self, f"{phase}_seconds") + value)

    def compute(self) -> dict[str, Tensor]:
        """Whatever of these was measured.

        * `timing/<phase>_s`: mean seconds per step of rollout, reward, train, sync, step, and rollout_wait
        * `throughput/rollout_tokens_per_s`, `throughput/step_tokens_per_s`: all ranks' tokens over those seconds
        * `throughput/rollout_share`: share of the step that generation takes
        """
        seconds = {phase: getattr(self, f"{phase}_seconds") for phase in _TIMED}
        seconds = {phase: value for phase, value in seconds.items() if value > 0}
        result = {f"timing/{phase}_s": value / self.num_steps for phase, value in seconds.items()}
        for phase in ("rollout", "step"):
            if phase in seconds:
                result[f"throughput/{phase}_tokens_per_s"] = self.tokens / seconds[phase]
        if {"rollout", "step"} <= seconds.keys():
            result["throughput/rollout_share"] = seconds["rollout"] / seconds["step"]
        return result

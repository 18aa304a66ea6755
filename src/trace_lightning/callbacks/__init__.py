"""Lightning callbacks: the rollout, and what a run shows and leaves behind."""

from trace_lightning.callbacks.rollout import Rollout

__all__ = ["Rollout"]

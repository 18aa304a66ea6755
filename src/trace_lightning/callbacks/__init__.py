"""Lightning callbacks: the rollout, and what a run shows and leaves behind."""

from trace_lightning.callbacks.checkpoint import RunCheckpoint
from trace_lightning.callbacks.completions import CompletionsLogger
from trace_lightning.callbacks.export import HFExport
from trace_lightning.callbacks.progress import RolloutProgressBar
from trace_lightning.callbacks.report import RunReport
from trace_lightning.callbacks.rollout import Rollout
from trace_lightning.callbacks.summary import RunSummary

__all__ = [
    "CompletionsLogger",
    "HFExport",
    "Rollout",
    "RolloutProgressBar",
    "RunCheckpoint",
    "RunReport",
    "RunSummary",
]

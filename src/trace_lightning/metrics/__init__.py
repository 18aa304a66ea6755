"""Metrics: pure functions over masked sums, and torchmetrics classes that merge them over batches and ranks."""

from trace_lightning.metrics.completions import CompletionMetrics
from trace_lightning.metrics.divergence import DivergenceMetrics
from trace_lightning.metrics.functional import divergence_metrics, divergence_sums
from trace_lightning.metrics.reward import RewardMetrics
from trace_lightning.metrics.throughput import ThroughputMetrics

__all__ = [
    "CompletionMetrics",
    "DivergenceMetrics",
    "RewardMetrics",
    "ThroughputMetrics",
    "divergence_metrics",
    "divergence_sums",
]

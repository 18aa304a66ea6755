"""Metrics: pure functions over masked sums, and torchmetrics classes that merge them over batches and ranks."""

from trace_lightning.metrics.audit import audit_metrics, audit_values, inner_step_metrics, layer_rows, site_means
from trace_lightning.metrics.completions import CompletionMetrics
from trace_lightning.metrics.divergence import DivergenceMetrics
from trace_lightning.metrics.evaluation import evaluation_values, pass_at_k
from trace_lightning.metrics.functional import argmax_agreement, divergence_metrics, divergence_sums
from trace_lightning.metrics.positions import PositionMetrics, PositionSlope, position_curve, position_slope
from trace_lightning.metrics.reward import RewardMetrics
from trace_lightning.metrics.step import StepMetrics
from trace_lightning.metrics.throughput import ThroughputMetrics
from trace_lightning.metrics.turns import TurnMetrics

__all__ = [
    "CompletionMetrics",
    "DivergenceMetrics",
    "PositionMetrics",
    "PositionSlope",
    "RewardMetrics",
    "StepMetrics",
    "ThroughputMetrics",
    "TurnMetrics",
    "argmax_agreement",
    "audit_metrics",
    "audit_values",
    "divergence_metrics",
    "divergence_sums",
    "evaluation_values",
    "inner_step_metrics",
    "layer_rows",
    "pass_at_k",
    "position_curve",
    "position_slope",
    "site_means",
]

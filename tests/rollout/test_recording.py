"""Guidance over one `generate`; what a record holds is tested in tests/quantization/test_guidance.py."""

from __future__ import annotations

import pytest
import torch

from trace_kernels import NVFP4
from trace_lightning.quantization.record_layout import SiteShape
from trace_lightning.quantization.record_views import StepRecorder
from trace_lightning.quantization.recorder import GuidanceRecorder, Rows
from trace_lightning.recipe import GuidanceConfig
from trace_lightning.rollout.kv_pool import PagedKV
from trace_lightning.rollout.recording import RolloutRecording

CPU = torch.device("cpu")
SITES = {(0, "attn_in"): SiteShape(NVFP4(), 32)}


def test_steps_of_an_interrupted_call_are_forgotten() -> None:
    """They would shift the next window in its ring, or write beyond its end."""
    config = GuidanceConfig(mode="full", audit_sequences=0)
    steps = StepRecorder(SITES, config, rows=2, window=2, device=CPU)
    steps.end_step()
    steps.end_step()  # and then the caller was interrupted
    shape = {"num_pages": 1, "page_size": 16, "num_kv_heads": 1, "head_dim": 32}
    kv = PagedKV([None], **shape, dtype=torch.float32, device=CPU)
    recording = RolloutRecording(GuidanceRecorder(config, SITES, CPU), kv, steps)
    q = NVFP4().quantize(torch.randn(2, 32))
    for _ in range(2):
        steps.add(0, "attn_in", q)
        steps.end_step()
    audited = torch.zeros(2, dtype=torch.bool)
    assert recording.recorder.add_steps(steps, 2, audited).tolist() == [[0, 1], [2, 3]]
    table = recording.finish(policy_version=0).tables[0, "attn_in"]
    assert torch.equal(table.scale, q.scale.repeat(2, 1))  # type: ignore[union-attr]


@pytest.mark.gpu
def test_rows_reach_pinned_memory_whole() -> None:
    """Copies do not wait, the matrix grows while some are on their way, and `finish` has them all."""
    rows = Rows(4096, torch.device("cpu"), expected=1)
    parts = [torch.randint(256, (n, 4096), dtype=torch.uint8, device="cuda") for n in (3, 4000, 5, 9000)]
    for part in parts:
        rows.append(part)
    assert torch.equal(rows.finish(), torch.cat(parts).cpu())

"""DDP and FSDP2 over NCCL: the same run twice."""

from __future__ import annotations

import pytest
import torch

from ranks import launch, worker


@pytest.mark.multi_gpu
def test_ddp_and_fsdp2_are_the_same_run(tmp_path) -> None:
    """Both add two gradients, and a snapshot has the same bytes from whole and from gathered weights."""
    launch.run(worker.on_gpus, 2, tmp_path, tmp_path, "plain", "builtin:tiny-qwen3", "ddp", "fsdp2", gpus=True)
    for rank in (0, 1):
        ddp, fsdp2 = (torch.load(tmp_path / f"{kind}_{rank}.pt", map_location="cpu") for kind in ("ddp", "fsdp2"))
        assert ddp["drawn"][0] == fsdp2["drawn"][0]
        for name, value in ddp["state"].items():
            torch.testing.assert_close(fsdp2["state"][name], value, atol=1e-4, rtol=0, msg=name)

"""`--trainer.strategy fsdp2`: Lightning's ModelParallelStrategy as this library uses it.

By default that strategy splits every layer over the GPUs of a node (tensor parallelism) and writes a checkpoint as a
folder of shards. Here all ranks share one data-parallel dimension, and a checkpoint is one file of whole, plain
tensors, which every other strategy and number of ranks opens.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout  # type: ignore[attr-defined]
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry


class FSDP2Strategy(ModelParallelStrategy):
    """Weights, gradients and optimizer states cut over all ranks by `fully_shard`, layer by layer.

    Args:
        process_group_backend: `nccl` or `gloo`; default: what suits the device.
        timeout: how long a rank waits for the others in a collective.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Start the process group with one data-parallel dimension over all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, after a look at whether it is this model's: here the weights are loaded before any hook is called."""
        path = Path(self.broadcast(checkpoint_path))
        check = getattr(self.lightning_module, "check_weights", None)
        if check is not None and path.is_file():
            check(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["state_dict"])
        return super().load_checkpoint(checkpoint_path, weights_only)


def check_strategy(trainer: pl.Trainer, *, adapters: bool = False) -> None:
    """Refuse what this library cannot run or resume.

    Raises:
        ValueError: tensor parallelism, checkpoints as folders of shards, or a frozen base cut over ranks.
    """
    strategy = trainer.strategy
    if adapters and isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            "model.lora holds its base packed and frozen, which trainer.strategy=fsdp2 cannot cut over ranks: use "
            "trainer.strategy=ddp, where each rank holds a copy and only adapters have gradients and optimizer states"
        )
    if not isinstance(strategy, ModelParallelStrategy) or isinstance(strategy, FSDP2Strategy):
        return
    if strategy._tensor_parallel_size != 1 or strategy._save_distributed_checkpoint:
        raise ValueError(
            "trainer.strategy=ModelParallelStrategy splits single layers over GPUs and writes shards by default, and "
            "neither is supported: use trainer.strategy=fsdp2, or set tensor_parallel_size=1 and "
            "save_distributed_checkpoint=false"
        )


if "fsdp2" not in StrategyRegistry:
    StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all ranks (trace-lightning)")

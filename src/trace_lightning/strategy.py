"""`--trainer.strategy fsdp2`: Lightning's ModelParallelStrategy as this library uses it.

By default that strategy splits every layer over the GPUs of a node (tensor parallelism) and writes a checkpoint as a
folder of shards. Here all ranks share one data-parallel dimension, and a checkpoint is one file of whole, plain
tensors, which every other strategy and number of ranks opens.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout  # type: ignore[attr-defined]
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry


class FSDP2Strategy(ModelParallelStrategy):
    """Weights, gradients and optimizer states cut over all ranks by `fully_shard`, layer by layer.

    Args:
        process_group_backend: `nccl` or `gloo`; default: what suits the device.
        timeout: how long a rank waits for the others in a collective.
        keep_gathered: leave layers whole from the first micro-batch of an optimizer step to the last. They are then
            gathered once per step, not twice per micro-batch; for that time every GPU holds all masters (4 bytes per
            parameter). Gradients and optimizer states stay cut.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        keep_gathered: bool = False,
    ) -> None:
        self.keep_gathered = keep_gathered
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


if "fsdp2" not in StrategyRegistry:
    StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all ranks (trace-lightning)")

"""One fused linear of the rollout over the trainer's own frozen base, with the adapters of its parts beside it.

    base   the policy's packed tensor (or, unquantised, its plain one): the same storage, nothing is copied
    A      [sum R, K]        the adapters of q, k, v one below the other
    s B    [sum N_i, sum R]  on the diagonal, zeros elsewhere: one low-rank product for the whole group
    y = sum of the base's parts, rounded, + s B (A x)         the casts of `AdapterLinear`

A sync copies A and B and nothing else. There is no BF16 copy of the base for batches too large to unpack codes for:
it is made for each such matmul and let go of, which costs 2.6 bytes of traffic per weight beside the matmul's own 2;
the number of rows from which that pays is measured accordingly, and is higher than with a copy.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trace_kernels import get_format
from trace_kernels.low_rank import expand
from trace_lightning.quantization.lora import AdapterLinear, add_low_rank, base_values, merge
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.rollout.snapshot import SnapshotLinear


class SharedLinear(SnapshotLinear):
    """A group of `AdapterLinear`s, in the order in which its base holds them, as one matmul."""

    makes_dense: ClassVar[bool] = True

    def __init__(self, linears: list[tuple[str, AdapterLinear]], dtype: torch.dtype) -> None:
        self.group, self.state = linears[0][1].group, linears[0][1].state
        group = self.group
        self.names, self.dtype = [name for name, _ in linears], dtype
        if [module for _, module in linears] != group.members:
            raise ValueError(
                f"recipe.exclude splits the fused group {self.names}, whose base is one tensor: exclude all of its "
                "linears or none"
            )
        assert group.base is not None
        self.base = group.base
        self.shape, self.crossover = (len(self.base), linears[0][1].in_features), 0
        self.packed = self.base if isinstance(self.base, PackedFP4Tensor) else None
        self.format = None if self.packed is None else get_format(self.packed.format.name)
        biases = [module.bias.detach().to(dtype) for _, module in linears if module.bias is not None]
        self.bias, self.bias_parts = torch.cat(biases) if biases else None, {}
        self.rows = {name: module.rows for name, module in linears}
        ranks = {name: len(module.lora_A) for name, module in linears if module.lora_A is not None}
        total, device = sum(ranks.values()), self.base.device
        self.a = torch.zeros(total, self.shape[1], dtype=dtype, device=device)
        self.b = torch.zeros(self.shape[0], total, dtype=dtype, device=device)
        ends = torch.tensor([0, *ranks.values()]).cumsum(0).tolist()
        self.places = {name: slice(*ends[i : i + 2]) for i, name in enumerate(ranks)}

    @property
    def is_stale(self) -> bool:
        """Whether the policy has put its base elsewhere."""
        return self.group.base is not self.base

    @property
    def weight_names(self) -> list[str]:
        """Names of the adapters' tensors: all that a sync brings."""
        return [f"{name}.{matrix}" for name in self.places for matrix in ("lora_A", "lora_B")]

    def load(self, tensors: dict[str, Tensor], *, quantize: bool) -> None:
        """Copy the adapters to the addresses held before; the base is what it is, packed or not."""
        for name, place in self.places.items():
            self.a[place].copy_(tensors[f"{name}.lora_A"])
            self.b[self.rows[name], place].copy_(tensors[f"{name}.lora_B"] * self.state.scaling)

    def dense(self) -> Tensor:
        return base_values(self.base, self.dtype)

    def master(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        weight = base_values(self.base[self.rows[name]], torch.promote_types(self.base.dtype, torch.float32))
        if name not in self.places:
            return weight
        return merge(weight, tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], self.state.scaling)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum [1, M, N] in the compute dtype, or the base's parts where nothing is adapted."""
        parts = super().__call__(x)
        if not self.places:
            return parts
        if x.ndim == 2:
            return add_low_rank(parts[0], x, self.a, self.b).unsqueeze(0)
        plain = x.permute(2, 0, 3, 1).flatten(1)[:, : self.shape[1]]  # it came permuted for the packed weights
        return expand(parts, F.linear(plain, self.a), self.b).unsqueeze(0)

"""What a step logs, on the host.

Lightning keeps a logged value where it is. On a GPU a hundred values of a step are then a hundred small tensors, each
made, copied and read back by itself while the GPU has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def host_scalars(values: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """The same scalars as CPU tensors, dtypes kept, numbers as FP32: one copy for all that lie on a device."""
    found = {
        name: value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        for name, value in values.items()
    }
    far = {name: value for name, value in found.items() if not value.is_cpu}
    if far:
        row = torch.stack([value.double().reshape(()) for value in far.values()]).cpu()
        found |= {name: row[i].to(value.dtype) for i, (name, value) in enumerate(far.items())}
    return found

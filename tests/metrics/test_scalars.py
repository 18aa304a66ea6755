"""Values of a step on the host."""

from __future__ import annotations

import pytest
import torch

from trace_lightning.metrics.scalars import host_scalars


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_names_order_dtypes_and_values_are_kept(device: str) -> None:
    given = {
        "number": 0.5,
        "single": torch.tensor(0.1, device=device),
        "count": torch.tensor(2**40 + 1, device=device),
        "row": torch.tensor([1.5], dtype=torch.float64, device=device),
        "here": torch.tensor(True),
    }
    found = host_scalars(given)
    assert list(found) == list(given)
    assert all(value.is_cpu for value in found.values())
    for name, value in given.items():
        expected = torch.tensor(value) if isinstance(value, float) else value.cpu()
        assert found[name].dtype == expected.dtype
        assert found[name].item() == expected.item()
    assert host_scalars({}) == {}
